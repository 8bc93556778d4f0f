"""Integers, bytes and booleans as eager computes them: promoted, wrapped around, and summed in the dtype asked for.

Compiling a function compares its results with eager.
"""

from __future__ import annotations

import pytest
import torch

import irongrad as ig

BYTES = torch.tensor([[200, 255, 3, 44], [7, 128, 0, 253]], dtype=torch.uint8)
SIGNED = torch.tensor([[-100, 5, -1, 127], [-128, 9, 3, -4]], dtype=torch.int8)
WORDS = torch.tensor([[0, -3, 1, 2], [-1, 0, 1, 7]])
FLAGS = torch.tensor([[True, False, True, True], [False, False, True, False]])


def test_operands_of_several_dtypes_are_promoted():
    def run(byte: torch.Tensor, signed: torch.Tensor, word: torch.Tensor, flag: torch.Tensor) -> list[torch.Tensor]:
        return [
            torch.where(flag, signed, byte),
            torch.stack([flag, signed]),
            torch.cat([flag, byte]),
            flag < word,
            word >= flag,
            byte == signed,
            byte > word,
        ]

    ig.compile_function(run, (BYTES, SIGNED, WORDS, FLAGS))


def test_numbers_wrap_around_in_the_dtype_of_the_tensors_beside_them():
    def run(byte: torch.Tensor, signed: torch.Tensor, word: torch.Tensor) -> list[torch.Tensor]:
        short, large = word.to(torch.int16), word.sum() + 300
        return [
            byte == -1,
            byte < 300,
            signed == 156,
            torch.remainder(byte, -3),
            torch.remainder(-7, byte | 1),
            byte // -3,
            torch.isin(byte, 300),
            torch.maximum(byte, large),
            torch.where(byte > 3, byte, -1),
            short == 65535,
            byte / 300,
        ]

    ig.compile_function(run, (BYTES, SIGNED, WORDS))


def test_integers_are_raised_to_integers():
    exponents = torch.tensor([[0, 1, 2, 62], [63, 64, 65, 3]])

    def run(word: torch.Tensor, signed: torch.Tensor, exponent: torch.Tensor) -> list[torch.Tensor]:
        return [
            word ** (exponent - 2),
            2**exponent,
            (-3) ** exponent.to(torch.int32),
            signed ** (exponent % 4).to(torch.int8),
            torch.ldexp(word.float(), exponent % 5),
        ]

    ig.compile_function(run, (WORDS, SIGNED, exponents))


def test_a_result_has_the_dtype_that_is_asked_for():
    def run(byte: torch.Tensor, signed: torch.Tensor, word: torch.Tensor, flag: torch.Tensor) -> list[torch.Tensor]:
        return [
            flag.sum(1, dtype=torch.uint8),
            flag.sum(dtype=torch.bool),
            word.sum(0, dtype=torch.bool),
            byte.cumsum(1, dtype=torch.int8),
            flag.cumsum(0, dtype=torch.int8),
            word.cumprod(1, dtype=torch.int16),
            signed.mean(0, dtype=torch.float32),
            flag.clamp(0, 5),
            flag.clamp(min=3),
        ]

    ig.compile_function(run, (BYTES, SIGNED, WORDS, FLAGS))


def test_integers_and_booleans_are_gathered_in_one_place():
    def run(word: torch.Tensor, flag: torch.Tensor, signed: torch.Tensor) -> list[torch.Tensor]:
        place = torch.zeros_like(word)
        return [
            word.scatter_reduce(1, place, word * 3, "mean"),
            word.scatter_reduce(1, place, word * 3, "mean", include_self=False),
            (signed // 8).index_reduce(1, place[0], signed // 8, "mean"),
            flag.scatter_add(1, place, flag),
            flag.index_add(1, place[0], flag),
            torch.index_put(flag, (place[0, :2], place[0, :2]), flag[:, 0], accumulate=True),
        ]

    ig.compile_function(run, (WORDS, FLAGS, SIGNED))


def test_writes_into_bytes_and_halves_round_once():
    def run(byte: torch.Tensor, signed: torch.Tensor, half: torch.Tensor) -> list[torch.Tensor]:
        product = half.clone().addmm_(half[:, :2], half, beta=0.5)
        return [signed.clone().mul_(2), byte.clone().add_(200).floor_divide_(3), product.pow_(2).sigmoid_()]

    ig.compile_function(run, (BYTES, SIGNED, torch.randn(2, 4).bfloat16()))


@pytest.mark.parametrize("of", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_numbers_become_short_integers(dtype: torch.dtype, of: torch.dtype):
    largest = torch.iinfo(dtype).max
    numbers = torch.tensor([0.0, 1.5, largest / 2 + 1, largest * 0.75, largest, largest + 1, 2 * largest, -1]).to(of)
    ig.compile_function(lambda x: x.to(dtype), (numbers.clamp(-60_000, 60_000),))


def test_a_buffer_of_bytes_takes_numbers():
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        bytes_ = torch.zeros(16, dtype=torch.uint8)
        bytes_.copy_(x)
        part = torch.ones(16, dtype=torch.uint8)
        part[4:12] = x[4:12]
        return [bytes_, part]

    ig.compile_function(run, (torch.linspace(0, 255, 16),))
