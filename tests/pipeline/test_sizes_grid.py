"""Steps of sizes that vary train, evaluate and predict as eager does: every way to compile them, with every other.

The default run takes cheap cells in which each choice occurs. The slow run takes the others of the cells in which each
pair of choices occurs, then all cells, and it leaves out each optional pass over IREE's module in turn.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import irongrad as ig
from irongrad.operators.random import Draws
from irongrad.pipeline.iree.phases import module_passes
from irongrad.runtime import Session
from tests.fixtures.step_copies import twin_of

# Names and options of the ways to compile sizes, and the sizes to call; one is 1, and some are in no bucket.
SIZES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "any size": ({}, (4, 1, 3, 9, 17)),
    "buckets": ({"buckets": {"B": [4, 8]}}, (4, 1, 3, 6, 8)),
    "fallback": ({"buckets": {"B": [4, 8]}, "bucket_fallback": "dynamic"}, (4, 1, 3, 8, 13)),
}
ENTRIES = ("train_step", "train_steps", "grad_step", "eval_step", "predict", "all")
LEVELS = (0, 1, 2, 3)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Cnn(nn.Module):
    """Without a bias before the normalisation: Adam would amplify the rounding of its gradient, which is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm, self.head = nn.Conv2d(1, 3, 2, bias=False), nn.BatchNorm2d(3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.convolution(x.reshape(-1, 1, 2, 3))).relu().flatten(1))


class Transformer(nn.Module):
    """Without biases, as that of the keys has a gradient of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, bias=False)
        self.embed, self.head = nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(x.reshape(-1, 3, 2))).mean(1))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.reshape(-1, 3, 2))[0][:, -1])


class Vae(nn.Module):
    """Draws its code with noise while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        mean, logarithm = self.encode(x).chunk(2, dim=1)
        noise = torch.randn_like(mean) * (0.5 * logarithm).exp() if self.training else 0
        return self.decode(mean + noise)


def _two(model: nn.Module) -> list[torch.optim.Optimizer]:
    first, *others = model.parameters()
    return [torch.optim.SGD([first], lr=0.05, momentum=0.9), torch.optim.AdamW(others, lr=0.01)]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "two": _two,
}
MODELS = (Mlp, Cnn, Transformer, Lstm, Vae)
CHOICES: tuple[Sequence[Any], ...] = (tuple(SIZES), ENTRIES, LEVELS, tuple(OPTIMIZERS), MODELS)


def _pairs(cell: Sequence[Any]) -> set[tuple[int, Any, int, Any]]:
    return {(i, cell[i], j, cell[j]) for i, j in itertools.combinations(range(len(cell)), 2)}


def _covering() -> list[tuple[Any, ...]]:
    """Cells in which every pair of choices occurs; each cell is the first that adds most pairs."""
    cells = list(itertools.product(*CHOICES))
    missing = set().union(*map(_pairs, cells))
    chosen = []
    while missing:
        chosen.append(max(cells, key=lambda cell: len(_pairs(cell) & missing)))
        missing -= _pairs(chosen[-1])
    return chosen


def _name(choice: Any) -> str:
    return choice.__name__ if isinstance(choice, type) else str(choice)


def _batch(rows: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 6, generator=generator), "y": torch.randint(0, 3, (rows,), generator=generator)}


@contextmanager
def _training(model: nn.Module, number: int, *, training: bool = True) -> Iterator[None]:
    with Draws(0, number):
        model.train(training)
        yield


class Eager:
    """The user's loop in float64, on a copy of the step."""

    def __init__(self, step: ig.TrainStep) -> None:
        self.step = twin_of(step, torch.float64)
        self.model = self.step.model
        self.calls = 0

    def loss(self, batch: dict[str, Tensor], *, training: bool = True) -> Tensor:
        with _training(self.model, self.calls, training=training):
            self.calls += training
            return functional.cross_entropy(self.model(batch["x"].double()), batch["y"])

    def train(self, batches: Sequence[dict[str, Tensor]]) -> list[float]:
        """One update for the mean gradient of `batches`."""
        for optimizer in self.step.optimizers:
            optimizer.zero_grad()
        losses = [self.loss(batch) for batch in batches]
        (torch.stack(losses).mean()).backward()
        for optimizer in self.step.optimizers:
            optimizer.step()
        return [loss.item() for loss in losses]


def _arrays(batch: dict[str, Tensor]) -> dict[str, np.ndarray]:
    return {n: t.numpy() for n, t in batch.items()}


def _trains(session: Session, eager: Eager, sizes: Sequence[int]) -> None:
    for number, rows in enumerate(sizes):
        batch = _batch(rows, number)
        (expected,) = eager.train([batch])
        assert session.train_step(**_arrays(batch)) == pytest.approx(expected, rel=2e-5, abs=1e-6)


