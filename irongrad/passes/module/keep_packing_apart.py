"""Pack an operand of a product in a kernel of its own where IREE would pack it at the wrong places.

With data tiling, IREE packs an operand in the kernel that computes it, if it can. Such a kernel often computes several
dimensions as one: rows of 31 in each of 3 batches as 93 rows. IREE 3.13.0 then packs the 93 rows instead of the 31, if
both take as many tiles: six tiles of 16 rows. But each batch of 31 has to begin with a tile of its own. The product is
wrong, and IREE reports nothing ("error 173, allowed 0.000536" for `torch.bmm(x.permute(1, 2, 0), y)`).

The fault is in `bubbleUpPackOpThroughExpandShape` of MLIR's DataLayoutPropagation.cpp, which does not ask whether tiles
divide the rows. IREE's pass iree-codegen-cpu-propagate-data-layout runs it.
tests/passes/module/test_keep_packing_apart.py tells when it is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Any, ClassVar

from iree.compiler import ir

from irongrad.mlir.device import cpu_of
from irongrad.mlir.linalg import producer_of
from irongrad.mlir.walk import PACKING, around, executable_of, name_of, named_in
from irongrad.passes.base import PassResult
from irongrad.passes.module_pass import ModuleContext, ModulePass
from irongrad.runtime.errors import InternalError

_ENCODE = "iree_encoding.set_encoding"
_EXPAND = "tensor.expand_shape"
_STORE = "iree_tensor_ext.dispatch.tensor.store"

# IREE 3.13.0's sizes of tiles, of all element types (enumerateMatmulTile* in compiler/src/iree/compiler/Codegen/
# ExternalInterfaces/CPUEncodingExternalModels.cpp). Other architectures have others, such as 7, or vectors of any size.
_TILES = (2, 4, 8, 16)
_OF_TILES = frozenset({"x86_64", "aarch64"})


@dataclass(frozen=True)
class KeepPackingApart(ModulePass):
    """Pack an operand of a product outside of the kernel that computes it, if the kernel could pack it wrongly.

    Before:
        %packed = flow.dispatch @transpose(%x) : -> tensor<3x31x16xf32, #left>  // of 93 rows
    After:
        %operand = flow.dispatch @transpose(%x) : -> tensor<3x31x16xf32>; %packed = flow.tensor.encode %operand

    Left alone: operands that take more tiles in batches than together, whatever the tiles. If a size is known at run
    time alone, no operand is.
    """

    name: ClassVar[str] = "keep-packing-apart"
    required: ClassVar[str] = "IREE packs some operands of products at wrong places"

    def applies(self, context: ModuleContext) -> bool:
        """With data tiling; without it IREE packs nothing."""
        return context.data_tiling

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        known = cpu_of(module)[0] in _OF_TILES
        encodings = [op for op in named_in(module, _ENCODE) if _may_be_wrong(op, known)]
        for encoding in encodings:
            _pack_outside(module, encoding)
        return PassResult(bool(encodings), {"apart": len(encodings)})


def _may_be_wrong(encoding: Any, known: bool) -> bool:
    """Whether an operation packs the result of an expansion for a store, and IREE could pack what is expanded.

    Args:
        encoding: the operation.
        known: as for `_takes_as_many_tiles`.
    """
    value = encoding.operands[0]
    if producer_of(value) != _EXPAND or any(use.owner.name != _STORE for use in encoding.results[0].uses):
        return False
    kind = ir.RankedTensorType(value.type)
    groups = ir.ArrayAttr(value.owner.attributes["reassociation"])
    sizes = [[None if kind.is_dynamic_dim(d.value) else kind.shape[d.value] for d in group] for group in groups]
    return any(_takes_as_many_tiles(group, known) for group in sizes)


def _takes_as_many_tiles(sizes: Sequence[int | None], known: bool) -> bool:
    """Whether dimensions together could take as many tiles as their last one alone, where tiles do not divide it.

    That is so if all the padding of the last dimension is less than a tile.

    Args:
        sizes: the sizes of the dimensions; None for one that is known at run time alone.
        known: whether tiles have the sizes `_TILES`. Otherwise they have any.
    """
    if None in sizes:
        return sizes[:-1] != [1] * (len(sizes) - 1)
    *outer, last = (size for size in sizes if size is not None)
    tiles = _TILES if known else range(2, last + 2)
    return prod(outer) > 1 and any(0 < prod(outer) * (-last % tile) < tile for tile in tiles)


def _pack_outside(module: ir.Module, encoding: Any) -> None:
    """Have a kernel store the operand of `encoding` instead of its result, and pack it behind each launch."""
    plain, (packed,) = encoding.operands[0], encoding.results
    for use in list(packed.uses):
        argument = _stored_to(use.owner, plain)
        for dispatch in _launches_of(module, argument.owner):
            _pack_behind(dispatch, _result_of(dispatch, argument.arg_number), plain.type)
    encoding.erase()


def _stored_to(store: Any, value: Any) -> Any:
    """Have a `dispatch.tensor.store` store `value`, of another type; return the kernel's argument that it writes."""
    target = store.operands[1]
    argument = target if isinstance(target.owner, ir.Block) else target.owner.operands[0]
    kind = ir.Type.parse(f"!iree_tensor_ext.dispatch.tensor<writeonly:{value.type}>")
    for written in {target, argument}:
        written.set_type(kind)
    store.operands[0] = value
    signature = ir.FunctionType.get([a.type for a in argument.owner.arguments], [])
    argument.owner.owner.attributes["function_type"] = ir.TypeAttr.get(signature)
    return argument


