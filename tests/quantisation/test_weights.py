"""Quantised weights: packing loses nothing that rounding has not, and unpacking gives the very numbers."""

from __future__ import annotations

import pytest
import torch

from irongrad.quantisation.weights import QuantizedWeight, dequantised, pack, pack_pairs
from irongrad.runtime.errors import UserError


def values(weight: QuantizedWeight) -> torch.Tensor:
    return dequantised(weight.packed, weight.scale, weight.offset)


def weight(rows: int = 6, columns: int = 128) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(rows, columns) * torch.logspace(-3, 3, rows).unsqueeze(1)


@pytest.mark.parametrize(("form", "group"), [("int8", None), ("int8", 32), ("int4", 64), ("int4", 2), ("int4", None)])
def test_every_value_is_within_half_a_step(form: str, group: int | None) -> None:
    packed = pack(weight(), form, group)
    assert packed.scale is not None
    error = (values(packed) - weight()).abs().unflatten(1, (packed.scale.shape[1], -1)).amax(-1)
    assert (error <= packed.scale * 0.5001).all()
    assert (packed.rows, packed.columns) == (6, 128)


@pytest.mark.parametrize(("form", "group"), [("int8", None), ("int4", 64), ("bf16", None)])
def test_packed_values_are_packed_again_to_the_same_bits(form: str, group: int | None) -> None:
    once = pack(weight(), form, group)
    twice = pack(values(once), form, group)
    assert torch.equal(once.packed, twice.packed)
    assert torch.equal(values(once), values(twice))


def test_all_numbers_of_four_bits_survive() -> None:
    numbers = torch.arange(-8, 8, dtype=torch.int8).repeat(2, 1)
    numbers[1] = numbers[1].flip(0)
    packed = pack_pairs(numbers)
    assert (packed.dtype, packed.shape) == (torch.uint8, (2, 8))
    assert torch.equal(dequantised(packed, torch.ones(2, 1)), numbers.float())


def test_a_row_is_scaled_by_its_own_groups() -> None:
    packed = torch.tensor([[1, 2, 3, 4]], dtype=torch.int8)
    scale, offset = torch.tensor([[10.0, 100.0]]), torch.tensor([[0.5, -0.5]])
    assert dequantised(packed, scale, offset).tolist() == [[10.5, 20.5, 299.5, 399.5]]


def test_rows_that_are_looked_up_keep_their_values() -> None:
    table = pack(weight(), "int4", 32)
    rows = torch.tensor([[0, 5], [2, 2]])
    assert table.scale is not None
    assert torch.equal(dequantised(table.packed[rows], table.scale[rows]), values(table)[rows])


def test_zeros_stay_zeros() -> None:
    assert torch.equal(values(pack(torch.zeros(2, 4), "int8")), torch.zeros(2, 4))


def test_bytes_of_each_form() -> None:
    stored = {f: pack(weight(), f, g) for f, g in (("int8", None), ("int4", 64), ("bf16", None))}
    bits = {f: 8 * w.packed.numel() * w.packed.element_size() // weight().numel() for f, w in stored.items()}
    assert bits == {"int8": 8, "int4": 4, "bf16": 16}
    assert [w.form for w in stored.values()] == ["int8, group=128", "int4, group=64", "bf16"]


def test_refusals() -> None:
    with pytest.raises(UserError, match="its 128 columns cannot be divided into groups of 48"):
        pack(weight(), "int4", 48)
    with pytest.raises(UserError, match="int4 stores two numbers a byte, so groups are even, and 3 is odd"):
        pack(torch.ones(1, 9), "int4", 3)
    with pytest.raises(UserError, match="infinite or not a number"):
        pack(torch.tensor([[1.0, torch.inf]]), "int8")