def _trains_in_one_call(session: Session, eager: Eager, sizes: Sequence[int]) -> None:
    for number, rows in enumerate(sizes):
        batches = [_batch(rows, 10 * number + k) for k in range(2)]
        expected = [loss for batch in batches for loss in eager.train([batch])]
        stacked = {n: np.stack([b[n].numpy() for b in batches]) for n in batches[0]}
        np.testing.assert_allclose(session.train_steps(**stacked), expected, rtol=2e-5, atol=1e-6)


def _accumulates(session: Session, eager: Eager, sizes: Sequence[int]) -> None:
    for number, rows in enumerate(sizes):
        batches = [_batch(rows, 20 * number + k) for k in range(2)]
        found = [session.grad_step(**_arrays(b)) for b in batches]
        session.apply_step()
        np.testing.assert_allclose(found, eager.train(batches), rtol=2e-5, atol=1e-6)


def _evaluates(session: Session, eager: Eager, sizes: Sequence[int]) -> None:
    for number, rows in enumerate(sizes):
        batch = _batch(rows, 30 + number)
        expected = eager.loss(batch, training=False).item()
        assert session.eval_step(**_arrays(batch)) == pytest.approx(expected, rel=2e-5, abs=1e-6)


def _predicts(session: Session, eager: Eager, sizes: Sequence[int]) -> None:
    for number, rows in enumerate(sizes):
        x = _batch(rows, 40 + number)["x"]
        with _training(eager.model, 0, training=False):
            expected = eager.model(x.double()).detach()
        np.testing.assert_allclose(session.predict(x=x.numpy()), expected, rtol=1e-4, atol=1e-5)


CHECKS: dict[str, Callable[[Session, Eager, Sequence[int]], None]] = {
    "train_step": _trains,
    "train_steps": _trains_in_one_call,
    "grad_step": _accumulates,
    "eval_step": _evaluates,
    "predict": _predicts,
}


def _check(cell: tuple[Any, ...], directory: Path, disabled: Sequence[str] = ()) -> None:
    kind, entry, level, optimizer, make = cell
    options, sizes = SIZES[kind]
    torch.manual_seed(0)
    model = make()
    step = ig.TrainStep(
        model,
        functional.cross_entropy,
        OPTIMIZERS[optimizer](model),
        _batch(4, 99),
        dynamic={"x": {0: "B"}, "y": {0: "B"}},
        **options,
    )
    eager = Eager(step)
    entries = {"all": None, "grad_step": ["grad_step", "apply_step"]}.get(entry, [entry])
    session = ig.compile(step, directory, opt_level=level, entry_points=entries, disable_passes=disabled).load()
    for name in CHECKS if entry == "all" else (entry,):
        CHECKS[name](session, eager, sizes)
    for name, value in session.state().items():
        if name in (known := eager.model.state_dict()):
            np.testing.assert_allclose(value, known[name], rtol=2e-4, atol=1e-5, err_msg=name)


def _cell_name(cell: tuple[Any, ...]) -> str:
    return "-".join(map(_name, cell))


# Few entry points each, and small models where the cell trains: the cells that compile fastest.
DEFAULT = (
    "any size-train_step-0-SGD-Mlp",
    "buckets-train_steps-2-SGD-Vae",
    "buckets-grad_step-3-AdamW-Mlp",
    "fallback-predict-3-SGD-Cnn",
    "any size-eval_step-3-two-Vae",
    "fallback-train_steps-1-two-Mlp",
    "any size-grad_step-0-SGD-Lstm",
    "buckets-predict-1-two-Mlp",
    "fallback-grad_step-1-SGD-Vae",
    "any size-eval_step-1-SGD-Cnn",
    "any size-predict-2-SGD-Transformer",
    "any size-all-3-SGD-Mlp",
)
CELLS = {_cell_name(cell): cell for cell in _covering()}


def test_each_choice_occurs_in_the_default_run() -> None:
    for number, choices in enumerate(CHOICES):
        assert {CELLS[name][number] for name in DEFAULT} == set(choices)


@pytest.mark.parametrize("name", [n if n in DEFAULT else pytest.param(n, marks=pytest.mark.slow) for n in CELLS])
def test_pairs_of_choices(name: str, tmp_path: Path) -> None:
    _check(CELLS[name], tmp_path / "step")


@pytest.mark.slow
@pytest.mark.parametrize("cell", list(itertools.product(*CHOICES)), ids=_cell_name)
def test_all_choices(cell: tuple[Any, ...], tmp_path: Path) -> None:
    _check(cell, tmp_path / "step")


OPTIONAL = [name for name, kind in module_passes().items() if not kind.required]


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS, ids=_name)
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("name", OPTIONAL)
def test_all_entry_points_without_a_pass_over_irees_module(
    name: str, kind: str, make: type[nn.Module], tmp_path: Path
) -> None:
    """With it they are right in the tests above."""
    _check((kind, "all", 2, "AdamW", make), tmp_path / "step", [name])
