"""Products of bfloat16 have kernels of ours, which compute them exactly where float32 does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import irongrad as ig
from irongrad.mlir.walk import named_in, parsed
from irongrad.passes.module.matmul_kernels import MatmulKernels
from irongrad.pipeline.iree.compile import COMMON_FLAGS, Compilation, compile_module
from irongrad.targets import parse_target
from tests.fixtures.half_products import AMX, AVX2, AVX512, AVX512_BF16, HalfProduct, HalfProducts, runs
from tests.fixtures.module_texts import functions_of

SIZES = {"b": 3, "r": 128, "c": 96, "k": 128}
PRODUCTS = (
    HalfProduct("rk", "kc", SIZES),
    HalfProduct("kr", "kc", SIZES),
    HalfProduct("rk", "ck", SIZES, adds_row=True),
    HalfProduct("kr", "ck", SIZES, is_rounded=True),
    HalfProduct("brk", "bkc", SIZES, adds_row=True, is_rounded=True),
    HalfProduct("brk", "bck", SIZES | {"r": 131}),
    HalfProduct("brk", "bck", SIZES, given_left="rbk", given_right="cbk"),
    HalfProduct("brk", "bkc", SIZES, given_left="kbr", given_right="kcb"),
    # Rows and summands that fill no whole register.
    HalfProduct("rk", "kc", SIZES | {"r": 33, "c": 32, "k": 2050}, adds_row=True, is_rounded=True),
    HalfProduct("brk", "bck", SIZES | {"r": 61, "k": 194}, is_rounded=True),
    # More summands than one block has; the last block has fewer than a register of AMX.
    HalfProduct("rk", "kc", SIZES | {"r": 17, "k": 8706}),
    HalfProduct("rk", "ck", SIZES | {"r": 600, "k": 1090}, adds_row=True, is_rounded=True),
)
TARGETS = [
    pytest.param(target, marks=pytest.mark.skipif(not runs(target), reason="needs a CPU with its instructions"))
    for target in (AMX, AVX512_BF16, AVX512, AVX2)
]


def flow_of(products: tuple[HalfProduct, ...], target: str, directory: Path) -> bytes:
    source, compiled_for = directory / "step.mlirbc", parse_target(target)
    source.write_bytes(HalfProducts(products).bytecode)
    return Compilation.of(source, compiled_for, [*COMMON_FLAGS, *compiled_for.flags]).to_flow()


def arguments_of(product: HalfProduct, *, exact: bool, seed: int = 0) -> list[np.ndarray]:
    """Two operands and a row: small integers if all sums are to be exact, otherwise normal numbers."""
    rng = np.random.default_rng(seed)
    shapes = [[product.sizes[x] for x in letters] for letters in (*product.given, "c")]
    made = (rng.integers(-8, 8, shape) if exact else rng.standard_normal(shape) for shape in shapes)
    return [values.astype(np.float32) for values in made]


def expected(product: HalfProduct, left: np.ndarray, right: np.ndarray, row: np.ndarray) -> np.ndarray:
    """The product in float64, rounded where the kernel rounds."""
    a, b = (torch.from_numpy(x).bfloat16().double().numpy() for x in (left, right))
    batch = "b" * product.left.count("b")
    sums = np.einsum(f"{','.join(product.given)}->{batch}rc", a, b, optimize=True) + row * product.adds_row
    return torch.from_numpy(sums).float().bfloat16().float().numpy() if product.is_rounded else sums


@pytest.mark.parametrize(
    ("target", "instructions"),
    [(AMX, {"tdpbf16ps tmm", "dpbf16ps.512"}), (AVX512_BF16, {"dpbf16ps.512"}), (AVX512, set()), (AVX2, set())],
)
def test_products_have_kernels_of_our_own(tmp_path: Path, target: str, instructions: set[str]) -> None:
    with parsed(flow_of(PRODUCTS, target, tmp_path)) as module:
        assert not named_in(module, "linalg.matmul", "linalg.batch_matmul")
        kernels = [str(kernel) for kernel in named_in(module, "stream.executable")]
    assert kernels
    for kernel in kernels:
        assert {name for name in ("tdpbf16ps tmm", "dpbf16ps.512") if name in kernel} == instructions


@pytest.mark.parametrize("target", TARGETS)
def test_products_are_exact_where_their_sums_are(tmp_path: Path, target: str) -> None:
    loaded = functions_of(compile_module(HalfProducts(PRODUCTS), parse_target(target), tmp_path).vmfb)
    for number, product in enumerate(PRODUCTS):
        arguments = arguments_of(product, exact=True)
        found = getattr(loaded, f"f{number}")(*arguments).to_host()
        np.testing.assert_array_equal(found, expected(product, *arguments), err_msg=str(product))


@pytest.mark.parametrize("target", TARGETS[:2])
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_products_of_any_size_are_near_float64(tmp_path: Path, target: str, data: st.DataObject) -> None:
    sizes = st.fixed_dictionaries(
        {
            "b": st.integers(1, 3),
            "r": st.integers(16, 200),
            "c": st.integers(1, 8).map(lambda n: 16 * n),
            "k": st.integers(16, 700).map(lambda n: 2 * n),
        }
    )
    forms = st.tuples(st.sampled_from(["rk", "kr", "brk", "bkr"]), st.sampled_from(["kc", "ck"]))
    made = st.builds(
        lambda form, sizes, adds_row, is_rounded: HalfProduct(
            form[0], "b" * form[0].count("b") + form[1], sizes, adds_row=adds_row, is_rounded=is_rounded
        ),
        forms,
        sizes,
        st.booleans(),
        st.booleans(),
    )
    products = tuple(data.draw(st.lists(made, min_size=5, max_size=5)))
    loaded = functions_of(compile_module(HalfProducts(products), parse_target(target), tmp_path).vmfb)
    for number, product in enumerate(products):
        arguments = arguments_of(product, exact=False, seed=number)
        exact = expected(replace(product, is_rounded=False), *arguments)
        found = getattr(loaded, f"f{number}")(*arguments).to_host()
        # Of float32 sums of that many summands of size one; rounding adds half a unit in the last of eight places.
        error = 2**-22 * product.sizes["k"] + 2**-8 * np.abs(exact) * product.is_rounded
        assert (np.abs(found - exact) <= error).all(), product


@pytest.mark.parametrize("target", TARGETS)
def test_rounding_is_to_the_nearest_even_and_keeps_what_is_no_number(tmp_path: Path, target: str) -> None:
    """A product by the identity has the numbers themselves as sums, and `row` adds half a unit in the last place."""
    product = HalfProduct("rk", "kc", {"r": 128, "c": 128, "k": 128}, adds_row=True, is_rounded=True)
    right, row = np.eye(128, dtype=np.float32), np.zeros(128, np.float32)
    numbers = np.array([1, 1 + 2**-7, -1, -1 - 2**-7, 2**-7, 0, 3e38, 1], np.float32)
    row[:8] = np.array([2**-8, 2**-8, -(2**-8), -(2**-8), 0, 0, 3e38, np.nan], np.float32)
    left = np.zeros((128, 128), np.float32)
    left[:, :8] = numbers
    loaded = functions_of(compile_module(HalfProducts((product,)), parse_target(target), tmp_path).vmfb)
    found = loaded.f0(left, right, row).to_host()
    nearest = torch.from_numpy(numbers).add(torch.from_numpy(row[:8])).bfloat16().float().numpy()
    assert np.isinf(nearest[6])
    assert np.isnan(nearest[7])
    np.testing.assert_array_equal(found[:, :8], np.tile(nearest, (128, 1)))
    left[5, 7] = np.inf
    found = loaded.f0(left, right, np.zeros(128, np.float32)).to_host()
    assert np.isinf(found[5, 7])
    assert np.isnan(found[5, 8:]).all()
    assert np.isfinite(np.delete(found, 5, 0)).all()


@pytest.mark.parametrize("device", ["local-sync", "local-task"])
@pytest.mark.skipif(not runs(AMX), reason="needs AMX")
def test_a_kernel_asks_for_amx_and_does_without_it(tmp_path: Path, device: str) -> None:
    """Linux denies AMX to a process in which the stack of a thread for signals is too small for its registers."""
    product = HalfProduct("rk", "kc", SIZES)
    vmfb = tmp_path / "product.vmfb"
    vmfb.write_bytes(compile_module(HalfProducts((product,)), parse_target(AMX), tmp_path).vmfb)
    for is_denied in (False, True):
        done = subprocess.run(
            [sys.executable, "-c", _ASKING, vmfb, device, str(int(is_denied))],
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == ["0", str(int(not is_denied)), "128.0"]


# Prints whether the process may use AMX, before and after it has run a product of ones, and a result of that.
_ASKING = """
import ctypes, sys
import iree.runtime as ireert
import numpy as np

