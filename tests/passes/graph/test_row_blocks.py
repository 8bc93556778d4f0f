"""The pass row-blocks: the softmax of a product in blocks of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import GraphModule
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import irongrad as ig
from irongrad.graph.float64_runs import differences, run_in_float64
from irongrad.passes import parse_passes, passes_at, run_passes
from irongrad.passes.graph.row_blocks import RowBlocks
from irongrad.pipeline.driver import step_graph
from irongrad.targets import Ability

# So small that the matrices of the tests count as large.
SMALL = RowBlocks(least=1, rows=4, sums=0.0)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(math.prod(shape)), dtype=torch.float64)


def matrices(graph: GraphModule, *sizes: int) -> list[str]:
    """The floating-point values of `graph` whose shapes end with these sizes."""
    values = [(n.name, n.meta["val"]) for n in graph.graph.nodes if n.op == "call_function"]
    return [n for n, v in values if v.is_floating_point() and tuple(v.shape[-len(sizes) :]) == sizes]


class Attention(torch.nn.Module):
    """Attention over projections of a sequence [B, T, 8], twice."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 24), torch.nn.Linear(8, 24)
        self.options = options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second):
            q, k, v = layer(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2).flatten(2)
        return x


def joint_of(
    model: torch.nn.Module, loss: Callable[..., torch.Tensor], **inputs: torch.Tensor
) -> tuple[GraphModule, ...]:
    """The joint graph of a step without and with the pass, and how many blocks there are."""
    step = ig.TrainStep(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    before = run_passes(step_graph(step), passes_at(2), ["llvm-cpu"])
    after = run_passes(before, [SMALL, *parse_passes("cse,dce")], ["llvm-cpu"])
    return before.functions["joint"].graph, after.functions["joint"].graph


def difference(before: GraphModule, after: GraphModule) -> float:
    """The largest difference between the results in float64."""
    torch.manual_seed(1)
    values = [n.meta["val"] for n in before.graph.nodes if n.op == "placeholder"]
    examples = [torch.randn(v.shape) if v.is_floating_point() else torch.randint(0, 9, v.shape) for v in values]
    return max(differences(run_in_float64(before, examples), run_in_float64(after, examples)))


def squares(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, y)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3, "is_causal": True}])
def test_no_step_holds_the_scores_of_a_sequence(options):
    torch.manual_seed(0)
    before, after = joint_of(Attention(**options), squares, x=torch.randn(3, 16, 8), y=torch.randn(3, 16, 8))
    assert matrices(before, 16, 16)
    assert not matrices(after, 16, 16)
    assert matrices(after, 4, 16)
    assert difference(before, after) < 1e-12


def test_blocks_compute_no_columns_that_a_causal_mask_hides():
    torch.manual_seed(0)
    _, after = joint_of(Attention(is_causal=True), squares, x=torch.randn(3, 16, 8), y=torch.randn(3, 16, 8))
    products = [n.meta["val"].shape for n in after.graph.nodes if n.target is torch.ops.aten.bmm.default]
    scores = [s for s in products if s[1] == 4 and s[2] % 4 == 0 and s[0] == 6]
    assert {s[2] for s in scores} >= {4, 8, 12, 16}


def test_the_backward_waits_for_the_gradient():
    """Otherwise the scores of the backward would be those of the forward, which are then kept."""
    torch.manual_seed(0)
    _, after = joint_of(Attention(), squares, x=torch.randn(3, 20, 8), y=torch.randn(3, 20, 8))
    products = [n for n in after.graph.nodes if n.target is torch.ops.aten.bmm.default]
    scores = [
        n for n in products if n.meta["val"].shape == (6, 4, 20) and n.args[1].target is torch.ops.aten.permute.default
    ]
    # Of the first layer, for five blocks: scores, scores again, and gradients of the weights. The second layer's
    # gradient depends on no other row, so its forward and backward are one, without scores again.
    assert len(scores) == 5 * 3 + 5 * 2
    untied = [n for n in scores if n.args[0].target is not torch.ops.aten.where.self]
    assert len(untied) == 1 + 2  # those of the first block of a forward


MASK = torch.arange(12).view(-1, 1) % 5 > torch.arange(12) % 3
FORMS = {
    "plain": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "shorter keys": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, :8], v[:, :, :8], is_causal=True),
    "shorter queries": lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :8], k, v, is_causal=True),
    "boolean mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK),  # row 0 is hidden
    "additive mask": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, (q.sum(-1, keepdim=True) - k.sum(-1)[:, :, None])
    ),
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], is_causal=True, enable_gqa=True),
    "three dimensions": lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]),
    "wide values": lambda q, k, v: F.scaled_dot_product_attention(q, k, torch.cat([v, v.sin()], -1), is_causal=True),
    "plain softmax": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_attention(apply, name):
    inputs = [random(2, 2, 12, 4), random(2, 2, 12, 4) + 1, random(2, 2, 12, 4)]
    done = apply(SMALL, FORMS[name], *inputs)
    assert done.stats["blocks"] >= 2
    expected = FORMS[name](*inputs)
    (result,) = run_in_float64(done.after, inputs)
    assert max(differences([result], [expected])) < 1e-12


