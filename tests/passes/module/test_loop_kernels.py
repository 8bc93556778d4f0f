"""The pass loop-kernels makes one kernel of a loop whose rows never meet, which computes what the loop does."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._higher_order_ops import scan

import irongrad as ig
from irongrad.mlir.walk import inside, parsed
from irongrad.passes.module.matmul_kernels import loop_tiles, loops
from irongrad.passes.module.matmul_kernels.loop_kernel import ASSUMED_ROWS, LoopProduct
from irongrad.passes.module.matmul_kernels.loop_tiles import division_of
from irongrad.passes.module.matmul_kernels.loops import LoopKernels
from irongrad.passes.module.matmul_kernels.products import Product
from irongrad.passes.module.matmul_kernels.tiling import Matrix, Strides
from irongrad.pipeline.iree.compile import compile_module
from irongrad.targets import parse_target
from tests.fixtures.half_products import AMX, AVX2, AVX512, AVX512_BF16, runs
from tests.fixtures.module_texts import Written, functions_of
from tests.fixtures.processors import needs_x86

STEPS, BATCH, WIDTH = 9, 6, 32


# Two carried values and a stack: h' = h w + row + bias, c' = (h + c) / 2; the stack is of h'.
LOOP = """func.func @f(%w: tensor<32x32xf32>, %h0: tensor<6x32xf32>, %c0: tensor<6x32xf32>, %rows: tensor<9x6x32xf32>,
    %bias: tensor<32xf32>, %mix: tensor<6x6xf32>, %m: i32)
    -> (tensor<6x32xf32>, tensor<6x32xf32>, tensor<9x6x32xf32>) {
  %first = arith.constant 0 : index
  %n = arith.index_cast %m : i32 to index
  %trips = arith.constant 9 : index
  %last = arith.constant 8 : index
  %step = arith.constant 1 : index
  %zero = arith.constant 0.0 : f32
  %half = arith.constant 0.5 : f32
  %empty = tensor.empty() : tensor<6x32xf32>
  %zeros = linalg.fill ins(%zero : f32) outs(%empty : tensor<6x32xf32>) -> tensor<6x32xf32>
  %stack = tensor.empty() : tensor<9x6x32xf32>
  %end:3 = scf.for %t = %first to %trips step %step iter_args(%h = %h0, %c = %c0, %s = %stack)
      -> (tensor<6x32xf32>, tensor<6x32xf32>, tensor<9x6x32xf32>) {
    %back = arith.subi %last, %t : index
    %row = tensor.extract_slice %rows[%t, 0, 0] [1, 6, 32] [1, 1, 1] : tensor<9x6x32xf32> to tensor<6x32xf32>
    %product = linalg.matmul ins(%h, %w : tensor<6x32xf32>, tensor<32x32xf32>) outs(%zeros : tensor<6x32xf32>)
        -> tensor<6x32xf32>
    %new = linalg.generic {
        indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (j)>,
            affine_map<(i, j) -> (i, j)>], iterator_types = ["parallel", "parallel"]
    } ins(%product, %row, %bias : tensor<6x32xf32>, tensor<6x32xf32>, tensor<32xf32>)
        outs(%empty : tensor<6x32xf32>) {
    ^bb0(%a: f32, %b: f32, %d: f32, %o: f32):
      %x = arith.addf %a, %b : f32
      %y = arith.addf %x, %d : f32
      linalg.yield %y : f32
    } -> tensor<6x32xf32>
    %mean = linalg.generic {
        indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>],
        iterator_types = ["parallel", "parallel"]
    } ins(%h, %c : tensor<6x32xf32>, tensor<6x32xf32>) outs(%empty : tensor<6x32xf32>) {
    ^bb0(%a: f32, %b: f32, %o: f32):
      %x = arith.addf %a, %b : f32
      %y = arith.mulf %x, %half : f32
      linalg.yield %y : f32
    } -> tensor<6x32xf32>
    %next = tensor.insert_slice %new into %s[%t, 0, 0] [1, 6, 32] [1, 1, 1]
        : tensor<6x32xf32> into tensor<9x6x32xf32>
    scf.yield %new, %mean, %next : tensor<6x32xf32>, tensor<6x32xf32>, tensor<9x6x32xf32>
  }
  return %end#0, %end#1, %end#2 : tensor<6x32xf32>, tensor<6x32xf32>, tensor<9x6x32xf32>
}"""

_HALVES = """%left = tensor.extract_slice %mean[0, 0] [6, 16] [1, 1] : tensor<6x32xf32> to tensor<6x16xf32>
    %right = tensor.extract_slice %mean[0, 16] [6, 16] [1, 1] : tensor<6x32xf32> to tensor<6x16xf32>
    %one = tensor.insert_slice %right into %empty[0, 0] [6, 16] [1, 1] : tensor<6x16xf32> into tensor<6x32xf32>
    %turned = tensor.insert_slice %left into %one[0, 16] [6, 16] [1, 1] : tensor<6x16xf32> into tensor<6x32xf32>
    %next ="""
_TURNED_ROWS = """%upper = tensor.extract_slice %new[0, 0] [3, 32] [1, 1] : tensor<6x32xf32> to tensor<3x32xf32>
    %lower = tensor.extract_slice %new[3, 0] [3, 32] [1, 1] : tensor<6x32xf32> to tensor<3x32xf32>
    %one = tensor.insert_slice %lower into %empty[0, 0] [3, 32] [1, 1] : tensor<3x32xf32> into tensor<6x32xf32>
    %turned = tensor.insert_slice %upper into %one[3, 0] [3, 32] [1, 1] : tensor<3x32xf32> into tensor<6x32xf32>
    %next ="""
_JOINED = """%joined = tensor.insert_slice %product into %empty[0, 0] [6, 32] [1, 1]
        : tensor<6x32xf32> into tensor<6x32xf32>
    """
_PART = """%left = tensor.extract_slice %product[0, 0] [6, 16] [1, 1] : tensor<6x32xf32> to tensor<6x16xf32>
    %turned = tensor.insert_slice %left into %empty[0, 16] [6, 16] [1, 1] : tensor<6x16xf32> into tensor<6x32xf32>
    %next ="""

_CHANGED_MATRIX = """%v = tensor.insert_slice %h into %w[0, 0] [6, 32] [1, 1]
        : tensor<6x32xf32> into tensor<32x32xf32>
    %product ="""
_ITERATION = """%i = linalg.index 0 : index
      %k = arith.index_cast %i : index to i32
      %e = arith.sitofp %k : i32 to f32
      %y = arith.addf %x, %e"""
_READ_NUMBER = """%changing = tensor.extract %h[%first, %first] : tensor<6x32xf32>
    %mean ="""
_ROUNDED = """%narrow = tensor.empty() : tensor<9x6x32xbf16>
  %short = linalg.generic {
      indexing_maps = [affine_map<(t, i, j) -> (t, i, j)>, affine_map<(t, i, j) -> (t, i, j)>],
      iterator_types = ["parallel", "parallel", "parallel"]
  } ins(%rows : tensor<9x6x32xf32>) outs(%narrow : tensor<9x6x32xbf16>) {
  ^bb0(%a: f32, %o: bf16):
    %x = arith.truncf %a : f32 to bf16
    linalg.yield %x : bf16
  } -> tensor<9x6x32xbf16>
  %stack ="""
_OF_ROWS = "extract_slice %rows[%t, 0, 0] [1, 6, 32] [1, 1, 1] : tensor<9x6x32xf32> to tensor<6x32xf32>"
_ADDED = "ins(%product, %row, %bias : tensor<6x32xf32>, tensor<6x32xf32>"
_WIDENED = """%b = arith.extf %e : bf16 to f32
      %x = arith.addf %a, %b : f32
      %y = arith.addf"""
_SUM = """%sum = linalg.generic {
        indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>],
        iterator_types = ["parallel", "parallel"]
    } ins(%h, %c : tensor<6x32xf32>, tensor<6x32xf32>) outs(%empty : tensor<6x32xf32>) {
    ^bb0(%a: f32, %b: f32, %o: f32):
      %x = arith.addf %a, %b : f32
      linalg.yield %x : f32
    } -> tensor<6x32xf32>
    %product ="""

# What is replaced in the loop, so that its rows meet, or so that a kernel would compute something else.
REFUSED = {
    "rows are summed": [
        (
            "%product = linalg.matmul ins(%h, %w : tensor<6x32xf32>, tensor<32x32xf32>)",
            "%product = linalg.matmul ins(%mix, %h : tensor<6x6xf32>, tensor<6x32xf32>)",
        )
    ],
    "rows are exchanged": [("%next =", _TURNED_ROWS), ("scf.yield %new, %mean", "scf.yield %turned, %mean")],
    "columns of a carried value are exchanged": [("%next =", _HALVES), ("%new, %mean, %next", "%new, %turned, %next")],
    "a stored value is not whole": [("%next =", _PART), ("insert_slice %new into %s", "insert_slice %turned into %s")],
    "columns of a joined value are exchanged": [
        ("%next =", _JOINED + _HALVES.replace("%mean", "%joined")),
        ("insert_slice %new into %s", "insert_slice %turned into %s"),
    ],
    "the matrix changes": [
        ("ins(%h, %w : tensor<6x32xf32>, tensor<32x32xf32>)", "ins(%h, %v : tensor<6x32xf32>, tensor<32x32xf32>)"),
        ("%product =", _CHANGED_MATRIX),
    ],
    "the stack is read": [("extract_slice %rows[%t", "extract_slice %s[%t")],
    "the stack has a row more": [("9x6x32", "10x6x32")],
    "the stack has a row less": [("9x6x32", "8x6x32")],
    "the first row is none": [("%last = arith.constant 8", "%last = arith.constant 9"), ("%rows[%t", "%rows[%back")],
    "each iteration writes one row": [("into %s[%t, 0, 0]", "into %s[%first, 0, 0]")],
    "the stack begins with numbers": [("%s = %stack", "%s = %rows")],
    "the number of iterations is unknown": [("to %trips", "to %n")],
    "every other iteration": [("%step = arith.constant 1", "%step = arith.constant 2")],
    "the iteration is a number": [("%x = arith.addf %a, %d", ""), ("%y = arith.addf %x, %d", _ITERATION)],
    "a column for all": [
        ("affine_map<(i, j) -> (j)>", "affine_map<(i, j) -> (i)>"),
        ("tensor<32xf32>", "tensor<6xf32>"),
    ],
    "a product is added to ones": [("%zero = arith.constant 0.0", "%zero = arith.constant 1.0")],
    "a number is read": [("%half : f32", "%changing : f32"), ("%mean =", _READ_NUMBER)],
    "fewer columns than a vector": [
        ("x32xf32", "x3xf32"),
        ("32x3", "3x3"),
        ("6, 32]", "6, 3]"),
        ("tensor<32xf32>", "tensor<3xf32>"),
    ],
    "float64": [("f32", "f64")],
}

# What is replaced in the loop so that a kernel still computes it, and an iteration:
# (h, c, row, product) -> (h, c, kept).
Iteration = Callable[[Any, Any, Any, Any], tuple[Any, Any, Any]]
COMPUTED: dict[str, tuple[list[tuple[str, str]], Iteration]] = {
    "as it is": ([], lambda h, c, row, product: (product + row, (h + c) / 2, product + row)),
    "exchanged": (
        [("scf.yield %new, %mean", "scf.yield %c, %h")],
        lambda h, c, row, product: (c, h, product + row),
    ),
    "from behind": (
        [("%rows[%t", "%rows[%back"), ("into %s[%t", "into %s[%back")],
        lambda h, c, row, product: (product + row, (h + c) / 2, product + row),
    ),
    "halves": (
        [
            ("%next =", _HALVES.replace("%mean", "%product")),
            ("insert_slice %new into %s", "insert_slice %turned into %s"),
        ],
        lambda h, c, row, product: (product + row, (h + c) / 2, np.roll(product, 16, 1)),
    ),
    "rounded rows": (
        [
            (_OF_ROWS, _OF_ROWS.replace("rows", "short").replace("f32", "bf16")),
            ("%stack =", _ROUNDED),
            (_ADDED, _ADDED.replace(", tensor<6x32xf32>", ", tensor<6x32xbf16>")),
            ("^bb0(%a: f32, %b: f32, %d: f32", "^bb0(%a: f32, %e: bf16, %d: f32"),
            ("%x = arith.addf %a, %b : f32\n      %y = arith.addf", _WIDENED),
        ],
        lambda h, c, row, product: (product + row, (h + c) / 2, product + row),
    ),
    "a product of a sum": (
        [
            ("%product =", _SUM),
            ("ins(%h, %w :", "ins(%sum, %w :"),
        ],
        lambda h, c, row, product: (product + row, (h + c) / 2, product + row),
    ),
}


def written(changes: list[tuple[str, str]]) -> str:
    text = LOOP
    for old, new in changes:
        text = text.replace(old, new)
    return text


def kernels(text: str, monkeypatch: pytest.MonkeyPatch, features: tuple[str, ...] = ("avx512f",)) -> int:
    """How many loops the pass replaces."""
    monkeypatch.setattr(loops, "cpu_of", lambda module: ("x86_64", features))
    with parsed(text.encode()) as module:
        changed = LoopKernels().run(module)
        assert module.operation.verify()
        launched = [op for op in inside(module.operation) if op.name == "flow.dispatch"]
        assert changed.changed == bool(launched)
        return len(launched)


@pytest.mark.parametrize("features", [("avx512f",), ("fma",)])
def test_a_loop_is_one_kernel(monkeypatch: pytest.MonkeyPatch, features: tuple[str, ...]) -> None:
    assert kernels(LOOP, monkeypatch, features) == 1


@pytest.mark.parametrize("case", REFUSED)
def test_other_loops_stay(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    text = written(REFUSED[case])
    assert text != LOOP
    assert kernels(text, monkeypatch) == 0


def test_without_vectors_loops_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert kernels(LOOP, monkeypatch, features=("sse2",)) == 0


def expected(case: str, w: Any, h: Any, c: Any, rows: Any, bias: Any) -> list[Any]:
    """The loop in float64."""
    w, h, c, rows, bias = (np.float64(x) for x in (w, h, c, rows, bias))
    iteration, kept = COMPUTED[case][1], []
    order = range(STEPS)[::-1] if case == "from behind" else range(STEPS)
    if case == "rounded rows":
        rows = torch.from_numpy(rows).to(torch.bfloat16).double().numpy()
    for t in order:
        left = h + c if case == "a product of a sum" else h
        h, c, one = iteration(h, c, rows[t] + bias, left @ w)
        kept.append(one)
    return [h, c, np.stack(kept[::-1] if case == "from behind" else kept)]


@needs_x86
@pytest.mark.parametrize("target", ["llvm-cpu", AVX2])
def test_kernels_compute_what_loops_do(tmp_path: Path, around_pass: Callable[..., list[bytes]], target: str) -> None:
    rng = np.random.default_rng(0)
    shapes = (WIDTH, WIDTH), (BATCH, WIDTH), (BATCH, WIDTH), (STEPS, BATCH, WIDTH), (WIDTH,)
    w, *others = (rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes)
    given = [w / 6, *others]
    texts = [written(changes).replace("@f(", f"@f{n}(") for n, (changes, _) in enumerate(COMPUTED.values())]
    modules = around_pass(LoopKernels)
    loaded = functions_of(compile_module(Written("\n".join(texts)), parse_target(target), tmp_path).vmfb)
    with parsed(modules[-1]) as module:
        launched = [op for op in inside(module.operation) if op.name == "flow.dispatch"]
        assert len(launched) == len(COMPUTED)
    for n, case in enumerate(COMPUTED):
        found = getattr(loaded, f"f{n}")(*given, np.zeros((BATCH, BATCH), np.float32), 9)
        for ours, exact in zip(found, expected(case, *given), strict=True):
            np.testing.assert_allclose(ours.to_host(), exact, rtol=1e-5, atol=1e-5, err_msg=case)


def check_layer(layer: nn.Module, x: torch.Tensor, target: str) -> None:
    """Compile a layer's outputs, last state and gradients, which are verified against eager float64."""
    names, values = zip(*layer.named_parameters(), strict=True)

    def fn(x: torch.Tensor, *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, state = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))
        states = torch.utils._pytree.tree_leaves(state)
        return y.square().sum() + sum(s.pow(3).sum() for s in states), y, *states

    ig.compile_function(fn, (x, *(v.detach().clone() for v in values)), gradients=True, target=target, cache=False)


