"""Keep slices out of kernels for which IREE has no code."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.barriers import hold, hold_behind
from irongrad.mlir.linalg import PRODUCTS, inputs_of, is_elementwise, producer_of, reduces, size_of, source_of
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModulePass

_SLICE = "tensor.extract_slice"
_LOOKUP = "tensor.extract"

_HALVES = ("bf16", "f16")

# A part is small if the whole has this many times its elements.
_SMALL = 64


@dataclass(frozen=True)
class KeepSlicesApart(ModulePass):
    """Copy a slice before the kernel that reads it, if IREE has no code for both in one kernel.

    Before:
        %s = tensor.extract_slice %x[0, 1] [8, 1] [1, 1]; %r = linalg.generic {... tensor.extract %s[%i] ...}
    After:
        %s = tensor.extract_slice ...; %held = util.optimization_barrier %s; %r = linalg.generic {... %held[%i] ...}

    There are five kinds. tests/passes/module/test_keep_slices_apart.py tells when IREE has code for them.

    * Elements are looked up in a slice with gaps between its elements. IREE 3.13.0 takes the slice into the kernel and
      vectorises the lookups as `vector.gather` from memory with gaps: "LLVM Translation failed for operation:
      builtin.unrealized_conversion_cast".
    * A slice of a tensor of any size is read beside the result of a reduction, as in `x[:, -1] + x.mean(1)`. IREE
      3.13.0 joins dimensions of the reduction, but not those of the slice (CollapseDimensions.cpp), and divides no work
      over a reshape: "write affecting operations on global resources are restricted to workgroup distributed contexts".
    * A slice with a stride has elements that are computed from narrower ones, as in a convolution of bfloat16 with a
      stride. IREE 3.13.0 computes all elements in each kernel that reads some, on the stack: "'memref.alloca' op stack
      allocation size overflows 64 bits" of any size, and "exceeded stack allocation limit" of a large known one.
    * A small part is taken of elements that are computed from narrower ones, as by `x.float()[0]`. IREE 3.13.0 computes
      all elements in each kernel that reads the part. It tiles that kernel for them, and unrolls the rest: a
      Transformer with dropout took minutes to compile in bfloat16.
    * A product reads a slice of numbers in 16 bits with gaps, as one tap of a convolution's weight.
      IREE 3.13.0 packs it where it lies, by a shuffle for each number. LLVM then takes minutes for the kernel
      (`VectorCombine::foldShuffleToIdentity`).
    """

    name: ClassVar[str] = "keep-slices-apart"
    required: ClassVar[str] = "the module may not compile without it"

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        widened = [op for op in inside(module.operation) if op.name == _SLICE and _is_widened_to_hold(op)]
        for operation in widened:
            hold_behind(operation.results[0])
        slices: dict[Any, list[tuple[Any, int]]] = {}
        for operation in inside(module.operation):
            for place in _slices_to_hold(operation):
                slices.setdefault(operation.operands[place], []).append((operation, place))
        for value, readers in slices.items():
            held = hold(value, ir.InsertionPoint.after(value.owner))
            for reader, place in readers:
                reader.operands[place] = held
        held_slices = len(widened) + len(slices)
        return PassResult(held_slices > 0, {"held": held_slices})


def _slices_to_hold(operation: Any) -> list[int]:
    """The operands of an operation that are such slices."""
    if operation.name == _LOOKUP:
        return [0] if _has_gaps(source_of(operation.operands[0])) else []
    if operation.name in PRODUCTS:
        return [place for place, value in enumerate(inputs_of(operation)) if _is_half_with_gaps(value)]
    if not is_elementwise(operation):
        return []
    inputs = inputs_of(operation)
    slices = [place for place, value in enumerate(inputs) if _is_slice_of_any_size(value)]
    return slices if slices and any(_is_reduced(value) for value in inputs) else []


def _is_widened_to_hold(taken: Any) -> bool:
    """Whether a slice takes a small part, or every so many, of elements that are computed from narrower ones."""
    source = source_of(taken.operands[0])
    while producer_of(source) == _SLICE:
        source = source_of(source.owner.operands[0])
    if producer_of(source) is None or not is_elementwise(source.owner):
        return False
    widens = any(op.name.startswith("arith.ext") for op in source.owner.regions[0].blocks[0])
    is_strided = any(stride != 1 for stride in taken.attributes["static_strides"])
    is_small = size_of(taken.results[0]) * _SMALL <= size_of(source) < inf
    is_of_any_size = not taken.results[0].type.has_static_shape
    return (is_strided and _is_wider(source.owner)) or (widens and (is_small or (is_strided and is_of_any_size)))


def _is_wider(operation: Any) -> bool:
    """Whether an element of the result has more bits than one of any input of as many dimensions."""
    result = operation.results[0].type
    bits = [_bits(value.type) for value in inputs_of(operation) if value.type.rank == result.rank]
    return bool(bits) and max(bits) < _bits(result)


def _bits(tensor: Any) -> int:
    """The bits of an element; 64 of an index."""
    return int(getattr(tensor.element_type, "width", 64))


def _is_slice_of_any_size(value: Any) -> bool:
    taken = source_of(value)
    return producer_of(taken) == _SLICE and not taken.owner.operands[0].type.has_static_shape


def _is_reduced(value: Any) -> bool:
    """Whether `value` is computed by a reduction, and elementwise operations behind it, which fuse into one kernel."""
    seen, rest = set(), [value]
    while rest:
        owner = source_of(rest.pop()).owner
        if isinstance(owner, ir.Block) or owner.operation in seen:
            continue
        seen.add(owner.operation)
        if reduces(owner.operation):
            return True
        if is_elementwise(owner.operation):
            rest.extend(inputs_of(owner.operation))
    return False


def _is_half_with_gaps(value: Any) -> bool:
    return str(value.type.element_type) in _HALVES and _has_gaps(source_of(value))


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
