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

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from iree.compiler import ir
from iree.compiler.dialects import flow

from irongrad.memory_model.product_tiles import Tile, has_few_rows
from irongrad.mlir.barriers import hold_behind
from irongrad.mlir.halves import rounding
from irongrad.mlir.kernels import Kernels
from irongrad.mlir.linalg import is_elementwise
from irongrad.mlir.walk import inside
from irongrad.passes.base import PassResult
from irongrad.passes.module.matmul_kernels.forms import Layout, ProductForm, ProductProblem
from irongrad.passes.module.matmul_kernels.operands import as_it_is, in_blocks, in_rows, open_size, turned
from irongrad.passes.module.matmul_kernels.packed_weights import packed_weight
from irongrad.passes.module.matmul_kernels.products import Product, Tiles, added_row, packed_by, products_in
from irongrad.passes.module.matmul_kernels.tiling import MatmulShape, ProductKernel
from irongrad.passes.module.matmul_kernels.vector_code import executable_of
from irongrad.passes.module_pass import ModuleContext, ModulePass


@dataclass(frozen=True)
class MatmulKernels(ModulePass):
    """Compute matrix products by kernels of our own, on x86-64 with AVX2 or AVX-512.

    Before:
        %r = linalg.matmul ins(%a, %b : tensor<1024x784xf32>, tensor<784x1024xf32>) outs(%zeros)
    After:
        %packed = linalg.generic ... %b; %r = flow.dispatch @product_0_1x1024x1024x784::@product_0_...(%a, %packed)

    Operands are float32 or half precision. Those of bfloat16 are multiplied as such by AMX or AVX512-BF16. Without
    these, and if they are float16, they are widened. One size of a product of float32 may be known at run time alone:
    the batch, the rows, or the summands. Only the batch may come before its dimension in a tensor.

    IREE compiles all other products: small ones, of other types or other unknown sizes, and ones that add to a value.

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
        tiles = Tiles.of_module(module)
        if tiles is None:
            return PassResult(False)
        chosen = dict(self.forms)
        forms = {p: _chosen_form(p, tile, tiles, chosen) for p, tile in products_in(module, tiles).items()}
        products = {product: form for product, form in forms.items() if form is not None}
        kernels = Kernels(module, executable_of, _name)
        launched = [_launch(product, form, kernels) for product, form in products.items()]
        for replaced, new in launched:  # only now, as a product may read another
            replaced[-1].results[0].replace_all_uses_with(new)
        for done in dict.fromkeys(op for replaced, _ in launched for op in reversed(replaced)):
            done.erase()
        held = _hold_unpacked(module)
        return PassResult(bool(products or held), {"products": len(products), "kernels": kernels.count, "held": held})


def forms_in(module: ir.Module) -> dict[ProductProblem, Mapping[str, ProductForm | None]]:
    """The forms of each product of a module for which the pass has several; the first form is the default.

    The products that take the most multiplications in total come first. The module is changed: discard it. A product
    with a size that is known at run time alone has its default form.
    """
    tiles = Tiles.of_module(module)
    if tiles is None:
        return {}
    found = products_in(module, tiles)
    products = {p: t for p, t in found.items() if packed_by(p, t) is None and not p.open}
    of_problems = {p.problem: p.problem.forms(_default_form(p, t), tiles.of_product(p)) for p, t in products.items()}
    counts = Counter(product.problem for product in products)
    return dict(sorted(of_problems.items(), key=lambda item: -item[0].multiplications * counts[item[0]]))


def _default_form(product: Product, tile: Tile) -> ProductForm:
    return ProductForm(tile, _default_layout(product, tile))


def _default_layout(product: Product, tile: Tile) -> Layout:
    """Where the kernel reads the right operand. A copy of what a loop does not change is made once, before the loop."""
    if product.open in ("b", "k"):
        return Layout.COPIED if product.open == "k" and product.right[1].endswith("c") else Layout.IN_PLACE
    if product.multiplies_halves or not product.has_blocks_of_columns:
        return Layout.IN_PLACE
    if not product.is_in_loop and Layout.COPIED in product.problem.layouts(tile) and has_few_rows(product.sizes):
        return Layout.COPIED
    return Layout.IN_BLOCKS if Layout.IN_BLOCKS in product.problem.layouts(tile) else Layout.IN_PLACE


def _chosen_form(product: Product, tile: Tile, tiles: Tiles, chosen: Mapping[str, str]) -> ProductForm | None:
    """The form that was measured to be the fastest, else the default; None if IREE computes the product."""
    default = _default_form(product, tile)
    name = chosen.get(str(product.problem))
    if name is None or product.open or packed_by(product, tile) is not None:
        return default
    return product.problem.form(name, default, tiles.of_product(product))


def _name(kernel: ProductKernel, number: int) -> str:
    sizes = kernel.sizes
    of = {"b": sizes.batch, "r": sizes.rows, "c": sizes.columns, "k": sizes.summands}
    return f"product_{number}_{'x'.join('D' if x == kernel.open else str(size) for x, size in of.items())}"


def _hold_unpacked(module: ir.Module) -> int:
    """Unpack integers for IREE's own products in kernels of their own; return the number of these.

    IREE 3.13.0 takes the unpacking into the kernel that packs a product's operand into tiles. If the rows are of any
    number, it then compiles that kernel for minutes: so do weights, and rows that are looked up in a table of int8.
    """
    operations = inside(module.operation)
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


def _launch(product: Product, form: ProductForm, kernels: Kernels[ProductKernel]) -> tuple[list[Any], Any]:
    """Launch a kernel for a product, the bias added to it and its rounding; return what it replaces, and the result."""
    operation, sizes = product.operation, product.sizes
    packed = packed_by(product, form.tile)
    left, left_matrix = as_it_is(turned(product) if product.turns_left else product.left, "r", product)
    blocks = form.layout is Layout.IN_BLOCKS and packed is None
    copies = form.layout is Layout.COPIED and packed is None
    in_place = product.right if packed or copies else in_rows(product)
    right, right_matrix = in_blocks(product) if blocks else as_it_is(in_place, "c", product)
    tensors = [right] if packed is None else packed.operands
    added = added_row(operation.results[0])
    row = [] if added is None else [added.row]
    replaced = [operation] if added is None else [operation, added.result.owner.operation]
    rounds = rounding(replaced[-1].results[0]) if product.multiplies_halves else None
    last = rounds or replaced[-1]
    of_product = MatmulShape(sizes.get("b", 1), sizes["r"], sizes["c"], sizes["k"])
    packing = None if packed is None else packed.packing
    halves = product.multiplies_halves, rounds is not None
    kernel = ProductKernel(
        *(of_product, form.tile, left_matrix, right_matrix, bool(row), packing, copies, *halves, form.most),
        open=product.open,
    )
    tensors = [left, *tensors, *row]
    with last.location, ir.InsertionPoint(last):
        kind, size = last.results[0].type, open_size(product)
        of_tensors = [one for t in tensors for one in size if not t.type.has_static_shape]
        of_result = size if not kind.has_static_shape else []
        launch = flow.DispatchOp([kind], size, kernels.entry_point(kernel), [*tensors, *size], of_tensors, of_result)
    return list(dict.fromkeys([*replaced, last])), launch.results[0]


PASS = MatmulKernels
