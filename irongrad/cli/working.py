"""The line that says what a command does while it runs, and for how long it has run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from irongrad.cli.common import console


@dataclass
class Work:
    """What a command does at the moment, with the time that has passed since it began.

    `perf_counter` is bound when this file is imported: the capture lets the clocks of `time` show a later time.
    """

    what: str
    began: float = field(default_factory=perf_counter)

    def __rich__(self) -> str:
        return f"{self.what}, {perf_counter() - self.began:.0f} s so far"


@contextmanager
def working(what: str, *, quiet: bool = False) -> Iterator[None]:
    """While open, say on a terminal what the command does, unless it is to be quiet."""
    if quiet:
        yield
        return
    with console.status(Work(what)):
        yield
