"""The matrix products of a module that kernels of ours can compute, as operations of `linalg`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from iree.compiler import ir

from irongrad.memory_model.product_tiles import ARCHITECTURE, HALF_TILES, TILES, Tile, is_near, tile_for
from irongrad.mlir.device import cpu_of
from irongrad.mlir.halves import half_source
from irongrad.mlir.letters import dimensions_in, is_zero, lettered_source
from irongrad.mlir.linalg import PRODUCTS, inputs_of, is_elementwise
from irongrad.mlir.transposes import Lettered, copied
from irongrad.mlir.walk import inside, outside_loops
from irongrad.passes.module.matmul_kernels.chunks import chunks_of
from irongrad.passes.module.matmul_kernels.forms import ProductProblem
from irongrad.passes.module.matmul_kernels.packed_weights import HALVES, PackedWeight, packed_weight

# What is assumed of a size that is known at run time alone: the batch, the rows, and the summands. Few rows are assumed
# so that there are parts for several threads in any case.
_ASSUMED = {"b": 64, "r": 256, "k": 4096}


@dataclass(frozen=True, eq=False)
class Product:
    """A matrix product, or a batch of them.

    Each dimension has a letter: `b` is the batch, `r` the rows, `c` the columns, `k` the reduction dimension.

    Attributes:
        operation: the operation that computes the product.
        sizes: the size of each dimension, by letter.
        left: the left operand and the letters of its dimensions, in memory order.
        right: the right operand and its letters.
    """

    operation: Any
    sizes: dict[str, int]
    left: Lettered
    right: Lettered

    @property
    def open(self) -> str:
        """The letter of the size that is known at run time alone, and assumed in `sizes`; empty if there is none."""
        operands = self.left, self.right
        return "".join({x for value, letters in operands for x in _unknown(value.type, letters)})

    @property
    def multiplies_halves(self) -> bool:
        """Whether both operands are bfloat16."""
        return {str(value.type.element_type) for value, _ in (self.left, self.right)} == {"bf16"}

    @property
    def turns_left(self) -> bool:
        """Whether the left operand is transposed by a copy: its rows are not contiguous in memory, and it is large."""
        letters = self.left[1]
        if self.multiplies_halves or self.open == "k":
            return not letters.endswith("k")
        return not letters.endswith("k") and not (letters.endswith("r") and is_near(self.sizes, letters))

    @property
    def is_in_loop(self) -> bool:
        """Whether a copy of the right operand can be made before a loop that the product is in."""
        return bool(outside_loops(self.operation, [self.right[0]]) != self.operation)

    @property
    def has_blocks_of_columns(self) -> bool:
        """Whether the right operand is packed into column blocks."""
        letters = self.right[1]
        return not (letters.endswith("c") and is_near(self.sizes, letters))

    @property
    def problem(self) -> ProductProblem:
        """The product without its place in a module."""
        dtype = str(self.left[0].type.element_type)
        return ProductProblem(tuple(sorted(self.sizes.items())), self.left[1], self.right[1], dtype)


@dataclass(frozen=True)
class Tiles:
    """The register tiles of a CPU.

    Attributes:
        of_floats: for products of float32; none without AVX2.
        of_halves: for products of bfloat16; none on a CPU that only multiplies float32.
    """

    of_floats: tuple[Tile, ...]
    of_halves: tuple[Tile, ...]

    @classmethod
    def of(cls, features: Collection[str]) -> Self:
        """The tiles of a CPU with these features."""
        return cls(*(next((t for f, t in kinds.items() if f in features), ()) for kinds in (TILES, HALF_TILES)))

    @classmethod
    def of_module(cls, module: ir.Module) -> Self | None:
        """The tiles of the CPU that `module` is compiled for; None if it has no kernels of ours."""
        architecture, features = cpu_of(module)
        tiles = cls.of(features)
        return tiles if architecture == ARCHITECTURE and tiles.of_floats else None

    def of_product(self, product: Product) -> tuple[Tile, ...]:
        """The tiles for the element type of a product."""
        return self.of_halves if product.multiplies_halves else self.of_floats


def products_in(module: ir.Module, tiles: Tiles) -> dict[Product, Tile]:
    """The products of a module that a kernel of ours can compute, with their best tiles by the cost model."""
    found = [_product_of(op, tiles) for op in inside(module.operation) if op.name in PRODUCTS]
    return dict(one for one in found if one)


def _product_of(operation: Any, tiles: Tiles) -> tuple[Product, Tile] | None:
    """A product and the tile of its kernel; None for one of unknown sizes, or one that adds to a nonzero value.

    Operands of bfloat16 are multiplied as such where the CPU has a tile for them. Otherwise half precision is widened.
    """
    lettered = dimensions_of(operation)
    if lettered is None:
        return _open_product(operation, tiles)
    sizes, of_operands = lettered
    product = _half_product(operation, sizes, of_operands) if tiles.of_halves else None
    if product is not None and (tile := tile_for(product.sizes, tiles.of_halves)):
        return product, tile
    left, right = (
        lettered_source(value, of) for value, of in zip(list(operation.operands)[:2], of_operands, strict=False)
    )
    product = _of_chunks(Product(operation, sizes, left, right))
    if (tile := tile_for(product.sizes, tiles.of_floats)) is None:
        return None
    product = replace(product, left=widened(product.left, product.operation))
    of_wide = replace(product, right=widened(product.right, product.operation))
    return product if packed_by(product, tile) else of_wide, tile


def _of_chunks(product: Product) -> Product:
    """The product that `product` is over chunks of; else `product` itself."""
    chunks = chunks_of(product.operation, product.left, product.right)
    if chunks is None:
        return product
    value, letters = chunks.left
    sizes = {"r": product.sizes["r"], "c": product.sizes["c"], "k": value.type.shape[letters.index("k")]}
    return Product(chunks.total, sizes, chunks.left, chunks.right)


def _open_product(operation: Any, tiles: Tiles) -> tuple[Product, Tile] | None:
    """A product of float32 with one size that is known at run time alone, and the tile of its kernel; None otherwise.

    None also if other dimensions than that of the batch come before it in an operand or in the result, or if both
    operands are copies for each matrix of a batch of that size.
    """
    kinds = [value.type for value in operation.operands]
    if any(str(kind.element_type) != "f32" for kind in kinds) or not is_zero(operation.operands[2]):
        return None
    of_operands = letters_of(operation)
    left, right = (
        lettered_source(value, of) for value, of in zip(list(operation.operands)[:2], of_operands, strict=False)
    )
    of_kinds = [*zip(kinds, of_operands, strict=True), (left[0].type, left[1]), (right[0].type, right[1])]
    unknown = {x for kind, of in of_kinds for x in _unknown(kind, of)}
    letter = "".join(unknown)
    before = [set(of.partition(letter)[0]) for of in (left[1], right[1], of_operands[2]) if letter in of]
    if letter not in _ASSUMED or letter not in left[1] + right[1] or not all(x <= {"b"} for x in before):
        return None
    sizes = {x: size for kind, of in of_kinds for x, size in zip(of, kind.shape, strict=True)}
    sizes[letter] = _ASSUMED[letter]
    product = Product(operation, sizes, left, right)
    tile = tile_for(sizes, tiles.of_floats)
    return None if tile is None or packed_by(product, tile) is not None else (product, tile)


def _unknown(kind: Any, letters: str) -> set[str]:
    """The letters of a tensor's dimensions whose size is known at run time alone."""
    return {x for d, x in enumerate(letters) if kind.is_dynamic_dim(d)}