@settings(max_examples=10, deadline=None)
@given(
    batch=st.integers(1, 3),
    rows=st.sampled_from([8, 12, 15, 16]),
    columns=st.sampled_from([4, 8, 9, 16]),
    width=st.integers(2, 5),
    causal=st.booleans(),
    seed=st.integers(0, 100),
)
def test_random_sizes(apply, batch, rows, columns, width, causal, seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = ((rows, width), (columns, width), (columns, width), (rows, width))
    inputs = [torch.randn(batch, 2, *s, generator=generator, dtype=torch.float64) for s in sizes]

    def fn(q, k, v, gradient):
        def attention(q, k, v):
            with sdpa_kernel([SDPBackend.MATH]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

        value, backward = torch.func.vjp(attention, q, k, v)
        return value, *backward(gradient)

    done = apply(SMALL, fn, *inputs)
    assert done.stats["blocks"] >= 2
    assert max(differences(run_in_float64(done.after, inputs), fn(*inputs))) < 1e-12


CLASSES = 40
LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "mean": lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()),
    "sum": lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten(), reduction="sum"),
    "smoothed": lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "ignored": lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=3),
    "weighted": lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten(), weight=torch.arange(CLASSES) / CLASSES),
    "shifted": lambda o, y: F.cross_entropy(o[:, :-1].flatten(0, 1), y[:, 1:].flatten()),
    "regularised": lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()) + o.logsumexp(-1).square().mean(),
}


class Words(torch.nn.Module):
    """A model of words whose output layer may be its embedding."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(CLASSES, 8), torch.nn.Linear(8, CLASSES, bias=tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x).sin())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_no_step_holds_the_logits_of_a_batch(name, tied):
    torch.manual_seed(0)
    indices = {n: torch.randint(0, 9, (4, 8)) for n in ("x", "y")}
    before, after = joint_of(Words(tied=tied), LOSSES[name], **indices)
    assert difference(before, after) < 1e-12
    made = [
        n for n in after.graph.nodes if n.target is torch.ops.aten.mm.default and n.meta["val"].shape[-1] == CLASSES
    ]
    assert len(made) >= 4
    assert max(n.meta["val"].shape[0] for n in made) <= 8


@pytest.mark.parametrize(
    "fn",
    [
        lambda q, k, v: (weights := (q @ k.mT).softmax(-1), weights @ v),  # the weights are a result
        lambda q, k, v: q.softmax(-1) @ v,  # of no product
        lambda q, k, v: ((q @ k.mT).softmax(-1).cumsum(-2)) @ v,  # rows depend on rows
        lambda q, k, v: F.scaled_dot_product_attention(q[:, :, :11], k, v),  # a prime number of rows
    ],
)
def test_other_functions_stay(apply, fn):
    assert not apply(SMALL, fn, *(random(2, 2, 12, 12) for _ in range(3))).changed


def test_small_matrices_stay(apply):
    assert not apply(RowBlocks(), FORMS["plain"], *(random(2, 2, 16, 4) for _ in range(3))).changed


def test_blocks_are_larger_where_kernels_of_ours_hold_the_scores(apply):
    of_kernels = replace(SMALL, kernel_rows=8)
    tensors = [random(2, 2, 16, 4) for _ in range(3)]
    for abilities, blocks in ((frozenset(), 4), (frozenset({Ability.ATTENTION}), 2)):
        assert apply(of_kernels, FORMS["plain"], *tensors, abilities=abilities).stats == {"blocks": blocks}
    one = [t[0, 0] for t in tensors]
    fn = lambda x, y, z: (x @ y.mT).softmax(-1) @ z  # noqa: E731
    assert apply(of_kernels, fn, *one, abilities=frozenset({Ability.ATTENTION})).stats == {"blocks": 4}


def test_other_targets_stay(apply):
    assert not apply(SMALL, FORMS["plain"], *(random(2, 2, 16, 4) for _ in range(3)), target="cuda").changed


def test_half_precision_is_summed_in_float32():
    torch.manual_seed(0)
    model = Attention().bfloat16()
    x, y = (torch.randn(3, 16, 8).bfloat16() for _ in range(2))
    before, after = joint_of(model, squares, x=x, y=y)
    assert not matrices(after, 16, 16)
    assert difference(before, after) < 1e-12


def test_a_compiled_step_is_right(tmp_path):
    """The compiler compares the step with eager float64."""
    torch.manual_seed(0)
    model = Attention(is_causal=True)
    inputs = {"x": torch.randn(2, 32, 8), "y": torch.randn(2, 32, 8)}
    expected = squares(model(inputs["x"]), inputs["y"]).item()
    step = ig.TrainStep(model, squares, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    passes = "row-blocks{least=1,rows=8,sums=0},cse,dce"
    artifact = ig.compile(step, tmp_path / "step", entry_points=("train_step",), passes=passes)
    session = artifact.load()
    assert session.train_step(**{n: v.numpy() for n, v in inputs.items()}) == pytest.approx(expected, rel=1e-5)
