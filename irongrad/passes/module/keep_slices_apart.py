"""Keep a slice with gaps out of the kernel that looks elements up in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import hold
from irongrad.mlir.linalg import source_of
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_SLICE = "tensor.extract_slice"
_LOOKUP = "tensor.extract"


@dataclass(frozen=True)
class KeepSlicesApart(ModulePass):
    """Copy a slice with gaps between its elements before a kernel looks elements up in it.

    Before:
        %s = tensor.extract_slice %x[0, 1] [8, 1] [1, 1]; %r = linalg.generic {... tensor.extract %s[%i] ...}
    After:
        %s = tensor.extract_slice ...; %held = util.optimization_barrier %s; %r = linalg.generic {... %held[%i] ...}

    IREE 3.13.0 takes the slice into the kernel and vectorises the lookups as `vector.gather` from memory with gaps. It
    has no code for that: "LLVM Translation failed for operation: builtin.unrealized_conversion_cast".
    tests/passes/module/test_keep_slices_apart.py tells when it has.
    """

    name: ClassVar[str] = "keep-slices-apart"
    required: ClassVar[str] = "the module may not compile without it"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        lookups = [op for op in inside(module.operation) if op.name == _LOOKUP]
        slices: dict[Any, list[Any]] = {}
        for lookup in lookups:
            value = lookup.operands[0]
            if _has_gaps(source_of(value)):
                slices.setdefault(value, []).append(lookup)
        for value, readers in slices.items():
            held = hold(value, ir.InsertionPoint.after(value.owner))
            for reader in readers:
                reader.operands[0] = held
        return PassResult(bool(slices), {"held": len(slices)})


def _has_gaps(value: Any) -> bool:
    """Whether `value` is a slice whose neighbours along its last dimension are none in its source."""
    if isinstance(value.owner, ir.Block) or value.owner.name != _SLICE:
        return False
    sizes, strides = (list(value.owner.attributes[name]) for name in ("static_sizes", "static_strides"))
    source = ir.ShapedType(value.owner.operands[0].type)
    for size, stride, whole in reversed(list(zip(sizes, strides, source.shape, strict=True))):
        if size != 1:
            return bool(stride != 1)
        if whole != 1:
            return True
    return False


PASS = KeepSlicesApart
