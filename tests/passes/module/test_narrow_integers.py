"""64-bit integers become 32-bit ones: same signature and results, and a refusal if 32 bits are too few."""

from __future__ import annotations

import iree.compiler as compiler
import iree.runtime as ireert
import numpy as np
import pytest
import torch

import irongrad as ig
from irongrad.mlir.walk import bytecode_of, parsed
from irongrad.passes.module.narrow_integers import NarrowIntegers
from irongrad.runtime.errors import UnsupportedOpError

LOCAL = ["--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu"]

MODULE = """
#scalar = affine_map<() -> ()>
#map = affine_map<(d0) -> (d0)>
func.func @main(%x: tensor<5xi64>, %n: tensor<i64>) -> (tensor<5xi64>, tensor<i64>, tensor<i1>) {
  %r:3 = call @graph.f(%x, %n) : (tensor<5xi64>, tensor<i64>) -> (tensor<5xi64>, tensor<i64>, tensor<i1>)
  return %r#0, %r#1, %r#2 : tensor<5xi64>, tensor<i64>, tensor<i1>
}
func.func private @graph.f(%x: tensor<5xi64>, %n: tensor<i64>) -> (tensor<5xi64>, tensor<i64>, tensor<i1>) {
  %c = arith.constant CONSTANT : i64
  %table = arith.constant dense<[1, -2, 3, -4, 5]> : tensor<5xi64>
  %empty = tensor.empty() : tensor<5xi64>
  %y = linalg.generic {indexing_maps = [#map, #map, #map], iterator_types = ["parallel"]}
      ins(%x, %table : tensor<5xi64>, tensor<5xi64>) outs(%empty : tensor<5xi64>) {
  ^bb0(%in: i64, %t: i64, %out: i64):
    %m = arith.maxsi %in, %t : i64
    %s = arith.minsi %m, %c : i64
    linalg.yield %s : i64
  } -> tensor<5xi64>
  %none = tensor.empty() : tensor<i1>
  %flag = linalg.generic {indexing_maps = [#scalar, #scalar], iterator_types = []}
      ins(%n : tensor<i64>) outs(%none : tensor<i1>) {
  ^bb0(%in: i64, %out: i1):
    %small = arith.cmpi slt, %in, %c : i64
    linalg.yield %small : i1
  } -> tensor<i1>
  return %y, %n, %flag : tensor<5xi64>, tensor<i64>, tensor<i1>
}
"""


def bytecode(constant: int) -> bytes:
    with parsed(MODULE.replace("CONSTANT", str(constant)).encode()) as module:
        return bytecode_of(module)


def narrowed(source: bytes) -> bytes:
    """A module, as text or bytecode, after the pass."""
    with parsed(source) as module:
        NarrowIntegers().run(module)
        return bytecode_of(module)


def run(data: bytes, x: list[int], n: int) -> list[np.ndarray]:
    vmfb = compiler.compile_str(data, extra_args=LOCAL)
    instance = ireert.VmInstance()
    module = ireert.VmModule.copy_buffer(instance, vmfb)
    device = ireert.get_device("local-sync")
    context = ireert.VmContext(instance, modules=[ireert.create_hal_module(instance, device), module])
    function = ireert.FunctionInvoker(context, device, module.lookup_function("main"))
    return [np.asarray(r.to_host()) for r in function(np.array(x, np.int64), np.array(n, np.int64))]


def test_numbers_of_32_bits_are_the_same():
    before, after = bytecode(100), narrowed(bytecode(100))
    for n in (5, -7, 2**31 - 1, -(2**31)):
        for a, b in zip(run(before, [3, -9, 200, -1, 0], n), run(after, [3, -9, 200, -1, 0], n), strict=True):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)


def test_a_value_out_of_range_saturates():
    after = narrowed(bytecode(100))
    _, high, small = run(after, [0] * 5, 2**32 + 5)
    assert (high, small.astype(bool)) == (2**31 - 1, False)
    _, low, small = run(after, [0] * 5, -(2**40))
    assert (low, small.astype(bool)) == (-(2**31), True)


def test_the_limits_of_64_bits_become_those_of_32():
    found, _, small = run(narrowed(bytecode(2**63 - 1)), [7, 2**31 - 1, 0, 0, 0], 9)
    assert found.tolist() == [7, 2**31 - 1, 3, 0, 5]
    assert small.astype(bool)


HIGH_WORD = "%h = arith.shrui %in, %whole : i64  %lo = arith.addi %in, %t : i64  %m = arith.addi %lo, %h"
COUNTER = """
    %none.c = tensor.empty() : tensor<5xi64>
    %counted = linalg.generic {indexing_maps = [#map], iterator_types = ["parallel"]} outs(%none.c : tensor<5xi64>) {
    ^bb0(%out: i64):
      %i = linalg.index 0 : index
      %w = arith.index_cast %i : index to i64
      %times = arith.constant TIMES : i64
      %m = arith.muli %w, %times : i64
      linalg.yield %m : i64
    } -> tensor<5xi64>
    %whole = arith.constant 32 : i64
"""


def test_the_high_word_of_a_counter_of_elements_is_zero():
    """JAX numbers the elements of its random tensors with such a counter."""

    def counted(times: int) -> bytes:
        text = MODULE.replace("CONSTANT", str(2**31 - 1)).replace("%m = arith.maxsi %in, %t", HIGH_WORD)
        text = text.replace("%table = ", f"{COUNTER.replace('TIMES', str(times))}    %table = ")
        text = text.replace("ins(%x, %table :", "ins(%counted, %table :")
        return text.encode()

    found, _, _ = run(narrowed(counted(1000)), [0] * 5, 0)
    assert found.tolist() == [1000 * i + t for i, t in enumerate([1, -2, 3, -4, 5])]
    with pytest.raises(UnsupportedOpError, match="shifts a number by 32"):
        narrowed(counted(2**30))


def test_an_input_of_any_64_bit_number_is_refused(tmp_path):
    model = torch.nn.Linear(3, 1)
    step = ig.TrainStep(
        model=model,
        loss=lambda y, target: (y - target.float()).square().mean(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        inputs={"x": torch.randn(2, 3), "target": torch.tensor([[1], [2]])},
    )
    with pytest.raises(UnsupportedOpError, match="the input 'target' holds 64-bit integers that are more than indices"):
        ig.compile(step, tmp_path / "step", "vulkan:profile=generic", entry_points=["train_step"])
