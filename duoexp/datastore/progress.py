"""What a person sees while a datastore is made."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def shown(what: str) -> Iterator[Callable[[str, float], None]]:
    """Prints `what`; then a bar, where there is a terminal, that moves with calls of (what is done, how much of it)."""
    console = Console(highlight=False, soft_wrap=True)
    console.print(what, markup=False)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda step, share: bar.update(task, description=step, completed=share)
