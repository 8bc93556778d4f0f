"""Attention by kernels of our own: what it computes, for scores of any form, and what is left to IREE.

`ig.compile` compares losses, gradients and updates with eager float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import irongrad as ig
from irongrad.mlir.walk import name_of, parsed
from irongrad.passes.module.attention_kernels import AttentionKernels
from tests.fixtures.compiled_steps import AroundPass
from tests.fixtures.half_products import AVX2, AVX512, runs

Sizes = tuple[int, int, int, int]  # pairs of matrices, queries, keys, columns of a head

SIZES: dict[str, Sizes] = {
    "whole tiles": (8, 64, 64, 32),
    "a prime number of queries": (6, 37, 48, 16),
    "a prime number of keys": (6, 32, 53, 24),
    "nothing even": (5, 23, 19, 7),
    "fewer keys than a vector": (4, 40, 5, 16),
    "one matrix for each core": (2, 50, 130, 20),
    "many keys": (2, 24, 1030, 16),
    "keys in blocks": (3, 16, 320, 40),
}

TARGETS = [pytest.param(t, marks=pytest.mark.skipif(not runs(t), reason="another CPU")) for t in (AVX512, AVX2)]


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    visible = torch.arange(k.shape[-2])[None] <= torch.arange(q.shape[-2])[:, None] + 3
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in Gemma 2: the scores stay below a number."""
    return (20 * torch.tanh(q @ k.transpose(-1, -2) / 20)).softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in ALiBi: a slope for each head, and one column of the keys is left out."""
    slopes = torch.arange(1.0, q.shape[0] + 1)[:, None, None]
    distances = torch.arange(k.shape[-2])[None] - torch.arange(q.shape[-2])[:, None]
    left_out = torch.zeros(k.shape[-2]).index_fill(0, torch.tensor([1]), -torch.inf)
    return (q @ k.transpose(-1, -2) + distances / slopes + left_out).softmax(-1) @ v


def normalised_late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2)
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return weights @ v / weights.sum(-1, keepdim=True)


FORMS = (attended, masked, capped, biased, normalised_late)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        batch, queries, keys, columns = sizes
        torch.manual_seed(sum(sizes))
        self.q = nn.Parameter(torch.randn(batch, queries, columns))
        self.k, self.v = (nn.Parameter(torch.randn(batch, keys, columns)) for _ in range(2))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return self.form(self.q * x, self.k, self.v)


def kernels_of(
    model: nn.Module, directory: Path, around_pass: AroundPass, target: str = "llvm-cpu", precision: str = "f32"
) -> int:
    """Compile a step, which is verified; return how many kernels it has."""
    seen = around_pass(AttentionKernels)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = ig.TrainStep(model, sum_of_squares, optimizer, {"x": torch.tensor(0.7)}, precision=precision)
    ig.compile(step, directory, target=target, cache=False, entry_points=("train_step",))
    with parsed(seen[1]) as module:
        names = [name_of(op.operation) for op in module.body if op.operation.name == "stream.executable"]
    return sum(name.startswith("attention") for name in names)


def sum_of_squares(y: Tensor) -> Tensor:
    return y.float().square().sum()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes(sizes: Sizes, target: str, tmp_path: Path, around_pass: AroundPass) -> None:
    assert kernels_of(Attention(sizes, attended), tmp_path, around_pass, target) == 2


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_forms(
    form: Callable[[Tensor, Tensor, Tensor], Tensor], target: str, tmp_path: Path, around_pass: AroundPass
) -> None:
    assert kernels_of(Attention((4, 33, 40, 16), form), tmp_path, around_pass, target) == 2


@pytest.mark.parametrize("target", TARGETS)
def test_operands_of_bfloat16(target: str, tmp_path: Path, around_pass: AroundPass) -> None:
    assert kernels_of(Attention((4, 33, 40, 16), masked), tmp_path, around_pass, target, "bf16") == 2
