"""The pass matmul-kernels writes the kernels of large float32 products for x86 CPUs, and they compute the product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from iree.compiler import ir

import irongrad as ig
from irongrad.memory_model import product_tiles
from irongrad.memory_model.product_tiles import AVX2, AVX512, Tile, tile_for
from irongrad.mlir.letters import copied_by
from irongrad.mlir.walk import found_in, inside, loops_around, name_of, parsed
from irongrad.passes.module.matmul_kernels import operands, products
from irongrad.passes.module.matmul_kernels.loops import LoopKernels
from irongrad.passes.module.matmul_kernels.tiling import MatmulShape, Matrix, ProductKernel, Strides
from irongrad.pipeline.iree.compile import COMMON_FLAGS, Compilation, compile_module
from irongrad.targets import parse_target
from tests.fixtures.module_texts import TextModule, Written, functions_of
from tests.fixtures.processors import needs_x86

AVX512_TARGET, AVX2_TARGET = "llvm-cpu:cpu=x86-64-v4", "llvm-cpu:cpu=x86-64-v3"
SIZES = {"b": 3, "r": 128, "c": 96, "k": 128}

# The dimensions of both operands as the product reads them, and of the left operand as it lies in memory.
CASES = {
    "matrices": ("rk", "kc", "rk"),
    "a transposed left operand": ("kr", "kc", "kr"),
    "a transposed right operand": ("rk", "ck", "rk"),
    "a batch": ("brk", "bkc", "brk"),
    "a batch of transposed left operands": ("bkr", "bkc", "bkr"),
    "a batch of transposed right operands": ("brk", "bck", "brk"),
    "rows of a batch in turn": ("brk", "bkc", "rbk"),
    "columns of a batch in turn": ("brk", "bkc", "kbr"),
    "one left operand for a batch": ("brk", "bkc", "rk"),
    "one row as often as needed": ("rk", "kc", "k"),
    "one column as often as needed": ("rk", "kc", "r"),
    "one column of a transposed left operand": ("kr", "kc", "k"),
}


@dataclass(frozen=True)
class Product(TextModule):
    """A portable module with a product of two matrices, or of a batch of them.

    Attributes:
        left: the dimensions of the left operand, as in `CASES`.
        right: the dimensions of the right operand.
        given: the dimensions of the module's first argument, from which it makes the left operand.
        sizes: the size of each dimension.
        kind: the type of the elements.
        is_square: whether the module squares the elements of its first argument.
        beginning: the initial value of the sums.
    """

    left: str
    right: str
    given: str
    sizes: dict[str, int]
    kind: str = "f32"
    is_square: bool = False
    beginning: float = 0.0

    @property
    def text(self) -> str:
        """The module."""
        batch = "b" * self.left.count("b")
        result, loops = f"{batch}rc", f"{batch}rck"
        given, left, right, out = map(self._type, (self.given, self.left, self.right, result))
        dims = ", ".join(f"d{i}" for i in range(len(loops)))
        maps = ", ".join(
            f"affine_map<({dims}) -> ({', '.join(f'd{loops.index(x)}' for x in letters)})>"
            for letters in (self.left, self.right, result)
        )
        spread = ", ".join(f"d{self.left.index(x)}" for x in self.given)
        of_left = ", ".join(f"d{i}" for i in range(len(self.left)))
        parallel = ", ".join('"parallel"' for _ in self.left)
        return f"""func.func @f(%given: {given}, %b: {right}) -> {out} {{
          %room = tensor.empty() : {left}
          %a = linalg.generic {{
              indexing_maps = [affine_map<({of_left}) -> ({spread})>, affine_map<({of_left}) -> ({of_left})>],
              iterator_types = [{parallel}]
          }} ins(%given : {given}) outs(%room : {left}) {{
          ^bb0(%x: {self.kind}, %y: {self.kind}):
            {f"%z = arith.mulf %x, %x : {self.kind}" if self.is_square else ""}
            linalg.yield {"%z" if self.is_square else "%x"} : {self.kind}
          }} -> {left}
          %zero = arith.constant {self.beginning} : {self.kind}
          %empty = tensor.empty() : {out}
          %zeros = linalg.fill ins(%zero : {self.kind}) outs(%empty : {out}) -> {out}
          %product = linalg.{"batch_" * bool(batch)}matmul indexing_maps = [{maps}]
              ins(%a, %b : {left}, {right}) outs(%zeros : {out}) -> {out}
          return %product : {out}
        }}"""

    def _type(self, letters: str) -> str:
        return f"tensor<{''.join(f'{self.sizes[x]}x' for x in letters)}{self.kind}>"


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """No operand is small enough to be read without blocks."""
    monkeypatch.setattr(product_tiles, "_NEAR", 0)


@pytest.fixture
def copied_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel copies its right operand itself."""
    monkeypatch.setattr(product_tiles, "_FEW_ROWS", 0)
    monkeypatch.setattr(product_tiles, "_FEW_ROWS_OF_LONG", 0)


