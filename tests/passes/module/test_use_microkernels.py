"""Matrix products use IREE's microkernels if those are faster, and compute the product."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import iree.compiler.tools.binaries as iree_binaries
import ml_dtypes
import numpy as np
import pytest

from irongrad.mlir.device import has_microkernels
from irongrad.mlir.walk import parsed
from irongrad.passes.module.use_microkernels import UseMicrokernels
from irongrad.pipeline.iree.compile import COMMON_FLAGS, compile_module
from irongrad.targets import parse_target
from tests.fixtures.module_texts import TextModule, functions_of

SIZE = 64
SUM = {"bf16": "f32", "f16": "f32", "f32": "f32", "i8": "i32"}
LIBRARY = re.compile(r"iree_uk_mmt4d_tile_\w+")


@dataclass(frozen=True)
class Product(TextModule):
    """A portable module with a product of two matrices.

    Attributes:
        multiplied: the type of the elements of both matrices.
    """

    multiplied: str

    @property
    def text(self) -> str:
        """The module."""
        given, result = (f"tensor<{SIZE}x{SIZE}x{kind}>" for kind in (self.multiplied, SUM[self.multiplied]))
        zero = "0" if SUM[self.multiplied].startswith("i") else "0.0"
        return f"""func.func @f(%a: {given}, %b: {given}) -> {result} {{
          %zero = arith.constant {zero} : {SUM[self.multiplied]}
          %empty = tensor.empty() : {result}
          %zeros = linalg.fill ins(%zero : {SUM[self.multiplied]}) outs(%empty : {result}) -> {result}
          %product = linalg.matmul ins(%a, %b : {given}, {given}) outs(%zeros : {result}) -> {result}
          return %product : {result}
        }}"""


@pytest.mark.parametrize(
    ("multiplied", "target", "microkernels"),
    [
        ("f32", "llvm-cpu:cpu=x86-64-v4", False),
        ("f16", "llvm-cpu:cpu=x86-64-v4", False),
        ("bf16", "llvm-cpu:cpu=x86-64-v4", False),
        ("bf16", "llvm-cpu:cpu=znver4", True),
        ("bf16", "llvm-cpu:arch=aarch64", False),
        ("bf16", "llvm-cpu:arch=aarch64,features=+bf16", True),
        ("i8", "llvm-cpu:cpu=x86-64", False),
        ("i8", "llvm-cpu:cpu=x86-64-v3", True),
    ],
)
def test_products_are_microkernels_where_those_are_faster(
    tmp_path: Path, multiplied: str, target: str, microkernels: bool
) -> None:
    flow = _flow_of(Product(multiplied), tmp_path, *parse_target(target).flags)
    with parsed(flow) as module:
        UseMicrokernels().run(module)
        assert has_microkernels(module) is microkernels
        assert module.operation.verify()


@pytest.mark.parametrize("multiplied", ["f32", "bf16"])
def test_products_are_right(tmp_path: Path, multiplied: str) -> None:
    dtype = np.float32 if multiplied == "f32" else ml_dtypes.bfloat16
    a, b = (np.random.default_rng(i).integers(-8, 8, (SIZE, SIZE)).astype(dtype) for i in (0, 1))
    compiled = compile_module(Product(multiplied), parse_target("llvm-cpu"), tmp_path)
    loaded = functions_of(compiled.vmfb)
    np.testing.assert_array_equal(loaded.f(a, b).to_host(), a.astype(np.float32) @ b.astype(np.float32))


def test_a_product_links_all_microkernels(tmp_path: Path) -> None:
    """When the first assertion fails, float32 may have its microkernel back, if that is as fast by then."""
    flags = parse_target("llvm-cpu:cpu=x86-64-v3").flags
    linked = "--iree-llvmcpu-enable-ukernels=default"
    found = LIBRARY.findall(_linked_code(Product("f32"), tmp_path / "with", *flags, linked))
    assert any("s8s8s32" in name for name in found)
    assert LIBRARY.findall(_linked_code(Product("f32"), tmp_path / "without", *flags)) == []


def _flow_of(product: Product, directory: Path, *flags: str) -> bytes:
    output = directory / "flow.mlirbc"
    _compile(product, output, "--compile-to=flow", "--emit-mlir-bytecode", *flags)
    return output.read_bytes()


def _linked_code(product: Product, directory: Path, *flags: str) -> str:
    """The LLVM code of a product and of the libraries linked to it."""
    directory.mkdir()
    _compile(product, directory / "out.vmfb", f"--iree-hal-dump-executable-intermediates-to={directory}", *flags)
    return "".join(file.read_text() for file in directory.glob("*.linked.ll"))


def _compile(product: Product, output: Path, *flags: str) -> None:
    source = output.with_suffix(".mlir")
    source.write_text(product.text)
    tool = iree_binaries.find_tool("iree-compile")
    subprocess.run([tool, str(source), "-o", str(output), *COMMON_FLAGS, *flags], check=True, capture_output=True)
