"""Decoding loops of other libraries, measured like a schedule of this one."""
