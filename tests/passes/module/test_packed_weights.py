"""Kernels of products read right operands as they are stored: in 4, 8 or 16 bits for each number."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import irongrad as ig
from irongrad.passes.module import matmul_kernels
from irongrad.passes.module.matmul_kernels import vector_code
from irongrad.passes.module.matmul_kernels.packed_weights import Packing
from irongrad.passes.module.matmul_kernels.tiling import ProductKernel
from irongrad.quantisation.weights import QuantizedWeight, dequantised, pack

ROWS, COLUMNS, SAMPLES = 192, 256, 40  # 40 rows are not a whole number of tiles
TARGETS = ("llvm-cpu:cpu=x86-64-v4", "llvm-cpu:cpu=x86-64-v3")

# The packing, and the number of columns that share a scale.
FORMS = {
    "int8": (Packing("i8", ROWS, COLUMNS, 1), "int8", None),
    "int8 in groups": (Packing("i8", ROWS, COLUMNS, 8), "int8", 32),
    "int8 with an offset": (Packing("i8", ROWS, COLUMNS, 4, has_offset=True), "int8", 64),
    "int4": (Packing("u4", ROWS, COLUMNS, 4), "int4", 64),
    "int4 with one scale a row": (Packing("u4", ROWS, COLUMNS, 1), "int4", None),
    "int4 with an offset": (Packing("u4", ROWS, COLUMNS, 2, has_offset=True), "int4", 128),
    "bf16": (Packing("bf16", ROWS, COLUMNS), "bf16", None),
}


def weight_of(form: str) -> QuantizedWeight:
    torch.manual_seed(0)
    packing, kind, group = FORMS[form]
    made = pack(torch.randn(ROWS, COLUMNS), kind, group)
    offset = torch.randn(ROWS, packing.groups) if packing.has_offset else None
    return QuantizedWeight(made.packed, made.scale, offset)


def products(
    x: torch.Tensor,
    y: torch.Tensor,
    packed: torch.Tensor,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The product of a layer's forward, and that of its backward."""
    weight = dequantised(packed, scale, offset)
    return x @ weight.T, y @ weight


def inputs_of(weight: QuantizedWeight) -> tuple[torch.Tensor, ...]:
    stored = (weight.packed, weight.scale, weight.offset)
    return torch.randn(SAMPLES, COLUMNS), torch.randn(SAMPLES, ROWS), *(t for t in stored if t is not None)


@pytest.fixture(name="packings")
def packings_fixture(monkeypatch: pytest.MonkeyPatch) -> list[Packing | None]:
    """How the right operands of the kernels that are written from now on are stored."""
    found: list[Packing | None] = []

    def executable_of(kernel: ProductKernel, name: str) -> Any:
        found.append(kernel.packing)
        return vector_code.executable_of(kernel, name)

    monkeypatch.setattr(matmul_kernels, "executable_of", executable_of)
    return found


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_products_with_stored_weights_are_right(form: str, target: str, packings: list[Packing | None]) -> None:
    """`compile_function` compares them with float64."""
    ig.compile_function(products, inputs_of(weight_of(form)), target=target, cache=False)
    assert packings == [FORMS[form][0]] * 2


def test_other_arithmetic_is_left_to_iree(packings: list[Packing | None]) -> None:
    def other(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        numbers = packed.unflatten(-1, (4, -1)).int().unsqueeze(-1)
        high_first = torch.where(torch.arange(2) == 1, numbers & 15, numbers >> 4) - 8
        return x @ (high_first.float() * scale.reshape(ROWS, 4, 1, 1)).flatten(1).T

    made = weight_of("int4")
    ig.compile_function(other, (torch.randn(SAMPLES, COLUMNS), made.packed, made.scale), target=TARGETS[0], cache=False)
    assert packings == [None]