def launched_in(modules: list[bytes]) -> int:
    with parsed(modules[-1]) as module:
        return sum(op.name == "flow.dispatch" for op in inside(module.operation))


LAYERS = {
    "LSTM with a projection": (lambda: nn.LSTM(20, 48, 2, bidirectional=True, proj_size=16), 6, AVX2, 8),
    "LSTM": (lambda: nn.LSTM(20, 32), 6, "llvm-cpu", 2),
    "LSTM of one row": (lambda: nn.LSTM(20, 64), 1, "llvm-cpu", 0),  # IREE removes the batch's dimension
    "LSTM of two rows and no whole vectors": (lambda: nn.LSTM(20, 100), 2, "llvm-cpu", 2),
    "LSTM of strips of two sizes": (lambda: nn.LSTM(20, 40), 17, "llvm-cpu", 2),
    "GRU": (lambda: nn.GRU(20, 48, batch_first=True), 6, "llvm-cpu", 2),
    "GRU without bias, 2 layers": (lambda: nn.GRU(20, 16, 2, bias=False), 6, AVX2, 4),
    "GRU of no whole vectors": (lambda: nn.GRU(20, 27), 6, "llvm-cpu", 2),
    "GRU of many rows and no whole vectors": (lambda: nn.GRU(20, 27), 31, AVX2, 2),
    "RNN": (lambda: nn.RNN(20, 16, 2), 6, "llvm-cpu", 4),
    "RNN of relu": (lambda: nn.RNN(20, 16, nonlinearity="relu"), 6, "llvm-cpu", 2),
    "RNN of half a vector": (lambda: nn.RNN(20, 9), 7, "llvm-cpu", 2),
    "RNN of a quarter of a vector": (lambda: nn.RNN(20, 5), 3, "llvm-cpu", 2),
    "RNN of less": (lambda: nn.RNN(20, 3), 6, "llvm-cpu", 0),
}


