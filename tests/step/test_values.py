"""Values that the loss function returns beside the loss: in every entry point as in eager, and refused where unfit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn.functional import cross_entropy

import irongrad as ig
from irongrad.cli import train
from irongrad.runtime import load
from irongrad.runtime.errors import CaptureError


def reporting(out: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = cross_entropy(out, y)
    return loss, {"accuracy": (out.argmax(1) == y).float().mean(), "norm": out.norm(), "entropy of x": out.var() * 2}


def counting(out: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return cross_entropy(out, y), {"right": (out.argmax(1) == y).sum()}


def make_step(loss: Any = reporting, **changed: Any) -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.0), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return ig.TrainStep(model, loss, optimizer, batch_of(0, 8), **changed)


def batch_of(seed: int, rows: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(rows, 6, generator=generator),
        "y": torch.randint(0, 4, (rows,), generator=generator),
    }


def arrays(batch: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in batch.items()}


def eager_step(step: ig.TrainStep, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, float]]:
    """Train as a user would; micro-batches report their means."""
    (optimizer,) = step.optimizers
    optimizer.zero_grad()
    parts = [
        dict(zip(batch, part, strict=True))
        for part in zip(*(t.chunk(step.accumulate) for t in batch.values()), strict=True)
    ]
    found = []
    for part in parts:
        loss, values = step.loss(step.model(part["x"]), part["y"])
        (loss / len(parts)).backward()
        found.append({"": loss.item(), **{n: v.item() for n, v in values.items()}})
    optimizer.step()
    means = {n: float(np.mean([f[n] for f in found])) for n in found[0]}
    return means.pop(""), means


def assert_same(found: Any, expected: tuple[float, dict[str, float]]) -> None:
    loss, values = found
    assert loss == pytest.approx(expected[0], rel=1e-4)
    assert values == pytest.approx(expected[1], rel=1e-4)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "whole numbers": {"loss": counting},
    "micro-batches": {"accumulate": 2},
    "buckets": {"dynamic": {"x": {0: "B"}, "y": {0: "B"}}, "buckets": {"B": [4, 8]}},
    "any size": {"dynamic": {"x": {0: "B"}, "y": {0: "B"}}},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_point_reports_as_eager_does(kind: str, tmp_path: Path) -> None:
    step, eager = make_step(**KINDS[kind]), make_step(**KINDS[kind])
    ig.compile(step, tmp_path / "out")
    session = load(tmp_path / "out")
    sizes = [8, 8, 3, 6] if step.dynamic else [8, 8, 8, 8]
    for seed, rows in enumerate(sizes):
        batch = batch_of(seed, rows)
        assert_same(session.train_step(**arrays(batch)), eager_step(eager, batch))
    batch = batch_of(9, 8)
    with torch.no_grad():
        loss, values = eager.loss(eager.model(batch["x"]), batch["y"])
    evaluated = loss.item(), {n: v.item() for n, v in values.items()}
    if kind != "micro-batches":
        assert_same(session.eval_step(**arrays(batch)), evaluated)
    rows = [batch_of(seed, 8) for seed in range(20, 40)]
    losses, stacks = session.train_steps(**{n: np.stack([arrays(b)[n] for b in rows]) for n in batch})
    for number, row in enumerate(rows):
        expected = eager_step(eager, row)
        assert_same((losses[number], {n: a[number] for n, a in stacks.items()}), expected)
    if kind == "plain":
        assert_same(session.grad_step(**arrays(batch)), eager_step(eager, batch))
        session.apply_step()
    for name, value in eager.model.state_dict().items():
        np.testing.assert_allclose(session.state()[name], value.numpy(), rtol=1e-3, atol=1e-5, err_msg=name)


def test_the_command_line_reports_them(tmp_path: Path) -> None:
    ig.compile(make_step(), tmp_path / "out", entry_points=["train_step", "eval_step"])
    data = arrays(batch_of(1, 16))
    np.savez(tmp_path / "data.npz", **data)
    options = ["--data", str(tmp_path / "data.npz"), "--lr", "0", "--validation", str(tmp_path / "data.npz"), "--json"]
    shown = CliRunner().invoke(train.command, [str(tmp_path / "out"), *options])
    (epoch,) = json.loads(shown.output)["epochs"]
    assert set(epoch["values"]) == {"accuracy", "norm", "entropy of x"}
    assert epoch["validation_loss"] == pytest.approx(epoch["loss"], rel=1e-5)
    assert epoch["validation_values"]["accuracy"] == pytest.approx(epoch["values"]["accuracy"])


def test_a_wrong_value_is_refused_by_the_oracle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from irongrad.pipeline.oracle import eager_run
    from irongrad.runtime.errors import VerificationError

    monkeypatch.setattr(eager_run, "_mean", lambda values: values[0] + 1)
    with pytest.raises(VerificationError, match="value/0/"):
        ig.compile(make_step(), tmp_path / "out", entry_points=["train_step"])


BAD = {
    "a number of Python": (lambda out, y: (cross_entropy(out, y), {"n": 3}), "the value 'n' beside the loss is a int"),
    "an array": (lambda out, y: (cross_entropy(out, y), {"out": out}), r"'out' beside the loss has shape \(8, 4\)"),
    "a clash": (lambda out, y: (cross_entropy(out, y), {"loss": out.sum()}), "has the name 'loss'"),
    "two losses": (lambda out, y: (cross_entropy(out, y), out.sum()), "the loss is a tuple, not a tensor"),
}


@pytest.mark.parametrize("kind", BAD)
def test_values_that_do_not_fit_are_refused(kind: str, tmp_path: Path) -> None:
    loss, says = BAD[kind]
    with pytest.raises(CaptureError, match=rf"test_values.py.*{says}"):
        ig.compile(make_step(loss), tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"loss": counting, "accumulate": 2}, "micro-batches take the mean of their values: return right.float()"),
        ({"between": ["y"]}, "a step in pieces returns the loss alone"),
    ],
)
def test_values_are_refused_where_they_have_no_place(changed: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=says):
        ig.compile(make_step(**changed), tmp_path / "out")