vmfb, device, is_denied = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)

class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

def may_use_amx():
    granted = ctypes.c_ulong()
    assert libc.syscall(158, 0x1022, ctypes.byref(granted)) == 0  # arch_prctl(ARCH_GET_XCOMP_PERM)
    return granted.value >> 18 & 1

memory = ctypes.create_string_buffer(2048)
small = Stack(ctypes.addressof(memory), 0, len(memory))
if is_denied == "1":
    assert libc.sigaltstack(ctypes.byref(small), None) == 0
print(may_use_amx())
config = ireert.Config(device)
module = ireert.load_vm_module(ireert.VmModule.mmap(config.vm_instance, vmfb), config)
ones = np.ones((128, 128), np.float32)
result = module.f0(ones, ones[:, :96].copy(), ones[0, :96].copy()).to_host()
print(may_use_amx(), result[127, 95])
"""


@pytest.mark.parametrize("target", TARGETS[:2])
def test_products_over_chunks_and_their_sum_have_one_kernel(
    tmp_path: Path, around_pass: Callable[..., list[bytes]], target: str
) -> None:
    """The weight gradient of a layer of many rows; eager's own is rounded to bfloat16, too."""
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(64, 96), 4096
    inputs = {"x": torch.randn(rows, 64), "y": torch.randn(rows, 96)}
    step = ig.TrainStep(layer, torch.nn.functional.mse_loss, torch.optim.SGD(layer.parameters(), lr=0.1), inputs)
    modules = around_pass(MatmulKernels)
    ig.compile(step, tmp_path, target, precision="bf16", entry_points=("train_step",), cache=False)
    with parsed(modules[-1]) as module:
        names = [str(op.attributes["entry_points"]) for op in named_in(module, "flow.dispatch")]
    assert any(f"96x64x{rows}" in name for name in names)