@needs_x86
@pytest.mark.parametrize("case", LAYERS)
def test_recurrent_layers_are_kernels(around_pass: Callable[..., list[bytes]], case: str) -> None:
    """A kernel forwards, and one backwards, for each layer and direction."""
    torch.manual_seed(0)
    make, batch, target, count = LAYERS[case]
    layer, modules = make(), around_pass(LoopKernels)
    check_layer(layer, torch.randn(*((batch, 18) if getattr(layer, "batch_first", False) else (18, batch)), 20), target)
    assert launched_in(modules) == count


# Layers under autocast: the rows of their batch, the target, and the instruction that multiplies the state.
UNDER_AUTOCAST = {
    "LSTM": (lambda: nn.LSTM(20, 32), 6, AMX, "tdpbf16ps"),
    "LSTM of strips of two sizes, 2 layers": (lambda: nn.LSTM(20, 64, 2), 17, AMX, "tdpbf16ps"),
    "LSTM with a projection": (lambda: nn.LSTM(20, 64, proj_size=32), 32, AMX, "tdpbf16ps"),
    "LSTM of no whole tiles": (lambda: nn.LSTM(20, 48), 6, AMX, "vector.fma"),
    "GRU": (lambda: nn.GRU(20, 32, bidirectional=True), 40, AMX, "tdpbf16ps"),
    "GRU without AMX": (lambda: nn.GRU(20, 64), 23, AVX512_BF16, "avx512bf16.dpbf16ps"),
    "LSTM without AMX": (lambda: nn.LSTM(20, 32), 12, AVX512_BF16, "avx512bf16.dpbf16ps"),
    "LSTM without bfloat16": (lambda: nn.LSTM(20, 32), 6, AVX512, "vector.fma"),
    "RNN without bfloat16": (lambda: nn.RNN(20, 32), 6, AVX2, "vector.fma"),
    "RNN": (lambda: nn.RNN(20, 96, nonlinearity="relu"), 2, AMX, "tdpbf16ps"),
}


