"""Matrix products on x86-64 CPUs, computed by kernels of our own.

With data tiling, IREE 3.13.0 packs both operands of a product into tiles of 16 rows. Its kernel loads 17 numbers per 16
multiplications, unpacks the result into rows, and reaches half of a processor's peak performance. The kernels here are
those of `tiling.py` and `vector_code.py`.

The right operand is packed into column blocks, by the kernel itself if the product has few rows. In its original layout
the rows read together are often a power of two apart, so they evict each other from the cache. A transposed left
operand is copied to row-major order, so that each row is read sequentially. Other left operands and the result keep
their layout. A small operand stays in a cache in any layout. It is read in place if the elements that are read together
are contiguous. A right operand of few bits is unpacked by the kernel (`packed_weights.py`, `unpacking.py`).

Operands of bfloat16 are multiplied as such if the CPU has instructions for it (`pair_code.py`, `amx.py`).
docs/dev/measurements/2026-11-25-granite-rapids.md has figures.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from iree.compiler import ir
from iree.compiler.dialects import flow

from irongrad.memory_model.product_tiles import HALF_TILES, TILES, WIDTH, Tile, has_few_rows, is_near, tile_for
from irongrad.mlir.barriers import hold_behind
from irongrad.mlir.device import cpu_of
from irongrad.mlir.linalg import PRODUCTS, inputs_of, is_elementwise, source_of
from irongrad.mlir.walk import inside, outside_loops
from irongrad.passes.base import PassResult
from irongrad.passes.module.matmul_kernels.chunks import chunks_of
from irongrad.passes.module.matmul_kernels.forms import Layout, ProductForm, ProductProblem
from irongrad.passes.module.matmul_kernels.halves import narrowed, rounding
from irongrad.passes.module.matmul_kernels.letters import copied_by, dimensions_in, is_zero, lettered_source
from irongrad.passes.module.matmul_kernels.packed_weights import HALVES, PackedWeight, packed_weight
from irongrad.passes.module.matmul_kernels.tiling import MatmulShape, Matrix, ProductKernel, Strides
from irongrad.passes.module.matmul_kernels.transposes import Lettered, copied, split
from irongrad.passes.module.matmul_kernels.vector_code import add_executable
from irongrad.passes.module_pass import ModuleContext, ModulePass

ARCHITECTURE = "x86_64"


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
    def multiplies_halves(self) -> bool:
        """Whether both operands are bfloat16."""
        return {str(value.type.element_type) for value, _ in (self.left, self.right)} == {"bf16"}

    @property
    def turns_left(self) -> bool:
        """Whether the left operand is transposed by a copy: its rows are not contiguous in memory, and it is large."""
        letters = self.left[1]
        if self.multiplies_halves:
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
class MatmulKernels(ModulePass):
    """Compute matrix products of known sizes by kernels of our own, on x86-64 with AVX2 or AVX-512.

    Before:
        %r = linalg.matmul ins(%a, %b : tensor<1024x784xf32>, tensor<784x1024xf32>) outs(%zeros)
    After:
        %packed = linalg.generic ... %b; %r = flow.dispatch @product_0_1x1024x1024x784::@product_0_...(%a, %packed)

    Operands are float32 or half precision. Those of bfloat16 are multiplied as such by AMX or AVX512-BF16. Without
    these, and if they are float16, they are widened. IREE compiles all other products: small ones, of other types or
    unknown sizes, and ones that add to a value.

    Attributes:
        forms: descriptions of products, each with the name of the form that was chosen for it by measurement. All other
            products have the form that `tile_for` and `is_near` choose.
    """

    name: ClassVar[str] = "matmul-kernels"

    forms: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of_context(cls, context: ModuleContext) -> Self:
        """The pass with the measured forms of the target."""
        return cls(context.target.forms)

    def applies(self, context: ModuleContext) -> bool:
        """With data tiling: without it IREE reads operands in place, and these kernels are no faster."""
        return context.data_tiling

    def run(self, module: ir.Module) -> PassResult:
        """Run the pass on one module."""
        tiles = _Tiles.of_module(module)
        if tiles is None:
            return PassResult(False)
        chosen = dict(self.forms)
        forms = {p: _chosen_form(p, tile, tiles, chosen) for p, tile in _products_in(module, tiles).items()}
        products = {product: form for product, form in forms.items() if form is not None}
        kernels = _Kernels(module)
        launched = [_launch(product, form, kernels) for product, form in products.items()]
        for replaced, new in launched:  # only now, as a product may read another
            replaced[-1].results[0].replace_all_uses_with(new)
        for done in dict.fromkeys(op for replaced, _ in launched for op in reversed(replaced)):
            done.erase()
        held = _hold_unpacked(module)
        return PassResult(bool(products or held), {"products": len(products), "kernels": kernels.count, "held": held})


@dataclass(frozen=True)
class _Tiles:
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


def forms_in(module: ir.Module) -> dict[ProductProblem, Mapping[str, ProductForm | None]]:
    """The forms of each product of a module for which the pass has several; the first form is the default.

    The products that take the most multiplications in total come first. The module is changed: discard it.
    """
    tiles = _Tiles.of_module(module)
    if tiles is None:
        return {}
    products = {p: t for p, t in _products_in(module, tiles).items() if _packed(p, t) is None}
    of_problems = {p.problem: p.problem.forms(_default_form(p, t), tiles.of_product(p)) for p, t in products.items()}
    counts = Counter(product.problem for product in products)
    return dict(sorted(of_problems.items(), key=lambda item: -item[0].multiplications * counts[item[0]]))


def _products_in(module: ir.Module, tiles: _Tiles) -> dict[Product, Tile]:
    """The products of a module that a kernel of ours can compute, with their best tiles by the cost model."""
    found = [_product_of(op, tiles) for op in inside(module.operation) if op.name in PRODUCTS]
    return dict(one for one in found if one)


def _default_form(product: Product, tile: Tile) -> ProductForm:
    return ProductForm(tile, _default_layout(product, tile))


def _default_layout(product: Product, tile: Tile) -> Layout:
    """Where the kernel reads the right operand. A copy of what a loop does not change is made once, before the loop."""
    if product.multiplies_halves or not product.has_blocks_of_columns:
        return Layout.IN_PLACE
    if not product.is_in_loop and Layout.COPIED in product.problem.layouts(tile) and has_few_rows(product.sizes):
        return Layout.COPIED
    return Layout.IN_BLOCKS if Layout.IN_BLOCKS in product.problem.layouts(tile) else Layout.IN_PLACE


def _chosen_form(product: Product, tile: Tile, tiles: _Tiles, chosen: Mapping[str, str]) -> ProductForm | None:
    """The form that was measured to be the fastest, else the default; None if IREE computes the product."""
    default = _default_form(product, tile)
    name = chosen.get(str(product.problem))
    if name is None or _packed(product, tile) is not None:
        return default
    return product.problem.form(name, default, tiles.of_product(product))


class _Kernels:
    """The kernels of a module's products; equal products share one."""

    def __init__(self, module: ir.Module) -> None:
        self._start = ir.InsertionPoint.at_block_begin(module.body)
        self._found: dict[ProductKernel, str] = {}

    @property
    def count(self) -> int:
        """How many kernels there are."""
        return len(self._found)

    def entry_point(self, kernel: ProductKernel) -> ir.ArrayAttr:
        """The `entry_points` attribute of a dispatch of `kernel`; the kernel is added to the module on first use."""
        if kernel not in self._found:
            sizes = kernel.sizes
            name = f"product_{len(self._found)}_{sizes.batch}x{sizes.rows}x{sizes.columns}x{sizes.summands}"
            with self._start, ir.Location.unknown():
                add_executable(kernel, name)
            self._found[kernel] = name
        return ir.ArrayAttr.get([ir.SymbolRefAttr.get([self._found[kernel]] * 2)])


