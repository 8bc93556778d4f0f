"""Products of matrices on a CPU of the architecture x86, by kernels of our own.

With data tiling IREE 3.13.0 packs both operands of a product into tiles of 16 rows. Its kernel reads 17 numbers for 16
products, brings the result back into rows, and has half of what a processor can do. Here the kernels are those of
`product_kernels.py`. The right operand lies in blocks of columns, so that what is read together lies together,
and so does a left one that is transposed, in blocks of rows: where they lie, that would be a power of two apart far too
often. Other left operands, and the result, stay as they are. A small operand stays in a cache however it lies, and is
read in place if what a block has side by side is side by side in it too. docs/benchmarks.md has figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from iree.compiler import ir
from iree.compiler.dialects import flow

from irongrad.pipeline.devices import cpu_of
from irongrad.pipeline.generics import GENERIC, PRODUCTS, inputs_of, is_elementwise
from irongrad.pipeline.loop_invariants import outside_loops
from irongrad.pipeline.loops import Lettered, copied, split
from irongrad.pipeline.operations import inside
from irongrad.pipeline.product_code import add_executable
from irongrad.pipeline.product_kernels import LINE, Matrix, ProductKernel, Sizes, Steps, Tile

_ARCHITECTURE = "x86_64"

# What registers hold, by a feature that all CPUs with such registers have: results, one of each row's vectors of the
# right operand, and a number of the left one. As many chains of additions are under way at once, which hides how long
# each takes, 4 cycles, two of them in each.
AVX512 = (Tile(6, 4, 16), Tile(4, 4, 16), Tile(8, 3, 16), Tile(8, 2, 16))
AVX2 = (Tile(6, 2, 8),)
_TILES = {"avx512f": AVX512, "fma": AVX2}

# Rows or columns of a block, at most: what is copied into it from one row is several cache lines.
_WIDTH = 64

# Bytes of the largest operand that is read where it lies, half of the second cache of the smallest such CPU.
_NEAR = 1 << 19

# Multiplications of the smallest product that has a kernel of ours, about 10 µs of one core. What IREE makes of smaller
# ones is slower, but fewer kernels, as it computes in the product's what is elementwise before and behind it.
_LEAST = 1 << 20

# Summands of a product that is not bound by writing its result; IREE computes others with what reads them.
_FEWEST = 4


@dataclass(frozen=True, eq=False)
class _Product:
    """A product of matrices, or of as many pairs of them as there are in a batch.

    Each letter is a dimension: `b` of a batch, `r` rows, `c` columns, `k` summands.

    Attributes:
        operation: it.
        sizes: by letter.
        left: the left operand.
        right: the right operand.
    """

    operation: Any
    sizes: dict[str, int]
    left: Lettered
    right: Lettered

    @property
    def has_blocks_of_rows(self) -> bool:
        """Whether the left operand is read in blocks: a row of it is not side by side in memory, and it is large."""
        letters = self.left[1]
        return not letters.endswith("k") and not (letters.endswith("r") and is_near(self.sizes, letters))

    @property
    def has_blocks_of_columns(self) -> bool:
        """Whether the right operand is read in blocks."""
        letters = self.right[1]
        return not (letters.endswith("c") and is_near(self.sizes, letters))


def lay_out_products(module: ir.Module) -> None:
    """Have our kernels compute products of float32 of known sizes; others are left to IREE, as on other architectures.

    Args:
        module: as it is after IREE's phase `global-optimization`, in its own context.
    """
    architecture, features = cpu_of(module)
    tiles = next((found for feature, found in _TILES.items() if feature in features), None)
    if architecture != _ARCHITECTURE or tiles is None:
        return
    found = [_product_of(op) for op in inside(module.operation) if op.name in PRODUCTS]
    products = {p: tile for p in found if p and (tile := tile_for(p.sizes, tiles, turned=p.has_blocks_of_rows))}
    kernels = _Kernels(module)
    launched = [_launch(product, tile, kernels) for product, tile in products.items()]
    for old, new in launched:  # only now, as a product may read another
        old.results[0].replace_all_uses_with(new)
    for done in dict.fromkeys([*(old for old, _ in launched), *(product.operation for product in products)]):
        done.erase()


class _Kernels:
    """The kernels of a module's products, one for all that are alike."""

    def __init__(self, module: ir.Module) -> None:
        self._start = ir.InsertionPoint.at_block_begin(module.body)
        self._found: dict[ProductKernel, str] = {}

    def entry_point(self, kernel: ProductKernel) -> ir.ArrayAttr:
        """What launches a kernel."""
        if kernel not in self._found:
            sizes = kernel.sizes
            name = f"product_{len(self._found)}_{sizes.batch}x{sizes.rows}x{sizes.columns}x{sizes.summands}"
            with self._start, ir.Location.unknown():
                add_executable(kernel, name)
            self._found[kernel] = name
        return ir.ArrayAttr.get([ir.SymbolRefAttr.get([self._found[kernel]] * 2)])