def compile_under_autocast(layer: nn.RNNBase, batch: int, target: str, directory: Path) -> None:
    """Compile a step of a layer of 20 inputs, which is verified against eager float64."""
    width = (1 + layer.bidirectional) * (layer.proj_size or layer.hidden_size)
    inputs = {"x": torch.randn(18, batch, 20), "y": torch.randn(18, batch, width)}
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    step = ig.TrainStep(layer, lambda out, y: nn.functional.mse_loss(out[0].float(), y), optimizer, inputs)
    ig.compile(step, directory, target, precision="bf16", entry_points=("train_step",), cache=False)


@needs_x86
@pytest.mark.parametrize("case", UNDER_AUTOCAST)
def test_layers_under_autocast_are_kernels(tmp_path: Path, around_pass: Callable[..., list[bytes]], case: str) -> None:
    """A kernel forwards, and one backwards, for each layer and direction; both multiply bfloat16 if the CPU does."""
    torch.manual_seed(0)
    make, batch, target, instruction = UNDER_AUTOCAST[case]
    if not runs(target):
        pytest.skip(f"needs a CPU for {target}")
    layer, modules = make(), around_pass(LoopKernels)
    compile_under_autocast(layer, batch, target, tmp_path)
    directions = 1 + layer.bidirectional
    assert launched_in(modules) == 2 * layer.num_layers * directions
    with parsed(modules[-1]) as module:
        loops_in = [str(op) for op in module.body.operations if "stream.executable" in str(op)[:40]]
    assert all(instruction in text for text in loops_in)