@pytest.fixture(params=["copied before", "copied by the kernel", "where they lie"])
def read(request: pytest.FixtureRequest) -> str:
    """How the kernels read right operands: from blocks, or in their own layout."""
    if request.param != "where they lie":
        request.getfixturevalue("far")
    if request.param == "copied before":
        request.getfixturevalue("copied_before")
    return request.param


LOOP = """func.func @f(%w: tensor<128x128xf32>, %x: tensor<128x128xf32>) -> tensor<128x128xf32> {
  %first = arith.constant 0 : index
  %last = arith.constant 9 : index
  %step = arith.constant 1 : index
  %zero = arith.constant 0.0 : f32
  %empty = tensor.empty() : tensor<128x128xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<128x128xf32>) -> tensor<128x128xf32>
  %end = scf.for %i = %first to %last step %step iter_args(%y = %x) -> tensor<128x128xf32> {
    %z = linalg.matmul ins(%y, %w : tensor<128x128xf32>, tensor<128x128xf32>) outs(%zeros : tensor<128x128xf32>)
        -> tensor<128x128xf32>
    scf.yield %z : tensor<128x128xf32>
  }
  return %end : tensor<128x128xf32>
}"""


def _flow_of(module: bytes, directory: Path, target: str) -> bytes:
    source, compiled_for = directory / "step.mlirbc", parse_target(target)
    source.write_bytes(module)
    return Compilation.of(source, compiled_for, [*COMMON_FLAGS, *compiled_for.flags]).to_flow()


def launched(module: ir.Module, function: ir.Operation | None = None) -> list[str]:
    """The names of the pass's kernels that a module launches, or one of its functions."""
    ours = {name_of(op.operation) for op in module.body.operations if op.operation.name == "stream.executable"}
    dispatches = [op for op in inside(function or module.operation) if op.name == "flow.dispatch"]
    entry_points = [ir.ArrayAttr(op.attributes["entry_points"]) for op in dispatches]
    names = [ir.SymbolRefAttr(first).value[0] for (first,) in entry_points]
    return [name for name in names if name in ours]


def is_ours(product: Product, directory: Path, target: str) -> bool:
    with parsed(_flow_of(product.bytecode, directory, target)) as module:
        return len(launched(module)) == 1


@dataclass(frozen=True)
class Several(TextModule):
    """A portable module with a function for each of several products: `f0`, `f1` and so on."""

    products: tuple[Product, ...]

    @property
    def text(self) -> str:
        """The module."""
        return "\n".join(p.text.replace("@f(", f"@f{number}(") for number, p in enumerate(self.products))


def check_products(products: dict[str, Product], directory: Path, target: str) -> None:
    """Compile all products at once, and compare each with NumPy's sums, which are exact."""
    loaded = functions_of(compile_module(Several(tuple(products.values())), parse_target(target), directory).vmfb)
    for number, (name, product) in enumerate(products.items()):
        a, b = integers(product)
        ones = np.ones([product.sizes[x] for x in product.left], np.float32)
        letters = f"{product.given},{product.left},{product.right}->{'brc' if 'b' in product.left else 'rc'}"
        exact = np.einsum(letters, a * a if product.is_square else a, ones, b, optimize=True)
        found = getattr(loaded, f"f{number}")(a, b).to_host()
        np.testing.assert_array_equal(found, exact, err_msg=name)


