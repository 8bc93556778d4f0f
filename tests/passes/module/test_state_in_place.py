"""New state overwrites the old state where no other reader can see it, and has its own buffer elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.mlir.walk import inside, name_of, parsed
from irongrad.pipeline.iree.compile import Compilation
from irongrad.runtime.errors import GuardError


def make_step() -> ig.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 3))
    return ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        inputs={"x": torch.arange(32).reshape(8, 4), "y": torch.arange(8) % 3},
    )


def state_stored(stream: bytes, function: str) -> int:
    """The number of globals with buffers that a function stores."""
    with parsed(stream) as module:
        (found,) = [op for op in inside(module.operation) if op.name == "util.func" and name_of(op) == function]
        stores = [op for op in inside(found) if op.name == "util.global.store"]
        return sum("resource<variable>" in str(op.operands[0].type) for op in stores)


def stream_of(directory: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> bytes:
    """The module of a step after IREE's phase `stream`."""
    found: list[bytes] = []
    run = Compilation.to_stream

    def kept(self: Compilation) -> bytes:
        found.append(run(self))
        return found[-1]

    monkeypatch.setattr(Compilation, "to_stream", kept)
    ig.compile(make_step(), directory, cache=False, entry_points=("train_step",), **options)
    return found[0]


def test_a_step_stores_no_state_and_iree_still_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the second assertion fails, IREE writes state in place, and the pass can go."""
    assert state_stored(stream_of(tmp_path / "a", monkeypatch), "train_step") == 0
    without = stream_of(tmp_path / "b", monkeypatch, disable_passes=("state-in-place",))
    assert state_stored(without, "train_step") > 0


@pytest.fixture(scope="module")
def in_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact with every entry point, whose new state overwrites the old."""
    directory = tmp_path_factory.mktemp("in_place") / "step"
    ig.compile(make_step(), directory, cache=False)
    return directory


def test_every_function_gives_the_same_bits(in_place: Path, tmp_path: Path) -> None:
    ig.compile(make_step(), tmp_path / "apart", cache=False, disable_passes=("state-in-place",))
    found, apart = (results(ig.runtime.load(path), tmp_path) for path in (in_place, tmp_path / "apart"))
    assert found.keys() == apart.keys()
    for name, value in apart.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def results(session: ig.runtime.Session, directory: Path) -> dict[str, Any]:
    """The results of entry points called in turn, with the state after each."""
    x, y = (v.numpy() for v in make_step().inputs.values())
    found: dict[str, Any] = {}

    def note(when: str) -> None:
        found.update({f"{when} {name}": value for name, value in session.state().items()})

    for turn in range(2):
        found[f"train {turn}"] = session.train_step(x=x, y=y)
        note(f"trained {turn}")
        session.grad_step(x=x, y=y)
        session.grad_step(x=x[::-1].copy(), y=y)
        found[f"predict {turn}"] = session.predict(x=x)
        session.apply_step()
        note(f"applied {turn}")
        found[f"steps {turn}"] = session.train_steps(x=np.stack([x, x]), y=np.stack([y, y]))
    note("trained on")
    session.save(directory / "saved.safetensors")
    with pytest.raises(GuardError):
        session.train_step(x=x + 50, y=y)
    note("refused")
    session.reset()
    note("reset")
    found["after a reset"] = session.train_step(x=x, y=y)
    session.restore(directory / "saved.safetensors")
    found["after a restore"] = session.train_step(x=x, y=y)
    note("at last")
    return found


def test_a_refused_step_leaves_the_state(in_place: Path) -> None:
    session = ig.runtime.load(in_place)
    x, y = (v.numpy() for v in make_step().inputs.values())
    session.train_step(x=x, y=y)
    before = session.state()
    with pytest.raises(GuardError):
        session.train_step(x=x + 50, y=y)
    for name, value in session.state().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)