# Layers, their steps and rows, the dimensions of any size, the precision, and how many kernels there are.
OF_ANY_SIZE = {
    "LSTM over any steps": (lambda: nn.LSTM(20, 32), (18, 6), "T", "f32", 2),
    "GRU over any rows": (lambda: nn.GRU(20, 27, bidirectional=True), (18, 6), "B", "f32", 4),
    "LSTM over any steps and rows": (lambda: nn.LSTM(20, 48, 2, proj_size=16), (18, 6), "TB", "f32", 4),
    "RNN over few steps and any rows": (lambda: nn.RNN(20, 32), (5, 6), "B", "f32", 2),
    "GRU over any steps and rows, in bfloat16": (lambda: nn.GRU(20, 64), (18, 20), "TB", "bf16", 2),
    "LSTM over any rows, in bfloat16": (lambda: nn.LSTM(20, 32, bidirectional=True), (18, 6), "B", "bf16", 4),
}


class OfItsDtype(nn.Module):
    """A layer whose inputs are cast to the dtype of its weights, as its copy in float64 needs."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x.to(self.layer.weight_ih_l0.dtype))


def step_of_any_size(case: str) -> ig.TrainStep:
    """A step of a layer's outputs and last state; the loss also reads the last row, and the mean over all steps."""
    torch.manual_seed(0)
    make, sizes, open_dimensions, precision, _ = OF_ANY_SIZE[case]
    model = OfItsDtype(make())
    dynamic = {name: {d: x for d, x in enumerate("TB") if x in open_dimensions} for name in ("x", "y")}

    def loss(out: tuple[torch.Tensor, Any], y: torch.Tensor) -> torch.Tensor:
        outputs, state = out[0].float(), torch.utils._pytree.tree_leaves(out[1])
        error = nn.functional.mse_loss(outputs + outputs[-1] + outputs.mean(0), y)
        return error + sum(s.float().square().mean() for s in state)

    inputs, optimizer = batch_of_any_size(model.layer, *sizes), torch.optim.SGD(model.parameters(), lr=0.1)
    return ig.TrainStep(model, loss, optimizer, inputs, dynamic=dynamic, precision=precision)