def _hold_unpacked(module: ir.Module) -> int:
    """Unpack integers for IREE's own products in kernels of their own; return the number of these.

    IREE 3.13.0 takes the unpacking into the kernel that packs a product's operand into tiles. If the rows are of any
    number, it then compiles that kernel for minutes: so do weights, and rows that are looked up in a table of int8.
    """
    operations = list(inside(module.operation))
    weights = {op.operands[1] for op in operations if op.name == "linalg.matmul"}
    unpacked = [w for w in weights if str(w.type.element_type) == "f32" and w.type.has_static_shape]
    unpacked = [w for w in unpacked if packed_weight(w) is not None]
    unpacked += [op.results[0] for op in operations if _widens_bytes_of_any_size(op)]
    for values in unpacked:
        hold_behind(values)
    return len(unpacked)


def _widens_bytes_of_any_size(operation: Any) -> bool:
    """Whether an operation computes floats from int8 alone, and its size is not known."""
    if not is_elementwise(operation) or operation.results[0].type.has_static_shape:
        return False
    body = [op.operation for op in operation.regions[0].blocks[0]]
    return body[0].name == "arith.sitofp" and str(body[0].operands[0].type) == "i8" and len(body) == 2


def _product_of(operation: Any, tiles: _Tiles) -> tuple[Product, Tile] | None:
    """A product and the tile of its kernel; None for one of unknown sizes, or one that adds to a nonzero value.

    Operands of bfloat16 are multiplied as such where the CPU has a tile for them. Otherwise half precision is widened.
    """
    lettered = dimensions_of(operation)
    if lettered is None:
        return None
    sizes, of_operands = lettered
    if (tile := tile_for(sizes, tiles.of_halves)) and (product := _half_product(operation, sizes, of_operands)):
        return product, tile
    left, right = (
        lettered_source(value, of) for value, of in zip(list(operation.operands)[:2], of_operands, strict=False)
    )
    if chunks := chunks_of(operation, left, right):
        operation, left, right = chunks.total, chunks.left, chunks.right
        sizes = {"r": sizes["r"], "c": sizes["c"], "k": left[0].type.shape[left[1].index("k")]}
    if (tile := tile_for(sizes, tiles.of_floats)) is None:
        return None
    product = Product(operation, sizes, _widened(left, operation), right)
    return product if _packed(product, tile) else replace(product, right=_widened(right, operation)), tile