def letters_of(operation: Any) -> list[str]:
    """The letters of a product's operands and of its result."""
    letters = "brck" if len(operation.operands[2].type.shape) > 2 else "rck"
    return ["".join(letters[d] for d in dimensions_in(m.value)) for m in operation.attributes["indexing_maps"]]


def dimensions_of(operation: Any, may_be_unknown: str = "") -> tuple[dict[str, int], list[str]] | None:
    """The size of each dimension of a product, by letter, and the letters of its operands and of its result.

    None for a product of other types than floats, one that adds to a nonzero value, or of unknown sizes, but those with
    the letters `may_be_unknown`.
    """
    room = operation.operands[2]
    kinds = [value.type for value in operation.operands]
    of_left, of_right, of_result = (str(kind.element_type) for kind in kinds)
    if of_result != "f32" or not {of_left, of_right} <= {"f32", *HALVES}:
        return None
    lettered = letters_of(operation)
    pairs = list(zip(kinds, lettered, strict=True))
    if not all(_unknown(kind, of) <= set(may_be_unknown) for kind, of in pairs) or not is_zero(room):
        return None
    return {x: size for kind, of in pairs for x, size in zip(of, kind.shape, strict=True)}, lettered


def _half_product(operation: Any, sizes: dict[str, int], of_operands: Sequence[str]) -> Product | None:
    """The product of bfloat16 that `operation` is; None if it is of float32, or if a kernel cannot read an operand."""
    left, right = (half_source(v, of) for v, of in zip(list(operation.operands)[:2], of_operands, strict=False))
    if left is None or right is None or "k" not in left[1] or not {"c", "k"} <= set(right[1]):
        return None
    return _of_chunks(Product(operation, sizes, left, right))


def widened(operand: Lettered, product: Any) -> Lettered:
    """An operand as float32, computed before `product`, outside of loops that do not change it."""
    value, letters = operand
    if str(value.type.element_type) not in HALVES:
        return operand
    with product.location, ir.InsertionPoint(outside_loops(product, [value])):
        return copied(operand, letters, ir.F32Type.get()), letters


def packed_by(product: Product, tile: Tile) -> PackedWeight | None:
    """The right operand as it is stored, if the kernel can unpack it; else None.

    Vectors along the weight's rows have to lie in one group, and squares of them cover the reduction dimension.
    """
    value, letters = product.right
    if letters not in ("ck", "kc") or product.multiplies_halves:
        return None
    packed = packed_weight(value)
    if packed is None or packed.packing.group % tile.width or packed.packing.columns % tile.width:
        return None
    return packed


@dataclass(frozen=True)
class AddedRow:
    """A row that is added to all rows of a product, such as a bias.

    Attributes:
        row: the row, a tensor of rank 1.
        result: the sum of the product and the broadcast row.
    """

    row: Any
    result: Any


def added_row(product: Any) -> AddedRow | None:
    """The row that is added to a product; None if there is none, or if the product has another reader."""
    readers = [use.owner.operation for use in product.uses]
    if len(readers) != 1 or not is_elementwise(readers[0]) or len(readers[0].results) != 1:
        return None
    (reader,) = readers
    body = reader.regions[0].blocks[0]
    *of_inputs, of_result = (dimensions_in(m.value) for m in reader.attributes["indexing_maps"])
    whole = list(range(len(product.type.shape)))
    by_dimensions = {tuple(of): value for of, value in zip(of_inputs, inputs_of(reader), strict=True)}
    row = by_dimensions.get((whole[-1],))
    if row is None or len(of_inputs) != 2 or by_dimensions.get(tuple(whole)) != product or of_result != whole:
        return None
    adds = len(body.operations) == 2 and body.operations[0].operation.name == "arith.addf"
    if not adds or set(body.operations[0].operands) != set(list(body.arguments)[:2]):
        return None
    return AddedRow(row, reader.results[0])
