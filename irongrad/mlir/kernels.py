"""The kernels of ours that a pass adds to a module: equal ones are added once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from iree.compiler import ir

from irongrad.mlir.walk import text_of

K = TypeVar("K")


class Kernels(Generic[K]):
    """The kernels of a module; equal launches share one."""

    def __init__(
        self,
        module: ir.Module,
        executable_of: Callable[[K, str], Any],
        named: Callable[[K, int], str],
        *,
        by_code: bool = False,
    ) -> None:
        """Begin without kernels.

        Args:
            module: gets the kernels at its beginning.
            executable_of: makes the executable of a kernel that has a name, outside of any block.
            named: the name of a kernel, of which there are so many before.
            by_code: kernels are equal if their code is. By default, they are if they compare equal.
        """
        self._start = ir.InsertionPoint.at_block_begin(module.body)
        self._executable_of, self._named, self._by_code = executable_of, named, by_code
        self._found: dict[Hashable, str] = {}

    @property
    def count(self) -> int:
        """How many kernels there are."""
        return len(self._found)

    def entry_point(self, kernel: K) -> ir.ArrayAttr:
        """The `entry_points` attribute of a dispatch of `kernel`; the kernel is added to the module on first use."""
        with ir.Location.unknown(self._start.block.owner.context):
            key = self._code_of(kernel) if self._by_code else kernel
            if key not in self._found:
                name = self._named(kernel, len(self._found))
                self._start.insert(self._executable_of(kernel, name))
                self._found[key] = name
        return ir.ArrayAttr.get([ir.SymbolRefAttr.get([self._found[key]] * 2)])

    def _code_of(self, kernel: K) -> str:
        """The code of a kernel; all have the same name in it."""
        executable = self._executable_of(kernel, "kernel")
        code = text_of(executable)
        executable.erase()
        return code