def dimensions_of(operation: Any) -> tuple[dict[str, int], list[str]] | None:
    """The size of each dimension of a product, by letter, and the letters of its operands and of its result.

    None for a product of unknown sizes, of other types than floats, or that adds to a nonzero value.
    """
    room = operation.operands[2]
    kinds = [value.type for value in operation.operands]
    of_left, of_right, of_result = (str(kind.element_type) for kind in kinds)
    if of_result != "f32" or not {of_left, of_right} <= {"f32", *HALVES}:
        return None
    if not all(kind.has_static_shape for kind in kinds) or not is_zero(room):
        return None
    letters = "brck" if len(room.type.shape) > 2 else "rck"
    lettered = ["".join(letters[d] for d in dimensions_in(m.value)) for m in operation.attributes["indexing_maps"]]
    pairs = zip(kinds, lettered, strict=True)
    return {x: size for kind, of in pairs for x, size in zip(of, kind.shape, strict=True)}, lettered


def _half_product(operation: Any, sizes: dict[str, int], of_operands: Sequence[str]) -> Product | None:
    """The product of bfloat16 that `operation` is; None if it is of float32, or if a kernel cannot read an operand."""
    left, right = (_half_source(v, of) for v, of in zip(list(operation.operands)[:2], of_operands, strict=False))
    if left is None or right is None or "k" not in left[1] or not {"c", "k"} <= set(right[1]):
        return None
    return Product(operation, sizes, left, right)


def _half_source(value: Any, letters: str) -> Lettered | None:
    """The source of an operand as bfloat16, widened before or after it is transposed; None if it is float32."""
    source, of_source = lettered_source(value, letters)
    narrow = narrowed(source)
    return None if narrow is None else lettered_source(narrow, of_source)


def _widened(operand: Lettered, product: Any) -> Lettered:
    """An operand as float32, computed before `product`, outside of loops that do not change it."""
    value, letters = operand
    if str(value.type.element_type) not in HALVES:
        return operand
    with product.location, ir.InsertionPoint(outside_loops(product, [value])):
        return copied(operand, letters, ir.F32Type.get()), letters