def _product_of(operation: Any) -> _Product | None:
    """What a product of float32 multiplies; None where sizes are not known, or it is added to something."""
    *operands, room = operation.operands
    kinds = [value.type for value in operation.operands]
    if not all(kind.has_static_shape and isinstance(kind.element_type, ir.F32Type) for kind in kinds):
        return None
    if not _is_zero(room):
        return None
    letters = "brck" if len(room.type.shape) > 2 else "rck"
    of_operands = ["".join(letters[d] for d in _dimensions(m.value)) for m in operation.attributes["indexing_maps"]]
    sizes = {
        x: size for kind, of in zip(kinds, of_operands, strict=True) for x, size in zip(of, kind.shape, strict=True)
    }
    left, right = (_source(value, of) for value, of in zip(operands, of_operands, strict=False))
    return _Product(operation, sizes, left, right)


def _is_zero(value: Any) -> bool:
    """Whether all of a tensor is the number zero."""
    if isinstance(value.owner, ir.Block) or value.owner.name != "linalg.fill":
        return False
    number = value.owner.operands[0].owner
    is_constant = not isinstance(number, ir.Block) and number.name == "arith.constant"
    return is_constant and ir.FloatAttr(number.attributes["value"]).value == 0


def _source(value: Any, letters: str) -> Lettered:
    """What `value` has in another order, or as often as there are in a batch; else itself."""
    owner = value.owner
    if isinstance(owner, ir.Block) or owner.name != GENERIC or len(inputs_of(owner)) != 1:
        return value, letters
    (source,), (of_source, of_value) = inputs_of(owner), [m.value for m in owner.attributes["indexing_maps"]]
    body = owner.regions[0].blocks[0]
    copies = len(body.operations) == 1 and body.operations[0].operands[0] == body.arguments[0]
    if not copies or not of_source.is_projected_permutation or of_value != ir.AffineMap.get_identity(len(letters)):
        return value, letters
    read = "".join(letters[d] for d in _dimensions(of_source))
    return (source, read) if set(letters) <= {*read, "b"} else (value, letters)


def _dimensions(indexing: Any) -> list[int]:
    """The numbers of the loops that go over the dimensions of an operand; -1 where that is not one loop."""
    return [x.position if isinstance(x, ir.AffineDimExpr) else -1 for x in indexing.results]


