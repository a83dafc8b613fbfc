"""Reports over many runs: tables, pictures and one page of them, made of what the runs recorded."""

from duoexp.report.page import write

__all__ = ["write"]