def batch_of_any_size(layer: nn.RNNBase, steps: int, rows: int) -> dict[str, torch.Tensor]:
    """A batch of a layer of 20 inputs."""
    numbers = torch.Generator().manual_seed(100 * steps + rows)
    width = (1 + layer.bidirectional) * (layer.proj_size or layer.hidden_size)
    return {n: torch.randn(steps, rows, size, generator=numbers) for n, size in {"x": 20, "y": width}.items()}


@needs_x86
@pytest.mark.parametrize("case", OF_ANY_SIZE)
def test_layers_of_any_size_are_kernels(
    tmp_path: Path, around_pass: Callable[..., list[bytes]], trains_as_eager: Callable[..., None], case: str
) -> None:
    """Among the sizes are one step, one row, and rows that are left over from strips."""
    _, (steps, rows), open_dimensions, precision, count = OF_ANY_SIZE[case]
    modules, step = around_pass(LoopKernels), step_of_any_size(case)
    session = ig.compile(step, tmp_path, entry_points=("train_step", "reset"), cache=False).load()
    assert launched_in(modules) == count
    with parsed(modules[0]) as module:  # nothing is reversed behind a loop, nor before it in one direction
        reverses = any(op.name == "tensor.extract" for op in inside(module.operation))
    assert reverses == step.model.layer.bidirectional
    other_steps = (1, 2, 40) if "T" in open_dimensions else (steps,)
    other_rows = (1, 3, 4, 17, 33) if "B" in open_dimensions else (rows,)
    batches = [batch_of_any_size(step.model.layer, t, b) for t in other_steps for b in other_rows]
    rtol, state = (1e-4, (1e-3, 1e-5)) if precision == "f32" else (2e-2, (2e-2, 2e-2))
    trains_as_eager(session, step_of_any_size(case), batches, rtol=rtol, state=state)


