"""float64 scalars are computed on the host: same results, and no float64 left for the device."""

from __future__ import annotations

import iree.compiler as compiler
import iree.runtime as ireert
import numpy as np
import pytest

from irongrad.mlir.walk import bytecode_of, parsed
from irongrad.passes.module.scalars_on_host import ScalarsOnHost
from irongrad.pipeline.iree.compile import COMMON_FLAGS

LOCAL = ("--iree-hal-target-device=local", "--iree-hal-local-target-device-backends=llvm-cpu")

STEP = """
#scalar = affine_map<() -> ()>
#none = affine_map<(d0) -> ()>
#row = affine_map<(d0) -> (d0)>
func.func @scaled(%x: tensor<4xf32>, %lr: tensor<f64>) -> (tensor<4xf32>, tensor<4xi1>) {
  %one = arith.constant 1.0 : f64
  %zero = arith.constant 0.0 : f64
  %tenth = arith.constant 0.1 : f64
  %empty = tensor.empty() : tensor<f64>
  %power = linalg.generic {indexing_maps = [#scalar, #scalar], iterator_types = []}
      ins(%lr : tensor<f64>) outs(%empty : tensor<f64>) {
  ^bb0(%in: f64, %out: f64):
    %p = math.powf %in, %in : f64
    %q = arith.subf %one, %p : f64
    linalg.yield %q : f64
  } -> tensor<f64>
  %shape = tensor.empty() : tensor<4xf32>
  %y = linalg.generic {indexing_maps = [#row, #none, #row], iterator_types = ["parallel"]}
      ins(%x, %power : tensor<4xf32>, tensor<f64>) outs(%shape : tensor<4xf32>) {
  ^bb0(%in: f32, %by: f64, %out: f32):
    %narrow = arith.truncf %by : f64 to f32
    %constant = arith.truncf %tenth : f64 to f32
    %product = arith.mulf %in, %narrow : f32
    %sum = arith.addf %product, %constant : f32
    linalg.yield %sum : f32
  } -> tensor<4xf32>
  %flags = tensor.empty() : tensor<4xi1>
  %positive = linalg.generic {indexing_maps = [#row, #row], iterator_types = ["parallel"]}
      ins(%x : tensor<4xf32>) outs(%flags : tensor<4xi1>) {
  ^bb0(%in: f32, %out: i1):
    %wide = arith.extf %in : f32 to f64
    %greater = arith.cmpf ogt, %wide, %zero : f64
    linalg.yield %greater : i1
  } -> tensor<4xi1>
  return %y, %positive : tensor<4xf32>, tensor<4xi1>
}
"""


def bytecode(text: str) -> bytes:
    with parsed(text.encode()) as module:
        return bytecode_of(module)


def edited(text: str) -> bytes:
    """A module after the pass, as bytecode."""
    with parsed(text.encode()) as module:
        ScalarsOnHost().run(module)
        return bytecode_of(module)


def text_of(data: bytes) -> str:
    with parsed(data) as module:
        return str(module)


def load(data: bytes | str):
    vmfb = compiler.compile_str(data, extra_args=[*COMMON_FLAGS, *LOCAL])
    instance = ireert.VmInstance()
    module = ireert.VmModule.copy_buffer(instance, vmfb)
    device = ireert.get_device("local-sync")
    context = ireert.VmContext(instance, modules=[ireert.create_hal_module(instance, device), module])
    return device, module, context


def test_the_numbers_are_the_same():
    x, lr = np.array([1, -2, 0, 3], np.float32), np.array(0.7)
    results = []
    for data in (bytecode(STEP), edited(STEP)):
        device, module, context = load(data)
        function = ireert.FunctionInvoker(context, device, module.lookup_function("scaled"))
        results.append([np.asarray(r.to_host()) for r in function(x, lr)])
    for before, after in zip(*results, strict=True):
        np.testing.assert_array_equal(before, after)


FIRST = """
#scalar = affine_map<() -> ()>
func.func @number(%x: tensor<i1>) -> tensor<f64> {
  %empty = tensor.empty() : tensor<f64>
  %y = linalg.generic {indexing_maps = [#scalar, #scalar], iterator_types = []}
      ins(%x : tensor<i1>) outs(%empty : tensor<f64>) {
  ^bb0(%in: i1, %out: f64):
    %z = arith.uitofp %in : i1 to f64
    linalg.yield %z : f64
  } -> tensor<f64>
  return %y : tensor<f64>
}
"""


def test_flags_become_float64():
    """SGD's momentum has such a flag, for its first step."""
    device, module, context = load(edited(FIRST))
    number = ireert.FunctionInvoker(context, device, module.lookup_function("number"))
    assert [float(number(np.array(flag)).to_host()) for flag in (True, False)] == [1.0, 0.0]


def test_the_virtual_machine_still_makes_float32_of_a_flag():
    """When this fails, `_number_of` of `irongrad.passes.module.scalars_on_host` can go."""
    source = "func.func @f(%x: i1) -> f64 {\n  %y = arith.uitofp %x : i1 to f64\n  return %y : f64\n}\n"
    with pytest.raises(compiler.CompilerToolError, match="must be 32-bit float, but got 'f64'"):
        compiler.compile_str(source, extra_args=[*COMMON_FLAGS, *LOCAL])


@pytest.fixture(scope="module")
def rounded():
    """The conversion of float64 to float32 in the virtual machine."""
    helper = text_of(edited("module {}"))
    _, module, context = load(helper.replace("private @float32_of", "@float32_of"))
    function = module.lookup_function("float32_of")

    def call(value: float) -> np.float32:
        arguments, results = ireert.VmVariantList(1), ireert.VmVariantList(1)
        arguments.push_float(float(value))
        context.invoke(function, arguments, results)
        return np.float32(results.get_variant(0))

    return call


def test_rounding_is_that_of_ieee_754(rounded):
    rng = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        ties = 1 + np.arange(8) * 2.0**-24
        edges = [0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-149, 2.0**-150, 2.0**-150 * (1 + 2**-40), 2.0**-126]
        edges += [2.0**-126 * (1 - 2.0**-25), 3.4028235677973362e38, 3.4028235677973366e38]
        bits = rng.integers(0, 2**63, 2000, dtype=np.int64).view(np.float64)
        values = np.concatenate([edges, ties, bits, -bits, np.exp(rng.uniform(-110, 95, 2000))])
        expected = values.astype(np.float32)
    found = np.array([rounded(v) for v in values])
    same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
    assert values[~same].tolist() == []


def test_the_virtual_machine_still_cannot_round():
    """When this fails, `irongrad.passes.module.scalars_on_host` can leave arith.truncf as it is."""
    source = "func.func @f(%x: f64) -> f32 {\n  %y = arith.truncf %x : f64 to f32\n  return %y : f32\n}\n"
    with pytest.raises(compiler.CompilerToolError, match="failed to legalize operation 'arith.truncf'"):
        compiler.compile_str(source, extra_args=[*COMMON_FLAGS, *LOCAL])
