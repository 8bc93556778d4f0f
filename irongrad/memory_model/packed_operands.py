"""What contractions read in tiles.

With data tiling, IREE 3.13.0 packs both operands of a contraction into tiles first, and what elementwise code in its
kernel reads as its result is packed; each into memory that lives until the product is computed. What several
contractions read packed alike is packed once. What nothing reads but one packing is written packed by the kernel that
computes it (compiler/src/iree/compiler/DispatchCreation/FuseEncodingOpsIntoDispatchRegions.cpp).

Blocks (`blocks.py`) are packed too: those of large operands, but of a left one only where it has its rows apart. What
elementwise code computes for one of them alone is written there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

from torch.fx import Node

from irongrad.memory_model.blocked_operands import has_blocks_of_columns, is_written_in_order, turns_left
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

# Rows and columns of a tile of float32 with AVX-512 (enumerateMatmulTileX86_64 in CPUEncodingExternalModels.cpp); half
# as many with AVX2, where the prediction is high for products of which both dimensions are less.
_TILE = 16


@dataclass(frozen=True, eq=False)
class Packing:
    """What contractions read in tiles.

    Attributes:
        operand: what is packed.
        bytes: its size in tiles.
        contractions: what reads it, in the order in which they run.
    """

    operand: Node
    bytes: int
    contractions: tuple[Node, ...]


def packs(backends: Collection[str]) -> bool:
    """Whether operands are packed where a graph is compiled for `backends`: for a CPU they are."""
    return "llvm-cpu" in backends


def packings(grouping: Kernels) -> list[Packing]:
    """The packed operands of contractions, in the order in which these run."""
    alike: dict[tuple[Node, tuple[bool, bool], int], list[Node]] = defaultdict(list)
    for head in grouping.members:
        if head.target in CONTRACTIONS:
            for operand, sides in _operands(head, grouping):
                alike[operand, sides, _packed_bytes(operand, head, sides)].append(head)
    return [Packing(operand, size, tuple(heads)) for (operand, _, size), heads in alike.items()]


def only_packed(found: Iterable[Packing], grouping: Kernels) -> dict[Node, Packing]:
    """The values that are never in memory but packed: all of each is read by one packing, and by nothing else."""
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


def _operands(head: Node, grouping: Kernels) -> Iterator[tuple[Node, tuple[bool, bool]]]:
    """What the kernel of a contraction packs, each with whether it has the rows and the columns of the product."""
    left, right = head.args[-2:]
    if head in grouping.of_blocks:
        yield from ((operand, (False, False)) for operand in _in_blocks(head))
        return
    yield _narrow(left), (True, False)
    yield _narrow(right), (False, True)
    beside = (n for m in grouping.members[head] if m is not head for n in m.all_input_nodes)
    for operand in dict.fromkeys(s for n in beside if shape_of(n).numel() > 1 for s in _parts_or_sources(n)):
        if grouping.leader.get(source(operand)) is not head and not is_constant(source(operand)):
            yield operand, (True, True)


def _in_blocks(head: Node) -> Iterator[Node]:
    """The operands of a contraction of blocks that are copied."""
    left, right = head.args[-2:]
    if turns_left(head) or is_written_in_order(left):
        yield left
    if has_blocks_of_columns(head) or is_written_in_order(right):
        yield right


def _narrow(operand: Node) -> Node:
    """What `operand` is a wider cast of, which the contraction makes of what is packed (HoistEncodingOps.cpp)."""
    cast = source(operand)
    return cast.all_input_nodes[0] if is_cloned(cast) and widens(cast) else operand


def _parts_or_sources(node: Node) -> Iterator[Node]:
    """The values that are read where `node` is: a slice for itself."""
    whole = source(node)
    is_part = bytes_of(node) < bytes_of(whole) and not is_cloned(whole)
    return iter([node]) if is_part else sources(node)


def _packed_bytes(operand: Node, contraction: Node, sides: tuple[bool, bool]) -> int:
    """The size of an operand in tiles: the dimensions of the product are filled up, but for the shorter one.

    Args:
        operand: what is packed.
        contraction: what reads it.
        sides: whether it has the rows and whether it has the columns of the product.
    """
    rows, columns = contraction.meta["val"].shape[-2:]
    filled = (
        Fraction(_filled(rows, rows < columns), max(rows, 1)),
        Fraction(_filled(columns, columns <= rows), max(columns, 1)),
    )
    return int(bytes_of(operand) * filled[0] ** sides[0] * filled[1] ** sides[1])


def _filled(size: int, is_shorter: bool) -> int:
    """A dimension in tiles, which are a power of two high where all of it is less than a tile (chooseMatmulTile)."""
    if is_shorter and size < _TILE:
        return 1 << (size - 1).bit_length()
    return -(-size // _TILE) * _TILE