@needs_x86
def test_rows_that_differ_have_no_kernel(around_pass: Callable[..., list[bytes]], tmp_path: Path) -> None:
    """A loop carries two values of different numbers of rows, both of any size."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(8))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            weight = self.weight

            def body(carried: tuple[torch.Tensor, ...], row: torch.Tensor) -> Any:
                a, b = carried
                return (a @ weight + row, b * 0.5), a.sum(1)

            (a, b), sums = scan(body, (torch.zeros_like(x[0]), y), x)
            return a.square().mean() + b.mean() + sums.mean()

    torch.manual_seed(0)
    modules, model = around_pass(LoopKernels), Pair()
    inputs = {"x": torch.randn(6, 3, 8), "y": torch.randn(5, 8)}
    dynamic = {"x": {1: "A"}, "y": {0: "B"}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(
        model, lambda out: out, optimizer, inputs, model_inputs=["x", "y"], loss_inputs=[], dynamic=dynamic
    )
    ig.compile(step, tmp_path, entry_points=("train_step",), cache=False)
    assert launched_in(modules) == 0


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few threads, and right operands that are far from every core, as those of a wide layer: strips come together."""
    monkeypatch.setattr(loop_tiles, "_NEAR", 0)
    monkeypatch.setattr(loop_tiles, "_FAR", 200)
    monkeypatch.setattr(loop_tiles, "_THREADS", (2,))


# Layers, their batch, and the target.
TOGETHER = {
    "LSTM": (lambda: nn.LSTM(20, 32), 32, "llvm-cpu"),
    "LSTM with a projection, 30 rows": (lambda: nn.LSTM(20, 48, proj_size=16), 30, AVX2),
    "GRU of no whole vectors": (lambda: nn.GRU(20, 27), 40, "llvm-cpu"),
}