def _launches_of(module: ir.Module, block: Any) -> list[Any]:
    """The launches of the kernel with the body `block`."""
    (executable,) = (op for op in around(block) if op.name == "flow.executable")
    return [op for op in named_in(module, "flow.dispatch") if executable_of(op) == name_of(executable)]


def _result_of(dispatch: Any, place: int) -> Any:
    """The result of a launch that the kernel writes to its argument number `place`."""
    _, arguments, *_ = ir.DenseI32ArrayAttr(dispatch.attributes["operandSegmentSizes"])
    own = [result for result, tied in zip(dispatch.results, _tied(dispatch), strict=True) if tied < 0]
    return own[place - arguments]


def _tied(dispatch: Any) -> list[int]:
    """For each result of a launch, the argument whose memory it takes; -1 for memory of its own."""
    if "tied_operands" not in dispatch.attributes:
        return [-1] * len(dispatch.results)
    return [ir.IntegerAttr(place).value for place in ir.ArrayAttr(dispatch.attributes["tied_operands"])]


def _pack_behind(dispatch: Any, result: Any, kind: Any) -> None:
    """Give a result of a launch the type `kind`, and have its readers read it packed."""
    packed, uses = result.type, [(use.owner, use.operand_number) for use in result.uses]
    sizes = _sizes(dispatch, result)
    result.set_type(kind)
    with dispatch.location, ir.InsertionPoint.after(dispatch):
        segments = {"operandSegmentSizes": ir.DenseI32ArrayAttr.get([1, len(sizes), len(sizes)])}
        new = ir.Operation.create(PACKING, [packed], [result, *sizes, *sizes], segments).result
    for user, place in uses:
        user.operands[place] = new


def _sizes(dispatch: Any, result: Any) -> list[Any]:
    """The sizes of a launch's result that are known at run time alone."""
    *_, count = ir.DenseI32ArrayAttr(dispatch.attributes["operandSegmentSizes"])
    sizes = iter(list(dispatch.operands)[len(dispatch.operands) - count :])
    for other in dispatch.results:
        own = list(islice(sizes, sum(map(other.type.is_dynamic_dim, range(other.type.rank)))))
        if other == result:
            return own
    raise InternalError("a launch has no such result")


PASS = KeepPackingApart
