"""Attention by kernels of our own: what it computes, for scores of any form, and what is left to IREE.

`ig.compile` compares losses, gradients and updates with eager float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import irongrad as ig
from irongrad.mlir.walk import found_in, name_of, parsed, text_of
from irongrad.passes.module.attention_kernels import AttentionKernels
from tests.fixtures.compiled_steps import AroundPass
from tests.fixtures.half_products import AVX2, AVX512, runs

Sizes = tuple[int, int, int, int]  # pairs of matrices, queries, keys, columns of a head

SIZES: dict[str, Sizes] = {
    "whole tiles": (8, 64, 64, 32),
    "a prime number of queries": (6, 37, 48, 16),
    "a prime number of keys": (6, 32, 53, 24),
    "nothing even": (5, 23, 19, 7),
    "fewer keys than a vector": (4, 40, 5, 4),
    "one matrix for each core": (2, 50, 130, 20),
    "a prime number of keys that are summed in parts": (2, 24, 257, 16),
    "many keys": (2, 24, 1030, 16),
    "keys in blocks": (3, 16, 320, 40),
}

TARGETS = [pytest.param(t, marks=pytest.mark.skipif(not runs(t), reason="another CPU")) for t in (AVX512, AVX2)]


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    visible = torch.arange(k.shape[-2])[None] <= torch.arange(q.shape[-2])[:, None] + 3
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sliding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As in Mistral: a row sees few columns, and none behind its own."""
    apart = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])[None]
    scores = (q @ k.transpose(-1, -2)).masked_fill((apart < 0) | (apart > 20), torch.finfo(torch.float32).min)
    return scores.softmax(-1) @ v


