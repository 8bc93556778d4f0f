"""The kernels of ours that a pass adds to a module: equal ones are added once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from iree.compiler import ir

K = TypeVar("K", bound=Hashable)


class Kernels(Generic[K]):
    """The kernels of a module; equal launches share one."""

    def __init__(self, module: ir.Module, write: Callable[[K, str], object], named: Callable[[K, int], str]) -> None:
        """Begin without kernels.

        Args:
            module: gets the kernels at its beginning.
            write: inserts a kernel of a name at the current insertion point.
            named: the name of a kernel, of which there are so many before.
        """
        self._start = ir.InsertionPoint.at_block_begin(module.body)
        self._write, self._named = write, named
        self._found: dict[K, str] = {}

    @property
    def count(self) -> int:
        """How many kernels there are."""
        return len(self._found)

    def entry_point(self, kernel: K) -> ir.ArrayAttr:
        """The `entry_points` attribute of a dispatch of `kernel`; the kernel is added to the module on first use."""
        if kernel not in self._found:
            name = self._named(kernel, len(self._found))
            with self._start, ir.Location.unknown():
                self._write(kernel, name)
            self._found[kernel] = name
        return ir.ArrayAttr.get([ir.SymbolRefAttr.get([self._found[kernel]] * 2)])
