"""Recurrent layers, unrolled and as scans, against ATen's, and over sequences that are too long to unroll."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn.utils.rnn import pack_padded_sequence

import irongrad as ig
from irongrad.frontends.compile_function import flat_function
from irongrad.operators.decompositions.recurrent import LONGEST_UNROLLED, loops_for, recurrent
from irongrad.operators.legalize.retrace import retrace
from irongrad.pipeline.capture.recurrent_layers import recurrent_layers
from irongrad.runtime.errors import UnsupportedOpError
from irongrad.targets import Ability, parse_target

LENGTHS = {"unrolled": 3, "scan": LONGEST_UNROLLED + 2}

LAYERS = [
    nn.LSTM(3, 5),
    nn.LSTM(3, 5, num_layers=2, bidirectional=True, proj_size=2),
    nn.LSTM(3, 5, bias=False, batch_first=True, proj_size=2),
    nn.GRU(3, 5),
    nn.GRU(3, 5, num_layers=2, bidirectional=True, bias=False),
    nn.RNN(3, 5, num_layers=2, batch_first=True),
    nn.RNN(3, 5, bidirectional=True, nonlinearity="relu"),
]


def leaves(result: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(result)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_values_and_gradients_equal_atens(layer, length):
    torch.manual_seed(0)
    layer, steps = layer.double(), LENGTHS[length]
    x = torch.randn(steps, steps, 3, dtype=torch.float64, requires_grad=True)
    parameters = [x, *layer.parameters()]
    expected = leaves(layer(x))
    with recurrent_layers():
        found = leaves(layer(x))
    weights = [torch.randn_like(e) for e in expected]
    of_expected = torch.autograd.grad(expected, parameters, weights)
    of_found = torch.autograd.grad(found, parameters, weights)
    for a, b in zip((*found, *of_found), (*expected, *of_expected), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("cell", "gates"), [("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)])
def test_gradients_match_finite_differences(cell, gates):
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    state = [make(2, 3) for _ in range(2 if cell == "lstm" else 1)]
    inputs = (make(4, 2, gates * 3), make(gates * 3, 3), *state)
    extra = [make(9)] if cell == "gru" else []
    torch.autograd.gradcheck(
        lambda x, w, *rest: recurrent(cell, x, list(rest[: len(state)]), [w, *rest[len(state) :]])[: len(state) + 1],
        (*inputs, *extra),
    )


def penalised(x: torch.Tensor, h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A loss that contains a gradient."""
    with torch.enable_grad():
        x = x if x.requires_grad else x.detach().requires_grad_()
        out = recurrent("rnn_tanh", x, [h], [w])[0].sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
    return out + slope.square().sum()


def test_second_derivatives_of_long_sequences_are_refused():
    with pytest.raises(UnsupportedOpError, match="second derivative of a recurrent layer over 20 steps"):
        flat_function(penalised, tuple(torch.randn(s) for s in ((20, 1, 2), (1, 2), (2, 2))), gradients=False)


@pytest.mark.parametrize(("length", "loops"), [("unrolled", False), ("scan", True)])
def test_only_long_sequences_become_loops(length, loops):
    def fn(x, h, w):
        return recurrent("rnn_tanh", x, [h], [w])

    graph = retrace(fn, [torch.randn(LENGTHS[length], 2, 3), torch.randn(2, 3), torch.randn(3, 3)], decompose=True)
    assert any(isinstance(n.target, HigherOrderOperator) for n in graph.graph.nodes) == loops


@pytest.mark.parametrize(
    ("steps", "batch", "dtype", "loops"),
    [
        (3, 2, torch.float32, True),
        (16, 32, torch.bfloat16, True),
        (2, 2, torch.float32, False),
        (16, 1, torch.float32, False),
        (16, 2, torch.float64, False),
        (16, 2, torch.float16, False),
    ],
)
def test_short_sequences_become_loops_that_have_kernels(steps, batch, dtype, loops):
    def fn(x, h, w):
        return recurrent("rnn_tanh", x, [h], [w])

    state = torch.randn(batch, 3, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    given = [torch.randn(steps, batch, 3).to(dtype), state, torch.randn(3, 3, dtype=state.dtype)]
    with loops_for(has_kernels=True):
        graph = retrace(fn, given, decompose=True)
    assert any(isinstance(n.target, HigherOrderOperator) for n in graph.graph.nodes) == loops


@pytest.mark.parametrize("target", ["llvm-cpu", "llvm-cpu:arch=aarch64"])
def test_targets_tell_whether_short_sequences_become_loops(target, tmp_path):
    layer = nn.LSTM(4, 16)
    inputs = {"x": torch.randn(6, 8, 4), "y": torch.randn(6, 8, 16)}
    step = ig.TrainStep(
        layer, lambda out, y: nn.functional.mse_loss(out[0], y), torch.optim.SGD(layer.parameters()), inputs
    )
    ig.compile(step, tmp_path / "a", target, entry_points=("train_step",), cache=False, dump_dir=tmp_path / "dump")
    graph = (tmp_path / "dump" / "02_differentiate.joint.fx").read_text()
    assert ("higher_order.scan" in graph) == (Ability.LOOPS in parse_target(target).abilities)


def test_second_derivatives_of_short_sequences_are_those_of_unrolled_steps(tmp_path):
    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.GRU(4, 16), nn.Linear(16, 1)

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                score = self.head(self.layer(x)[0]).sum()
                (slope,) = torch.autograd.grad(score, x, create_graph=True)
            return score, slope

    torch.manual_seed(0)
    critic = Critic()
    step = ig.TrainStep(
        critic,
        lambda out, y: out[0] - y.sum() + (out[1].norm(dim=-1) - 1).square().mean(),
        torch.optim.SGD(critic.parameters(), lr=0.1),
        {"x": torch.randn(6, 8, 4), "y": torch.randn(8)},
    )
    ig.compile(step, tmp_path, "llvm-cpu", entry_points=("train_step",), cache=False)


def test_packed_sequences_are_refused():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(3, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(pack_padded_sequence(x, torch.tensor([20, 7])))[0].data

    with pytest.raises(UnsupportedOpError, match=r"(?s)_pack_padded_sequence.*padded sequences with a mask"):
        ig.compile_function(Packed(), (torch.randn(20, 2, 3),))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0])