def seen_by_most(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first row sees nothing, and becomes zero."""
    visible = torch.arange(k.shape[-2])[None] < torch.arange(q.shape[-2])[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


def seen_again(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What a mask hides counts all the same."""
    visible = torch.arange(k.shape[-2])[None] <= torch.arange(q.shape[-2])[:, None]
    weights = (q @ k.transpose(-1, -2)).masked_fill(~visible, -torch.inf).softmax(-1)
    return (weights + 0.01) @ v


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


def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask of bits, of which a row of 40 columns ends with a part of a vector."""
    near = (torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])[None]).abs() < 9
    return (q @ k.transpose(-1, -2)).masked_fill(~near, -1e9).softmax(-1) @ v


FORMS = (attended, masked, capped, biased, normalised_late, chosen)

HIDING: dict[Callable[[Tensor, Tensor, Tensor], Tensor], bool] = {
    causal: True,
    sliding: True,
    seen_by_most: False,
    seen_again: False,
    attended: False,
}


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
    return kernels_in(compiled(model, directory, around_pass, target, precision))


def kernels_in(bytecode: bytes) -> int:
    with parsed(bytecode) as module:
        names = [name_of(op.operation) for op in module.body if op.operation.name == "stream.executable"]
    return sum(name.startswith("attention") for name in names)


def compiled(
    model: nn.Module, directory: Path, around_pass: AroundPass, target: str = "llvm-cpu", precision: str = "f32"
) -> bytes:
    """Compile a step, which is verified; return the module behind the pass."""
    seen = around_pass(AttentionKernels)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = ig.TrainStep(model, sum_of_squares, optimizer, {"x": torch.tensor(0.7)}, precision=precision)
    ig.compile(step, directory, target=target, cache=False, entry_points=("train_step",))
    return seen[1]


def mean_square(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def sum_of_squares(y: Tensor) -> Tensor:
    return y.float().square().sum()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes(sizes: Sizes, target: str, tmp_path: Path, around_pass: AroundPass) -> None:
    assert kernels_of(Attention(sizes, attended), tmp_path, around_pass, target) == 2


@pytest.mark.thinned(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("form", FORMS)
def test_forms(
    form: Callable[[Tensor, Tensor, Tensor], Tensor], target: str, tmp_path: Path, around_pass: AroundPass
) -> None:
    assert kernels_of(Attention((4, 33, 40, 16), form), tmp_path, around_pass, target) == 2


class Heads(nn.Module):
    """Attention of a sequence to itself, `heads` in a sample."""

    def __init__(self, heads: int, form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads, self.form = heads, form
        self.given, self.result = nn.Linear(24, 72, bias=False), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.given(x.to(self.given.weight.dtype)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.result(self.form(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("precision", ["f32", "bf16"])
@pytest.mark.parametrize(("form", "heads"), [(attended, 2), (masked, 1), (causal, 3), (seen_by_most, 2)])
def test_any_number_of_samples(
    form: Callable[[Tensor, Tensor, Tensor], Tensor],
    heads: int,
    precision: str,
    target: str,
    tmp_path: Path,
    around_pass: AroundPass,
    trains_as_eager: Callable[..., None],
) -> None:
    def batch_of(samples: int) -> dict[str, Tensor]:
        return {n: torch.randn(samples, 64, 24) for n in "xy"}

    model, sizes, seen = Heads(heads, form), {"x": {0: "B"}, "y": {0: "B"}}, around_pass(AttentionKernels)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, mean_square, optimizer, batch_of(5), dynamic=sizes, precision=precision)
    session = ig.compile(step, tmp_path, target=target, cache=False, entry_points=("train_step", "reset")).load()
    assert kernels_in(seen[1]) == 2
    tolerance = 1e-5 if precision == "f32" else 2e-2
    batches = [batch_of(samples) for samples in (1, 7, 2, 3)]
    trains_as_eager(session, step, batches, rtol=tolerance, state=(tolerance, tolerance))


class Latents(nn.Module):
    """Queries that all samples share, and keys whose number is divided into equal parts, which are summed first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.queries, self.given = nn.Parameter(torch.randn(20, 24)), nn.Linear(24, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.given(x.to(self.given.weight.dtype)).chunk(2, -1)
        return attended(self.queries, k, v)


@pytest.mark.parametrize("target", TARGETS)
def test_shared_queries_of_any_number_of_samples(
    target: str, tmp_path: Path, trains_as_eager: Callable[..., None]
) -> None:
    def batch_of(samples: int) -> dict[str, Tensor]:
        return {"x": torch.randn(samples, 50, 24), "y": torch.randn(samples, 20, 24)}

    model, sizes = Latents(), {"x": {0: "B"}, "y": {0: "B"}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, mean_square, optimizer, batch_of(5), dynamic=sizes)
    session = ig.compile(step, tmp_path, target=target, cache=False, entry_points=("train_step", "reset")).load()
    trains_as_eager(session, step, [batch_of(samples) for samples in (1, 7, 2)], rtol=1e-5, state=(1e-5, 1e-5))


@pytest.mark.parametrize("target", TARGETS)
def test_two_reductions_of_a_row_at_once(target: str, around_pass: AroundPass) -> None:
    """What one reduction reads must not be overwritten before the other has read it."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / 4
        powers = scores.exp()
        return powers / powers.sum(-1, keepdim=True) * (scores * scores).sum(-1, keepdim=True) @ v

    seen = around_pass(AttentionKernels)
    operands = torch.randn(4, 33, 16), torch.randn(4, 45, 16), torch.randn(4, 45, 16)
    ig.compile_function(function, operands, target=target, cache=False)
    assert kernels_in(seen[1]) == 1


def hidden_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is hidden on both sides is equal, and counts."""
    visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    scores = q @ k.transpose(-1, -2)
    differences = torch.where(visible, scores, -1e30) - torch.where(visible, scores / 2, -1e30)
    return differences.softmax(-1) @ v


def hidden_apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first row sees nothing in one of two softmaxes, so all of its columns count alike."""
    visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    least = torch.finfo(torch.float32).min
    scores = q @ k.transpose(-1, -2)
    others = scores.masked_fill(~visible.tril(-1), least).softmax(-1) @ v
    return others + scores.masked_fill(~visible, least).softmax(-1) @ v / 2


def hidden_from_what_hides_more(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What is hidden on the right side is larger, and counts alone."""
    visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    scores = q @ k.transpose(-1, -2)
    differences = torch.where(visible, scores, -1e30) - 2 * torch.where(visible, scores / 2, -1e30)
    return differences.softmax(-1) @ v


def hidden_by_infinity(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A weight of zero times minus infinity is nan in all rows but the last."""
    visible = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
    scores = (q @ k.transpose(-1, -2)).masked_fill(~visible, -math.inf)
    return (scores.softmax(-1) * scores) @ v


@pytest.mark.parametrize("form", [hidden_twice, hidden_apart, hidden_from_what_hides_more, hidden_by_infinity])
def test_what_counts_although_a_mask_hides_it(form: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """The tolerance of `ig.compile` has let some of this pass, when rounding noise changed hidden scores."""
    torch.manual_seed(0)
    operands = tuple(torch.randn(2, 64, 16) for _ in range(3))
    function = ig.compile_function(form, operands, cache=False)
    expected = form(*(x.double() for x in operands)).numpy()
    np.testing.assert_allclose(function(*(x.numpy() for x in operands)), expected, rtol=1e-4, atol=1e-4)


def test_weights_as_both_operands_of_a_product(tmp_path: Path, around_pass: AroundPass) -> None:
    """A kernel that reads them from outside needs them in memory."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return weights @ weights.transpose(-1, -2)

    assert kernels_of(Attention((4, 33, 40, 16), function), tmp_path, around_pass) == 0


@pytest.mark.parametrize("target", TARGETS)
def test_a_transposed_result(target: str, around_pass: AroundPass) -> None:
    """As in the attention over pixels of a variational autoencoder, whose values are channels-first."""

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v @ (q @ k.transpose(-1, -2)).softmax(-1).transpose(-1, -2)

    seen = around_pass(AttentionKernels)
    operands = torch.randn(4, 33, 16), torch.randn(4, 45, 16), torch.randn(4, 12, 45)
    ig.compile_function(function, operands, target=target, cache=False)
    assert kernels_in(seen[1]) == 1


def test_keys_from_a_kernel_that_is_launched_behind_their_product(around_pass: AroundPass) -> None:
    """The first kernel computes two products; the second kernel's scores are written between them."""

    def function(q: Tensor, k: Tensor, v: Tensor, others: Tensor) -> Tensor:
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        keys = weights @ v
        scores = others @ keys.transpose(-1, -2)
        values = weights @ v.cos()
        return scores.softmax(-1) @ values

    seen = around_pass(AttentionKernels)
    operands = torch.randn(4, 33, 16), torch.randn(4, 40, 16), torch.randn(4, 40, 16), torch.randn(4, 50, 16)
    ig.compile_function(function, operands, cache=False)
    assert kernels_in(seen[1]) == 2


@pytest.mark.parametrize("target", TARGETS)
def test_operands_of_bfloat16(target: str, tmp_path: Path, around_pass: AroundPass) -> None:
    assert kernels_of(Attention((4, 33, 40, 16), masked), tmp_path, around_pass, target, "bf16") == 2


@pytest.mark.thinned(2)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("sizes", [(3, 96, 96, 16), (2, 70, 128, 20)])
@pytest.mark.parametrize("form", HIDING)
def test_hidden_scores_are_left_out(
    form: Callable[[Tensor, Tensor, Tensor], Tensor],
    sizes: Sizes,
    target: str,
    tmp_path: Path,
    around_pass: AroundPass,
) -> None:
    """A kernel that leaves out columns reads how many of them the first row sees."""
    with parsed(compiled(Attention(sizes, form), tmp_path, around_pass, target)) as module:
        launches = [text_of(op) for op in found_in(module, "flow.dispatch")]
    assert [("tensor<2xi32>" in text) for text in launches if "@attention" in text] == 2 * [HIDING[form]]


def test_a_mask_from_outside_of_a_loop(tmp_path: Path, around_pass: AroundPass) -> None:
    """With accumulated gradients, a loop runs over parts of the batch; the bias is the same for all."""

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(16, 48)
            self.register_buffer("bias", torch.randn(4, 24, 24))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.weight(x).chunk(3, -1)
            return (q @ k.transpose(-1, -2) + self.bias.exp()).softmax(-1) @ v

    seen = around_pass(AttentionKernels)
    model = Biased()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, sum_of_squares, optimizer, {"x": torch.randn(8, 24, 16)}, accumulate=2)
    ig.compile(step, tmp_path, cache=False, entry_points=("train_step",))
    assert kernels_in(seen[1]) == 2


@pytest.mark.parametrize("target", TARGETS)
def test_long_sequences(target: str, tmp_path: Path, around_pass: AroundPass) -> None:
    """`row-blocks` has divided the scores; keys come in blocks, and columns in blocks of 512."""
    assert kernels_of(Attention((2, 1024, 1024, 32), causal), tmp_path, around_pass, target) >= 8


def test_kernels_on_several_threads_give_the_same_numbers_in_every_call(tmp_path: Path) -> None:
    queries = torch.randn(6, 64, 64, 16)

    def function(q: Tensor) -> Tensor:
        return causal(q[0], q[1], q[2]) * causal(q[3], q[4], q[5])

    attend = ig.compile_function(function, (queries,), cache=False)
    first = attend(queries.numpy())
    assert all(np.array_equal(attend(queries.numpy()), first) for _ in range(50))
