"""Whole steps in a bucket: loss, gradients, buffers, evaluation and prediction."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import irongrad as ig
from tests.fixtures.processors import needs_x86

BATCH = {"x": {0: "B"}, "y": {0: "B"}}
SEQUENCES = {"x": {0: "B", 1: "T"}, "y": {0: "B", 1: "T"}}


def test_batch_norm_in_a_padded_batch_matches_eager(step_holds: Callable[..., None]):
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.4), nn.Linear(6, 3))
    inputs = [{"x": torch.randn(b, 5).double(), "y": torch.randint(0, 3, (b,))} for b in (6, 2, 3, 5)]
    step_holds(model, F.cross_entropy, BATCH, inputs)


def test_an_image_model_in_a_padded_batch_matches_eager(step_holds: Callable[..., None]):
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.GroupNorm(2, 4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )
    inputs = [{"x": torch.randn(b, 2, 6, 6).double(), "y": torch.randint(0, 3, (b,))} for b in (4, 2, 3)]
    step_holds(model, nn.CrossEntropyLoss(label_smoothing=0.1), BATCH, inputs)


class _Language(nn.Module):
    """A causal Transformer with learnt positions and tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8)
        self.positions = nn.Parameter(torch.randn(12, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=torch.float64)
        h = self.embedding(x) + self.positions[: x.shape[1]]
        return self.layers(h, mask=mask) @ self.embedding.weight.t()


def _next_token(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=0)


def test_a_transformer_on_padded_sentences_matches_eager(step_holds: Callable[..., None]):
    sizes = ((4, 8), (1, 5))
    inputs = [{"x": torch.randint(0, 9, s), "y": torch.randint(0, 9, s)} for s in sizes]
    step_holds(_Language(), _next_token, SEQUENCES, inputs)


class _Reader(nn.Module):
    """A classifier of the last states of a bidirectional GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4, padding_idx=0)
        self.layer = nn.GRU(4, 5, bidirectional=True, batch_first=True)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, last = self.layer(self.embedding(x))
        return self.head(last.transpose(0, 1).flatten(1))


def test_last_states_of_a_gru_on_padded_sentences_match_eager(step_holds: Callable[..., None]):
    sizes = ((4, 8), (1, 5))
    inputs = [{"x": torch.randint(0, 9, s), "y": torch.randint(0, 3, s[:1])} for s in sizes]
    step_holds(_Reader(), F.cross_entropy, {"x": {0: "B", 1: "T"}, "y": {0: "B"}}, inputs)


class _Recurrent(nn.Module):
    """Outputs and last states of a recurrent layer; those of an LSTM enter the loss, too."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.layer(x)
        states = (state,) if isinstance(state, Tensor) else state
        return y.square().sum() + sum(s.pow(3).sum() for s in states)


RECURRENT = {
    "LSTM in kernels": (lambda: nn.LSTM(4, 16, batch_first=True, bidirectional=True), 4, "llvm-cpu"),
    "LSTM with a projection": (lambda: nn.LSTM(4, 16, batch_first=True, proj_size=8), 4, "llvm-cpu"),
    "GRU in loops of IREE": (lambda: nn.GRU(4, 16, batch_first=True), 1, "llvm-cpu"),
    "RNN without kernels": (lambda: nn.RNN(4, 16, batch_first=True), 4, "llvm-cpu:cpu=x86-64-v2"),
}


@needs_x86
@pytest.mark.parametrize("case", RECURRENT)
def test_a_recurrent_layer_trains_over_padded_time(tmp_path: Path, case: str) -> None:
    """Every bucket is verified against eager float64 at sizes that it pads."""
    make, batch, target = RECURRENT[case]
    torch.manual_seed(0)
    model = _Recurrent(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = ig.TrainStep(
        model, None, optimizer, {"x": torch.randn(batch, 20, 4)}, dynamic={"x": {1: "T"}}, buckets={"T": [6, 20]}
    )
    session = ig.compile(step, tmp_path, target, entry_points=("train_step",), cache=False).load()
    for length in (5, 13):
        x = torch.randn(batch, length, 4)
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        assert float(session.train_step(x=x.numpy())) == pytest.approx(loss.item(), rel=1e-5)


class _WithLoss(nn.Module):
    """A model that computes its own loss and draws noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        h = self.layer(x + torch.randn_like(x) * 0.1)
        return {"loss": F.mse_loss(h, y), "h": h}


def test_a_model_with_its_own_loss_in_a_padded_batch_matches_eager(step_holds: Callable[..., None]):
    inputs = [{"x": torch.randn(b, 3).double(), "y": torch.randn(b, 2).double()} for b in (4, 2, 3)]
    step_holds(_WithLoss(), None, BATCH, inputs)