def integers(product: Product) -> list[np.ndarray]:
    """Arguments whose sums are exact."""
    shapes = ([product.sizes[x] for x in letters] for letters in (product.given, product.right))
    return [np.random.default_rng(0).integers(-8, 8, shape).astype(np.float32) for shape in shapes]


@pytest.mark.parametrize("target", [AVX512_TARGET, AVX2_TARGET])
@pytest.mark.usefixtures("read")
def test_products_have_kernels_of_our_own(tmp_path: Path, target: str) -> None:
    several = Several(tuple(Product(*operands, SIZES) for operands in CASES.values()))
    with parsed(_flow_of(several.bytecode, tmp_path, target)) as module:
        functions = [op.operation for op in module.body.operations if op.operation.name == "util.func"]
        found = {name_of(op): len(launched(module, op)) for op in functions}
    assert [found.get(f"f{n}$async", found[f"f{n}"]) for n in range(len(CASES))] == [1] * len(CASES)


@pytest.mark.thinned(2)
@needs_x86
@pytest.mark.parametrize("is_square", [False, True])
@pytest.mark.parametrize("target", ["llvm-cpu", AVX2_TARGET])
@pytest.mark.usefixtures("read")
def test_products_are_right(tmp_path: Path, target: str, is_square: bool) -> None:
    check_products({c: Product(*CASES[c], SIZES, is_square=is_square) for c in CASES}, tmp_path, target)


PARTIAL = (
    ("a batch", {"r": 60}),
    ("a batch", {"r": 61, "k": 131}),
    ("a batch of transposed right operands", {"r": 131, "c": 48, "k": 75}),
    ("a batch of transposed left operands", {"r": 144, "c": 64, "k": 77}),
    ("matrices", {"r": 14, "c": 32, "k": 9001}),  # more summands than fit a cache
    ("a transposed left operand", {"r": 80, "c": 64, "k": 4098}),
    ("matrices", {"r": 61, "c": 1001}),
    ("a transposed right operand", {"c": 1000}),
    ("a transposed right operand", {"r": 61, "c": 1001, "k": 640}),
    ("a transposed right operand", {"c": 1001, "k": 131}),
    ("a batch of transposed right operands", {"c": 257, "k": 64}),
    ("a batch", {"c": 257}),
)


@pytest.mark.thinned(2)
@needs_x86
@pytest.mark.parametrize("target", ["llvm-cpu", AVX2_TARGET])
@pytest.mark.usefixtures("read")
def test_tiles_need_not_be_whole(tmp_path: Path, target: str) -> None:
    products = {f"{case} {sizes}": Product(*CASES[case], SIZES | sizes) for case, sizes in PARTIAL}
    check_products(products, tmp_path, target)
    assert [name for name, product in products.items() if not is_ours(product, tmp_path, target)] == []


@pytest.mark.parametrize(
    ("changed", "kind", "target"),
    [
        ({"r": 4, "k": 1024}, "f32", AVX512_TARGET),
        ({"c": 80}, "f32", AVX512_TARGET),
        ({"r": 8, "c": 32}, "f32", AVX512_TARGET),
        ({"r": 4096, "k": 2}, "f32", AVX512_TARGET),
        ({}, "f64", AVX512_TARGET),
        ({}, "f32", "llvm-cpu:arch=aarch64"),
        ({}, "f32", "llvm-cpu:cpu=x86-64"),
    ],
)
def test_other_products_are_left_to_iree(tmp_path: Path, changed: dict[str, int], kind: str, target: str) -> None:
    assert not is_ours(Product("brk", "bkc", "brk", SIZES | changed, kind), tmp_path, target)