def tile_for(sizes: Mapping[str, int], tiles: Sequence[Tile], *, turned: bool) -> Tile | None:
    """What registers hold for a product; None where it is small, or has no whole tiles or blocks.

    The best takes the fewest instructions for all results: of a summand it reads a number of each row, and vectors.

    Args:
        sizes: the numbers of rows, `r`, of columns, `c`, of summands, `k`, and of pairs of matrices, `b`.
        tiles: to choose from.
        turned: whether the left operand is read in blocks of rows.
    """
    if math.prod(sizes.values()) < _LEAST or sizes["k"] < _FEWEST or (turned and sizes["r"] % LINE):
        return None
    rows, columns = sizes["r"], sizes["c"]
    whole = [t for t in tiles if columns % t.columns == 0 and rows >= t.rows]
    return min(whole, key=lambda t: -(-rows // t.rows) * (columns // t.columns) * t.instructions, default=None)


def is_near(sizes: Mapping[str, int], letters: str) -> bool:
    """Whether an operand, or one of a batch, is so small that it is read where it lies.

    Args:
        sizes: as for `tile_for`.
        letters: of its dimensions.
    """
    return 4 * math.prod(sizes[letter] for letter in letters if letter != "b") <= _NEAR


def _launch(product: _Product, tile: Tile, kernels: _Kernels) -> tuple[Any, Any]:
    """Launch a kernel for a product, which adds a bias too; what it is in the place of, and its result."""
    operation, sizes = product.operation, product.sizes
    read_left = _in_blocks if product.has_blocks_of_rows else _as_it_is
    read_right = _in_blocks if product.has_blocks_of_columns else _as_it_is
    left, left_matrix = read_left(product.left, "r", product)
    right, right_matrix = read_right(product.right, "c", product)
    added = _added_row(operation.results[0])
    last = operation if added is None else added.result.owner.operation
    row = [] if added is None else [added.row]
    of_product = Sizes(sizes.get("b", 1), sizes["r"], sizes["c"], sizes["k"])
    kernel = ProductKernel(of_product, tile, left_matrix, right_matrix, adds_row=bool(row))
    with last.location, ir.InsertionPoint(last):
        kinds = [operation.results[0].type]
        launch = flow.DispatchOp(kinds, [], kernels.entry_point(kernel), [left, right, *row], [], [])
    return last, launch.results[0]


def _as_it_is(operand: Lettered, outer: str, product: _Product) -> tuple[Any, Matrix]:
    """An operand, and how it lies in memory; `outer` is the letter of its rows or columns that are no summands."""
    value, letters = operand
    apart = {x: math.prod(product.sizes[y] for y in letters[i + 1 :]) for i, x in enumerate(letters)}
    elements = math.prod(value.type.shape)
    return value, Matrix(elements, apart.get("b", 0), Steps(apart.get(outer, 0)), Steps(apart.get("k", 0)))


def _in_blocks(operand: Lettered, outer: str, product: _Product) -> tuple[Any, Matrix]:
    """An operand in blocks of rows or columns, as above; made before loops that leave it as it is."""
    value, letters = operand
    before, dimension = product.operation, letters.index(outer)
    width = math.gcd(value.type.shape[dimension], _WIDTH)
    with before.location, ir.InsertionPoint(outside_loops(before, [value])):
        pieces = split(value, dimension, width), letters.replace(outer, "n" + outer)
        blocks = copied(pieces, "b" * ("b" in letters) + "nk" + outer)
    of_matrix = product.sizes[outer] * product.sizes["k"]
    steps = Steps(1, width, width * product.sizes["k"]), Steps(width)
    return blocks, Matrix(math.prod(value.type.shape), of_matrix * ("b" in letters), *steps)


@dataclass(frozen=True)
class _AddedRow:
    """A row that is added to all rows of a product, as a bias is.

    Attributes:
        row: it.
        result: the sums.
    """

    row: Any
    result: Any


def _added_row(product: Any) -> _AddedRow | None:
    """The row that is added to a product, where nothing else reads that."""
    readers = [use.owner.operation for use in product.uses]
    if len(readers) != 1 or not is_elementwise(readers[0]) or len(readers[0].results) != 1:
        return None
    (reader,) = readers
    body = reader.regions[0].blocks[0]
    *of_inputs, of_result = (_dimensions(m.value) for m in reader.attributes["indexing_maps"])
    whole = list(range(len(product.type.shape)))
    by_dimensions = {tuple(of): value for of, value in zip(of_inputs, inputs_of(reader), strict=True)}
    row = by_dimensions.get((whole[-1],))
    if row is None or len(of_inputs) != 2 or by_dimensions.get(tuple(whole)) != product or of_result != whole:
        return None
    adds = len(body.operations) == 2 and body.operations[0].operation.name == "arith.addf"
    if not adds or set(body.operations[0].operands) != set(list(body.arguments)[:2]):
        return None
    return _AddedRow(row, reader.results[0])
