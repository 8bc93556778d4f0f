"""The operands of contractions that are packed into tiles.

With data tiling, IREE 3.13.0 packs both operands of a contraction into tiles. It also packs the other inputs of
elementwise code in the contraction's kernel, in the layout of the product. A packed buffer lives until the product is
computed. Contractions that read a value packed alike share one packing. If a packing is the only reader of a value, the
kernel that computes the value writes it packed
(compiler/src/iree/compiler/DispatchCreation/FuseEncodingOpsIntoDispatchRegions.cpp).

The blocks of large operands (`blocked_operands.py`) are packed too, but those of a left operand only if its rows are
not contiguous. Elementwise code whose only reader is such a packing writes its result there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from torch.fx import Node

from irongrad.memory_model.blocked_operands import has_blocks_of_columns, is_written_in_order, turns_left
from irongrad.memory_model.chunked_products import total_of
from irongrad.memory_model.fusion import Kernels
from irongrad.memory_model.kernel_roles import (
    bytes_of,
    is_cloned,
    is_constant,
    is_item,
    readers,
    shape_of,
    source,
    sources,
    widens,
)
from irongrad.memory_model.written_views import CONTRACTIONS, CUTS, is_in_place

# Rows and columns of a float32 tile with AVX-512 (enumerateMatmulTileX86_64 in CPUEncodingExternalModels.cpp). AVX2 has
# half as many, so there the prediction is too high for products with both dimensions below this.
_TILE = 16


@dataclass(frozen=True, eq=False)
class Packing:
    """An operand that is packed for contractions.

    Attributes:
        operand: the node that is packed.
        bytes: its packed size in bytes.
        contractions: the contractions that read it, in the order in which they run.
    """

    operand: Node
    bytes: int
    contractions: tuple[Node, ...]


def packs(backends: Collection[str]) -> bool:
    """Whether operands are packed when a graph is compiled for `backends`; they are for a CPU."""
    return "llvm-cpu" in backends


def packings(grouping: Kernels) -> list[Packing]:
    """The packed operands of contractions, in the order in which the contractions run."""
    alike: dict[tuple[Node, tuple[bool, bool], int], list[Node]] = defaultdict(list)
    for head in grouping.members:
        if head.target in CONTRACTIONS:
            for operand, sides in _packed_by(head, grouping):
                alike[operand, sides, _packed_bytes(operand, head, sides)].append(head)
    return [Packing(operand, size, tuple(heads)) for (operand, _, size), heads in alike.items()]


def only_packed(found: Iterable[Packing], grouping: Kernels) -> dict[Node, Packing]:
    """The values that are in memory only in packed form: one packing reads all of the value, and nothing else does."""
    by_value: dict[Node, list[Packing]] = defaultdict(list)
    for packing in found:
        by_value[source(packing.operand)].append(packing)
    return {v: ps[0] for v, ps in by_value.items() if len(ps) == 1 and _is_only_packed(v, ps[0], grouping)}


def _is_only_packed(value: Node, packing: Packing, grouping: Kernels) -> bool:
    if value not in grouping.leader or len(packing.contractions) > 1:
        return False
    if packing.contractions[0] in grouping.of_blocks and not grouping.operations.is_elementwise(grouping.leader[value]):
        return False
    if is_in_place(value) or is_item(value) or value.target in CUTS:
        return False
    reading = {grouping.leader.get(r) for r in readers(value)} - {grouping.leader[value]}
    return bytes_of(value) == bytes_of(packing.operand) and reading == set(packing.contractions)


def _packed_by(head: Node, grouping: Kernels) -> Iterator[tuple[Node, tuple[bool, bool]]]:
    """The operands that a contraction's kernel packs, each with whether it has the product's rows and its columns."""
    left, right = head.args[-2:]
    if head in grouping.of_blocks:
        yield from ((operand, (False, False)) for operand in _in_blocks(head, is_body=grouping.is_body))
        return
    yield _before_widening(left), (True, False)
    yield _before_widening(right), (False, True)
    beside = (n for m in grouping.members[head] if m is not head for n in m.all_input_nodes)
    for operand in dict.fromkeys(s for n in beside if shape_of(n).numel() > 1 for s in _parts_or_sources(n)):
        if grouping.leader.get(source(operand)) is not head and not is_constant(source(operand)):
            yield operand, (True, True)


def _in_blocks(head: Node, *, is_body: bool) -> Iterator[Node]:
    """The operands that a contraction of blocks copies before; in a loop, its kernel itself copies none."""
    left, right = head.args[-2:]
    is_batch = total_of(head) is None
    if turns_left(head) or (is_batch and is_written_in_order(left)):
        yield left
    if has_blocks_of_columns(head, is_body=is_body) or (is_batch and is_written_in_order(right)):
        yield right


def _before_widening(operand: Node) -> Node:
    """The input of `operand` if that is a cast to a wider dtype: IREE packs before the cast (HoistEncodingOps.cpp)."""
    cast = source(operand)
    return cast.all_input_nodes[0] if is_cloned(cast) and widens(cast) else operand


def _parts_or_sources(node: Node) -> Iterator[Node]:
    """The values that are read when `node` is read; a slice stands for itself."""
    whole = source(node)
    is_part = bytes_of(node) < bytes_of(whole) and not is_cloned(whole)
    return iter([node]) if is_part else sources(node)


def _packed_bytes(operand: Node, contraction: Node, sides: tuple[bool, bool]) -> int:
    """The packed size of an operand in bytes: the product's dimensions are rounded up to tiles, as `_rounded_up` says.

    Args:
        operand: the node that is packed.
        contraction: the contraction that reads it.
        sides: whether the operand has the rows of the product, and whether it has the columns.
    """
    rows, columns = contraction.meta["val"].shape[-2:]
    filled = (
        Fraction(_rounded_up(rows, rows < columns), max(rows, 1)),
        Fraction(_rounded_up(columns, columns <= rows), max(columns, 1)),
    )
    return int(bytes_of(operand) * filled[0] ** sides[0] * filled[1] ** sides[1])


def _rounded_up(size: int, is_shorter: bool) -> int:
    """A dimension rounded up to tiles; if the shorter one is below a tile, to a power of two (chooseMatmulTile)."""
    if is_shorter and size < _TILE:
        return 1 << (size - 1).bit_length()
    return -(-size // _TILE) * _TILE
