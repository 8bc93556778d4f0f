"""Steps whose batch and length both vary train, evaluate and predict as eager does, by each entry point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import irongrad as ig
from irongrad.runtime import Session
from tests.fixtures.step_copies import twin_of
from tests.fixtures.tagger import batch_of, tagger_step

# Options, and sizes of batch and length to call; one and another are 1.
KINDS: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "both open": ({}, [(3, 5), (1, 4), (2, 1), (7, 9)]),
    "batch open": ({"buckets": {"T": [4, 8]}}, [(3, 5), (1, 4), (9, 1), (2, 8)]),
    "length open": ({"buckets": {"B": [2, 4]}}, [(3, 5), (1, 4), (2, 1), (4, 9)]),
}


class _Eager:
    """The user's loop in float64."""

    def __init__(self, step: ig.TrainStep) -> None:
        self._step = twin_of(step, torch.float64)
        self.model = self._step.model

    def trains(self, batches: Sequence[dict[str, torch.Tensor]]) -> list[float]:
        """One update for the mean gradient of `batches`."""
        self._step.optimizers[0].zero_grad()
        losses = [self._step.loss(self.model(batch["x"]), batch["y"]) for batch in batches]
        torch.stack(losses).mean().backward()
        self._step.optimizers[0].step()
        return [loss.item() for loss in losses]

    @torch.no_grad()
    def evaluates(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, float]:
        """The outputs and the loss."""
        self.model.eval()
        outputs = self.model(batch["x"])
        self.model.train()
        return outputs, self._step.loss(outputs, batch["y"]).item()


def _arrays(batch: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {n: t.numpy() for n, t in batch.items()}


def _train_step(session: Session, eager: _Eager, batch: dict[str, torch.Tensor]) -> None:
    np.testing.assert_allclose([session.train_step(**_arrays(batch))], eager.trains([batch]), rtol=1e-5)


def _train_steps(session: Session, eager: _Eager, batch: dict[str, torch.Tensor]) -> None:
    found = session.train_steps(**{n: np.stack([a, a]) for n, a in _arrays(batch).items()})
    np.testing.assert_allclose(found, [*eager.trains([batch]), *eager.trains([batch])], rtol=1e-5)


def _grad_step(session: Session, eager: _Eager, batch: dict[str, torch.Tensor]) -> None:
    other = {n: t.flip(0, 1) for n, t in batch.items()}
    found = [session.grad_step(**_arrays(b)) for b in (batch, other)]
    session.apply_step()
    np.testing.assert_allclose(found, eager.trains([batch, other]), rtol=1e-5)


def _eval_step(session: Session, eager: _Eager, batch: dict[str, torch.Tensor]) -> None:
    assert session.eval_step(**_arrays(batch)) == pytest.approx(eager.evaluates(batch)[1], rel=1e-5)


def _predict(session: Session, eager: _Eager, batch: dict[str, torch.Tensor]) -> None:
    np.testing.assert_allclose(session.predict(x=batch["x"].numpy()), eager.evaluates(batch)[0], rtol=1e-4, atol=1e-5)


CALLS: dict[str, Callable[[Session, _Eager, dict[str, torch.Tensor]], None]] = {
    "train_step": _train_step,
    "train_steps": _train_steps,
    "grad_step": _grad_step,
    "eval_step": _eval_step,
    "predict": _predict,
}
# The default run takes each kind; the slow one takes all entry points, and all of them at once.
DEFAULT = [("both open", "eval_step"), ("batch open", "grad_step"), ("length open", "train_steps")]
OTHERS = [(kind, entry) for kind in KINDS for entry in (*CALLS, "all") if (kind, entry) not in DEFAULT]


@pytest.mark.parametrize(
    ("kind", "entry"), [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)]
)
def test_each_entry_point_is_right_at_every_size(kind: str, entry: str, tmp_path: Path) -> None:
    options, sizes = KINDS[kind]
    step = tagger_step(**options)
    eager = _Eager(step)
    entries = {"all": None, "grad_step": ["grad_step", "apply_step"]}.get(entry, [entry])
    session = ig.compile(step, tmp_path / "step", entry_points=entries).load()
    for size in sizes:
        for name in CALLS if entry == "all" else (entry,):
            CALLS[name](session, eager, batch_of(*size))
    for name, value in session.state().items():
        if name in (known := eager.model.state_dict()):
            np.testing.assert_allclose(value, known[name], rtol=2e-4, atol=1e-5, err_msg=name)