def _launch(product: Product, form: ProductForm, kernels: _Kernels) -> tuple[list[Any], Any]:
    """Launch a kernel for a product, the bias added to it and its rounding; return what it replaces, and the result."""
    operation, sizes = product.operation, product.sizes
    packed = _packed(product, form.tile)
    left, left_matrix = as_it_is(_turned(product) if product.turns_left else product.left, "r", product)
    blocks = form.layout is Layout.IN_BLOCKS and packed is None
    copies = form.layout is Layout.COPIED and packed is None
    in_rows = product.right if packed or copies else _in_rows(product)
    right, right_matrix = in_blocks(product) if blocks else as_it_is(in_rows, "c", product)
    tensors = [right] if packed is None else packed.operands
    added = _added_row(operation.results[0])
    row = [] if added is None else [added.row]
    replaced = [operation] if added is None else [operation, added.result.owner.operation]
    rounds = rounding(replaced[-1].results[0]) if product.multiplies_halves else None
    last = rounds or replaced[-1]
    of_product = MatmulShape(sizes.get("b", 1), sizes["r"], sizes["c"], sizes["k"])
    packing = None if packed is None else packed.packing
    halves = product.multiplies_halves, rounds is not None
    kernel = ProductKernel(
        of_product, form.tile, left_matrix, right_matrix, bool(row), packing, copies, *halves, form.most
    )
    with last.location, ir.InsertionPoint(last):
        kinds = [last.results[0].type]
        launch = flow.DispatchOp(kinds, [], kernels.entry_point(kernel), [left, *tensors, *row], [], [])
    return list(dict.fromkeys([*replaced, last])), launch.results[0]


def _packed(product: Product, tile: Tile) -> PackedWeight | None:
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


def as_it_is(operand: Lettered, outer: str, product: Product) -> tuple[Any, Matrix]:
    """An operand and its layout in memory; `outer` is the letter of its dimension that is not reduced: `r` or `c`."""
    value, letters = operand
    apart = {x: math.prod(product.sizes[y] for y in letters[i + 1 :]) for i, x in enumerate(letters)}
    elements = math.prod(value.type.shape)
    return value, Matrix(elements, apart.get("b", 0), Strides(apart.get(outer, 0)), Strides(apart.get("k", 0)))


def _turned(product: Product) -> Lettered:
    """The left operand, copied to row-major order; the copy is hoisted out of loops that do not change the operand.

    If the operand is itself the copy of a transpose, it is put behind a barrier first. Otherwise IREE 3.13.0 fuses the
    two transposes. For a gradient of 3x8x6x128x64 the fused operation takes twelve times as long: its loops follow the
    order of neither side, and IREE finds no tiles for them.
    """
    value, letters = product.left
    if copied_by(source_of(value)) is not None:
        value = hold_behind(value)
    order = "b" * ("b" in letters) + "rk"
    with product.operation.location, ir.InsertionPoint(outside_loops(product.operation, [value])):
        return copied((value, letters), order), order


def _in_rows(product: Product) -> Lettered:
    """The right operand, copied if a kernel cannot read it: neighbours are columns, or summands of bfloat16."""
    value, letters = product.right
    if letters.endswith("c") or (product.multiplies_halves and letters.endswith("k")):
        return product.right
    order = "b" * ("b" in letters) + "kc"
    with product.operation.location, ir.InsertionPoint(outside_loops(product.operation, [value])):
        return copied((value, letters), order), order


def in_blocks(product: Product) -> tuple[Any, Matrix]:
    """The right operand, packed into column blocks, and its layout; hoisted out of loops that do not change it."""
    value, letters = product.right
    before, dimension = product.operation, letters.index("c")
    width = math.gcd(value.type.shape[dimension], WIDTH)
    with before.location, ir.InsertionPoint(outside_loops(before, [value])):
        pieces = split(value, dimension, width), letters.replace("c", "nc")
        blocks = copied(pieces, "b" * ("b" in letters) + "nkc")
    of_matrix = product.sizes["c"] * product.sizes["k"]
    steps = Strides(1, width, width * product.sizes["k"]), Strides(width)
    return blocks, Matrix(math.prod(value.type.shape), of_matrix * ("b" in letters), *steps)


@dataclass(frozen=True)
class _AddedRow:
    """A row that is added to all rows of a product, such as a bias.

    Attributes:
        row: the row, a tensor of rank 1.
        result: the sum of the product and the broadcast row.
    """

    row: Any
    result: Any


def _added_row(product: Any) -> _AddedRow | None:
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
    return _AddedRow(row, reader.results[0])


PASS = MatmulKernels