def test_a_product_added_to_a_constant_is_left_to_iree(tmp_path: Path) -> None:
    assert not is_ours(Product(*CASES["matrices"], SIZES, beginning=1.0), tmp_path, AVX512_TARGET)


@pytest.mark.usefixtures("far")
def test_rows_of_a_transposed_left_operand_need_not_divide(tmp_path: Path) -> None:
    assert is_ours(Product("bkr", "bkc", "bkr", SIZES | {"r": 67}), tmp_path, AVX512_TARGET)


def heads(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradient of a weight whose product is split into heads."""
    return x.permute(1, 3, 0, 2, 4).reshape(512, 384).T @ y


def copies_in_no_order(flow: ir.Module) -> int:
    """The number of kernels that copy in neither the order of their source nor the order of their result."""
    generics = [op for op in inside(flow.operation) if op.name == "linalg.generic"]
    maps = [[m.value for m in ir.ArrayAttr(op.attributes["indexing_maps"])] for op in generics]
    return sum(all(m != ir.AffineMap.get_identity(m.n_dims) for m in of_one) for of_one in maps)


@needs_x86
def test_the_transpose_of_an_operand_is_not_fused_with_what_computes_it(flow_of: Callable[..., bytes]) -> None:
    """IREE would compute the operand while it transposes it, in three times the time of both."""

    def gradient(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.relu().T @ y

    with parsed(flow_of(gradient, (torch.randn(1024, 1020), torch.randn(1024, 256)))) as module:
        assert len(launched(module)) == 1
        (relu,) = [
            op for op in inside(module.operation) if op.name == "linalg.generic" and not copied_by(op.results[0])
        ]
        assert [m.value for m in relu.attributes["indexing_maps"]] == 2 * [ir.AffineMap.get_identity(1)]


def test_the_transpose_of_an_operand_is_not_fused_with_another(
    flow_of: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the last assertion fails, IREE handles two transposes well, and `hold_behind` can go."""
    monkeypatch.setattr(products, "cpu_of", lambda module: ("x86_64", ("avx512f",)))
    given = torch.randn(3, 4, 2, 128, 64), torch.randn(512, 384)
    with parsed(flow_of(heads, given)) as module:
        assert len(launched(module)) == 1
        assert copies_in_no_order(module) == 0
    monkeypatch.setattr(operands, "hold_behind", lambda value: value)
    with parsed(flow_of(heads, given)) as module:
        assert copies_in_no_order(module) > 0


def kernels_of(product: Product, directory: Path) -> int:
    """The number of kernels of a product."""
    with parsed(_flow_of(product.bytecode, directory, AVX512_TARGET)) as module:
        return len(found_in(module, "flow.dispatch"))


@pytest.mark.parametrize(
    ("case", "sizes", "kernels"),
    [
        ("matrices", {}, 1),
        ("matrices", {"c": 1024}, 1),
        ("matrices", {"c": 1056}, 2),  # 528 KiB
        ("a transposed left operand", {}, 1),
        ("a transposed left operand", {"r": 1024}, 1),
        ("a transposed left operand", {"r": 1056}, 2),
        ("a batch", {"b": 60}, 1),
        ("a transposed right operand", {}, 2),
    ],
)
@pytest.mark.usefixtures("copied_before")
def test_operands_up_to_half_a_mebibyte_are_read_without_blocks(
    tmp_path: Path, case: str, sizes: dict[str, int], kernels: int
) -> None:
    assert kernels_of(Product(*CASES[case], SIZES | sizes), tmp_path) == kernels


@pytest.mark.parametrize(
    ("case", "sizes", "kernels"),
    [
        ("matrices", {"r": 512, "c": 1056}, 1),
        ("matrices", {"r": 513, "c": 1056}, 2),
        ("a transposed right operand", {"r": 512}, 1),
        ("a transposed right operand", {"r": 513}, 2),
        ("a transposed right operand", {"k": 120}, 2),  # squares of 16 x 16 do not cover it
    ],
)
def test_kernels_of_few_rows_copy_the_right_operand(
    tmp_path: Path, case: str, sizes: dict[str, int], kernels: int
) -> None:
    assert kernels_of(Product(*CASES[case], SIZES | sizes), tmp_path) == kernels


# The dimensions of both operands in memory.
LONG = {
    "x @ w": ("rk", "kc", lambda x, w: x @ w),
    "x @ w.T": ("rk", "ck", lambda x, w: x @ w.T),
    "x.T @ w": ("kr", "kc", lambda x, w: x.T @ w),
    "(2 * x) @ w + row": ("rk", "kc", lambda x, w: (2 * x) @ w + w[0]),
}


@needs_x86
@pytest.mark.parametrize("target", ["llvm-cpu", AVX2_TARGET])
@pytest.mark.parametrize("summands", [3072, 5003, 2053 * 2])
def test_a_product_of_many_summands_is_one_kernel(summands: int, target: str) -> None:
    """Its chains of additions are short, as those of the products over chunks that it is written as."""
    sizes = {"r": 40, "c": 64, "k": summands}
    rng = np.random.default_rng(0)
    for name, (left, right, product) in LONG.items():
        x, w = (torch.from_numpy(rng.random([sizes[d] for d in of], np.float32)) for of in (left, right))
        compiled = ig.compile_function(product, (x, w), target=target, cache=False)
        exact = product(x.double(), w.double())
        worst = ((torch.from_numpy(np.asarray(compiled(x, w))) - exact) / exact).abs().max()
        assert worst < 2e-6, name  # one chain of 4,000 positive numbers: 1e-5


@pytest.mark.parametrize(
    ("name", "summands", "kernels"),
    [
        ("x @ w", 3072, 1),
        ("x @ w", 5003, 1),
        ("x @ w.T", 3072, 1),
        ("x @ w.T", 5003, 2),  # squares of 16 x 16 do not cover it
        ("x.T @ w", 3072, 1),
        ("x.T @ w", 5003, 1),
        ("(2 * x) @ w + row", 3072, 2),
        ("(2 * x) @ w + row", 5003, 2),
    ],
)
def test_products_over_chunks_and_their_sum_have_one_kernel(
    flow_of: Callable[..., bytes], name: str, summands: int, kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "cpu_of", lambda module: ("x86_64", ("avx512f",)))
    left, right, product = LONG[name]
    sizes = {"r": 40, "c": 64, "k": summands}
    x, w = (torch.randn([sizes[d] for d in of]) for of in (left, right))
    with parsed(flow_of(product, (x, w))) as module:
        (kernel,) = launched(module)
        assert kernel.endswith(f"1x40x64x{summands}")
        assert len(found_in(module, "flow.dispatch")) == kernels


@pytest.mark.parametrize(
    ("added", "kernels"),
    [
        (lambda y, row, x: y + row, 2),  # one makes blocks, one multiplies and adds
        (lambda y, row, x: row + y, 2),
        (lambda y, row, x: y * row, 3),
        (lambda y, row, x: y + x, 3),
        (lambda y, row, x: y + row[:, None], 3),
        (lambda y, row, x: (y + row, y), 3),
    ],
)
def test_a_product_adds_its_bias(
    flow_of: Callable[..., bytes], added: Callable[..., Any], kernels: int, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    monkeypatch.setattr(products, "cpu_of", lambda module: ("x86_64", ("avx512f",)))
    x, row = torch.randn(128, 128), torch.randn(128)
    with parsed(flow_of(lambda x, row: added(x @ x, row, x), (x, row))) as module:
        assert len(launched(module)) == 1
        assert len(found_in(module, "flow.dispatch")) == kernels - (read != "copied before")


@pytest.mark.parametrize(
    "spread",
    [lambda v: v[:, None].expand(128, 96), lambda v: v[None, :96].expand(128, 96), lambda v: v[0].expand(128, 96)],
    ids=["columns", "rows", "one number"],
)
@pytest.mark.usefixtures("read")
def test_a_right_operand_is_one_column_or_row_as_often_as_needed(
    flow_of: Callable[..., bytes], spread: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient of a sum over columns is such an operand."""
    monkeypatch.setattr(products, "cpu_of", lambda module: ("x86_64", ("avx512f",)))
    examples = torch.randn(128, 128), torch.randn(128)
    with parsed(flow_of(lambda x, v: x @ spread(v), examples)) as module:
        assert len(launched(module)) == 1


@pytest.mark.usefixtures("far")
def test_blocks_of_operands_that_a_loop_does_not_change_are_made_before_it(
    tmp_path: Path, without: Callable[..., None]
) -> None:
    without(LoopKernels)
    with parsed(_flow_of(Written(LOOP).bytecode, tmp_path, AVX512_TARGET)) as flow:
        kernels = found_in(flow, "flow.dispatch")
        assert [bool(loops_around(kernel.block)) for kernel in kernels] == [False, True]


@needs_x86
@pytest.mark.parametrize("summands", [128, 6000])
def test_a_bias_is_added_once(summands: int) -> None:
    rng = np.random.default_rng(0)
    shapes = (61, summands), (summands, 96), (96,)
    x, w, bias = (torch.from_numpy(rng.integers(-8, 8, shape).astype(np.float32)) for shape in shapes)
    compiled = ig.compile_function(lambda x, w, bias: x @ w + bias, (x, w, bias), cache=False)
    np.testing.assert_array_equal(np.asarray(compiled(x, w, bias)), (x @ w + bias).numpy())


def test_equal_products_share_a_kernel(flow_of: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "cpu_of", lambda module: ("x86_64", ("avx512f",)))
    x, y, z = (torch.randn(128, 128) for _ in range(3))
    with parsed(flow_of(lambda x, y, z: (x @ y) @ z @ x.T, (x, y, z))) as module:
        names = launched(module)
        assert len(names) == 3
        assert len(set(names)) == 2


@given(
    batch=st.integers(1, 20),
    rows=st.integers(12, 3000),
    columns=st.integers(1, 60),
    summands=st.sampled_from([1, 64, 5000]),
    tile=st.sampled_from([*AVX2, *AVX512]),
)
def test_threads_compute_nearly_equal_parts(batch: int, rows: int, columns: int, summands: int, tile: Tile) -> None:
    nowhere = Matrix(0, 0, Strides(0), Strides(0))
    sizes = MatmulShape(batch, rows, columns * tile.columns, summands)
    kernel = ProductKernel(sizes, tile, nowhere, nowhere, adds_row=False)
    strips, panels = kernel.part
    parts = batch * -(-kernel.strips // strips) * -(-kernel.panels // panels)
    assert 1 <= strips <= kernel.strips
    assert 1 <= panels <= kernel.panels
    work = strips * panels * tile.rows * tile.columns * sizes.summands
    largest = strips == min(512 // tile.rows, kernel.strips) and panels == min(768 // tile.columns, kernel.panels)
    assert parts <= 16 or work >= 1 << 18 or largest
    if batch == 1 and work >= 1 << 19:  # then two threads finish at nearly the same time
        at_a_time = 1 if parts < 16 else 8
        longest = at_a_time * -(-parts // (2 * at_a_time)) * strips * panels
        assert longest <= 0.75 * kernel.strips * kernel.panels


@given(rows=st.integers(8, 300), columns=st.integers(1, 40))
def test_the_tile_takes_the_fewest_instructions(rows: int, columns: int) -> None:
    sizes = {"r": rows, "c": 32 * columns, "k": 1 << 14, "b": 4}
    tile = tile_for(sizes, AVX512)
    assert tile is not None
    assert sizes["c"] % tile.columns == 0
    taken = {
        t: -(-rows // t.rows) * (32 * columns // t.columns) * (t.rows * t.vectors + t.rows + t.vectors) for t in AVX512
    }
    assert taken[tile] == min(taken[t] for t in AVX512 if sizes["c"] % t.columns == 0)