@needs_x86
@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("case", TOGETHER)
def test_a_thread_computes_several_strips_at_a_time(around_pass: Callable[..., list[bytes]], case: str) -> None:
    torch.manual_seed(0)
    make, batch, target = TOGETHER[case]
    modules = around_pass(LoopKernels)
    check_layer(make(), torch.randn(18, batch, 20), target)
    assert launched_in(modules) == 2
    with parsed(modules[-1]) as module:
        loops_in = [str(op) for op in module.body.operations if "stream.executable" in str(op)[:40]]
    assert any("%c2 = arith.constant 2" in text and "stream.return %c2, %c1, %c1" in text for text in loops_in)


@needs_x86
@pytest.mark.usefixtures("far")
@pytest.mark.parametrize("target", [AMX, AVX512_BF16])
def test_strips_of_pairs_come_together(tmp_path: Path, around_pass: Callable[..., list[bytes]], target: str) -> None:
    if not runs(target):
        pytest.skip(f"needs a CPU for {target}")
    torch.manual_seed(0)
    modules = around_pass(LoopKernels)
    compile_under_autocast(nn.LSTM(20, 64), 64, target, tmp_path)
    assert launched_in(modules) == 2


def product_of(summands: int, columns: int, *, is_in_pairs: bool) -> LoopProduct:
    of = Product(None, {"r": 1, "k": summands, "c": columns}, (None, "rk"), (None, "kc"))
    return LoopProduct(of, None, Matrix(0, 0, Strides(0), Strides(0)), is_in_pairs)


@given(
    batch=st.none() | st.integers(2, 300),
    sizes=st.lists(st.tuples(st.integers(1, 1100), st.integers(1, 130).map(lambda n: 32 * n)), min_size=1, max_size=3),
    width=st.sampled_from([4, 8, 16]),
    is_in_pairs=st.booleans(),
    is_amx=st.booleans(),
)
def test_strips_are_all_rows(
    batch: int | None, sizes: list[tuple[int, int]], width: int, is_in_pairs: bool, is_amx: bool
) -> None:
    strips, together = division_of(
        batch, [product_of(*s, is_in_pairs=is_in_pairs) for s in sizes], width, is_amx=is_amx
    )
    rows = batch or ASSUMED_ROWS
    assert 1 <= together <= strips <= rows
    assert strips % together == 0
    assert rows % strips == 0 or (together == 1 and batch is not None)
    assert -(-rows // strips) <= 16


@pytest.mark.parametrize(
    ("units", "is_in_pairs", "together"),
    [(256, False, False), (512, False, True), (256, True, False), (1024, True, True)],
)
def test_strips_come_together_if_weights_leave_the_cache(units: int, is_in_pairs: bool, together: bool) -> None:
    product = product_of(units, 4 * units, is_in_pairs=is_in_pairs)
    assert (division_of(128, [product], 16, is_amx=is_in_pairs)[1] > 1) == together


@needs_x86
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_layers_of_any_size_are_right(seed: int, request: pytest.FixtureRequest) -> None:
    rng = random.Random(seed)
    if seed % 2:
        request.getfixturevalue("far")
    torch.manual_seed(seed)
    kind = rng.choice([nn.LSTM, nn.GRU, nn.RNN])
    size, width = rng.randint(1, 70), 16 * rng.randint(0, 9) + rng.choice([0, 0, 0, 8, 5, 3]) or 4
    options: dict[str, Any] = {"num_layers": rng.randint(1, 2), "bidirectional": rng.random() < 0.3}
    if kind is nn.LSTM and rng.random() < 0.3:
        options["proj_size"] = rng.randint(1, width - 1)
    layer = kind(size, width, bias=rng.random() < 0.8, **options)
    target = rng.choice(["llvm-cpu", AVX2])
    check_layer(layer, torch.randn(rng.randint(3, 33), rng.randint(1, 34), size), target)