class Classifier(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.head = kind(3, 5, num_layers=2, bidirectional=True), nn.Linear(10, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0][-1])


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.long = nn.LSTM(4, 3, num_layers=2, dropout=0.5)
        self.short = nn.RNN(4, 3, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.long(x)[0].sum(0) + self.short(x[:6].transpose(0, 1))[0].sum(1).tanh()


def test_dropout_between_layers_matches_eager(tmp_path):
    """Compiling compares three steps with eager, and so also the random draws."""
    torch.manual_seed(0)
    model = Dropping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, lambda y: y.square().mean(), optimizer, {"x": torch.randn(40, 2, 4)})
    ig.compile(step, tmp_path / "out", entry_points=("train_step",))


def compile_tagger(steps: int, output: Path) -> int:
    """Compile a step over `steps` time steps, verified against eager float64; return the size of its module."""
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, lambda y: y.square().mean(), optimizer, {"x": torch.randn(steps, 2, 4)})
    ig.compile(step, output, entry_points=("train_step",))
    return (output / "step.llvm-cpu.vmfb").stat().st_size


@pytest.mark.parametrize("kind", [pytest.param(nn.LSTM, marks=pytest.mark.slow), nn.GRU])
def test_one_module_trains_as_eager_at_every_number_of_steps_and_rows(kind, tmp_path):
    torch.manual_seed(0)
    model = Classifier(kind)
    twin = copy.deepcopy(model).double()
    optimizer, eager = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    inputs = {"x": torch.randn(20, 4, 3), "y": torch.randn(4, 2)}
    step = ig.TrainStep(
        model, nn.functional.mse_loss, optimizer, inputs, dynamic={"x": {0: "T", 1: "B"}, "y": {0: "B"}}
    )
    session = ig.compile(step, tmp_path / "out", entry_points=["train_step"]).load()
    for steps, rows in [(20, 4), (3, 1), (1, 7), (40, 3), (1, 1)]:
        x, y = torch.randn(steps, rows, 3), torch.randn(rows, 2)
        loss = nn.functional.mse_loss(twin(x.double()), y.double())
        eager.zero_grad()
        loss.backward()
        eager.step()
        np.testing.assert_allclose(session.train_step(x=x.numpy(), y=y.numpy()), loss.item(), rtol=1e-5)
    for name, parameter in twin.named_parameters():
        np.testing.assert_allclose(session.state()[name], parameter.detach(), rtol=1e-4, atol=1e-6)


def test_an_lstm_is_as_large_for_512_steps_as_for_64(tmp_path):
    short, long = compile_tagger(64, tmp_path / "short"), compile_tagger(512, tmp_path / "long")
    assert long < 1.25 * short


class _Behind(nn.Module):
    """A recurrent layer behind a linear one, which autocast computes in bfloat16."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.layer = nn.Linear(6, 8), kind(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.layer(self.linear(x))
        return y.mean(0) + (last[0] if isinstance(last, tuple) else last)[0]


@pytest.mark.parametrize(("kind", "steps"), [(nn.LSTM, 20), (nn.GRU, 20), (nn.RNN, 4)])
def test_a_layer_behind_another_trains_in_bfloat16(kind: Any, steps: int, tmp_path: Path) -> None:
    model = _Behind(kind)
    inputs = {"x": torch.randn(steps, 3, 6), "y": torch.randn(3, 5)}
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    session = ig.compile(step, tmp_path, cache=False, precision="bf16").load()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(inputs["x"])
    found = session.predict(x=inputs["x"].numpy())
    np.testing.assert_allclose(np.asarray(found, np.float32), expected.detach().float(), rtol=2e-2, atol=2e-2)
