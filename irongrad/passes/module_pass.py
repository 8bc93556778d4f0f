"""What a pass over IREE's module is: a frozen dataclass whose fields are its options, and a `run` that edits a module.

The counterpart of `irongrad.passes.base` one level down. `pipeline/iree/phases.py` is the table of these passes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from iree.compiler import ir

from irongrad.passes.base import PassResult
from irongrad.runtime.manifest import EntryPoint
from irongrad.targets import Target


@dataclass(frozen=True)
class ModuleContext:
    """What a module is being compiled for.

    Attributes:
        target: the target.
        data_tiling: whether IREE packs the operands of matrix products. A remedy for a failed compilation turns it off.
        entry_points: the exported functions.
    """

    target: Target
    data_tiling: bool
    entry_points: Sequence[EntryPoint] = ()


class ModulePass(ABC):
    """A rewrite of IREE's module between two of its phases, in place.

    A subclass is a frozen dataclass in a file of its own that ends with `PASS = ThatClass`. Its typed fields with
    defaults are the options that `irongrad opt --pass name{field=value}` sets. Its docstring shows a before and an
    after.

    Attributes:
        name: as the command line spells it.
        required: why the module is wrong or does not compile without the pass, where it applies; empty for a pass that
            only makes it faster or smaller, which `--disable-pass` can leave out.
    """

    name: ClassVar[str]
    required: ClassVar[str] = ""

    @classmethod
    def of_context(cls, context: ModuleContext) -> Self:
        """The pass with options that suit `context`."""
        return cls()

    def applies(self, context: ModuleContext) -> bool:
        """Whether the pass is for modules like this one."""
        return True

    @abstractmethod
    def run(self, module: ir.Module) -> PassResult:
        """Rewrite `module`, in its own context, and say what was done."""
