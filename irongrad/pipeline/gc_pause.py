"""Python's garbage collector, and compiling."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# New objects, less those that are gone, from one look for garbage to the next; some 20 MB. Python has 700.
_ALLOCATIONS = 200_000


@contextmanager
def few_collections() -> Iterator[None]:
    """Keep the garbage collector from going through graphs in use, and all that torch is made of, again and again.

    That took a tenth of the time here, and the first step after it took another collection of everything.
    """
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(_ALLOCATIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
