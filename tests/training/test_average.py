"""Moving averages of the parameters: PyTorch's formula, evaluated, saved, and resumed to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import irongrad as ig
from irongrad.runtime import Session, load
from irongrad.runtime.errors import ArtifactError, UserError
from irongrad.runtime.safetensors_file import read_arrays
from irongrad.training import Checkpoints, Evaluation, read_position, restore, train
from irongrad.training.average import MovingAverage
from tests.conftest import make_mlp_step

Batches = list[dict[str, np.ndarray]]


def test_the_formula_is_pytorchs(session: Session, batches: Batches) -> None:
    step = make_mlp_step()
    theirs = AveragedModel(step.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    ours = MovingAverage(session, 0.9, {})
    for batch in batches:
        session.train_step(**batch)
        ours.update()
        with torch.no_grad():
            for name, parameter in step.model.named_parameters():
                parameter.copy_(torch.from_numpy(session.state()[name]))
        theirs.update_parameters(step.model)
    expected = dict(theirs.module.named_parameters())
    assert {name.removeprefix("ema/") for name in ours.tensors} == set(expected)
    for name, parameter in expected.items():
        own = parameter.detach().numpy()
        few_roundings = 4 * np.finfo(np.float32).eps * np.abs(own).max()
        np.testing.assert_allclose(ours.tensors[f"ema/{name}"], own, rtol=0, atol=few_roundings)


def test_averages_of_half_precision_are_kept_in_float32(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(torch.bfloat16)
    inputs = {"x": torch.randn(3, 4, dtype=torch.bfloat16)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, lambda out: out.square().mean(), optimizer, inputs)
    with load(ig.compile(step, tmp_path / "net").directory) as session:
        average = MovingAverage(session, 0.999, {})
        first = session.state()["weight"]
        average.update()
        for _ in range(20):
            session.train_step(x=inputs["x"])
            average.update()
        tensor = average.tensors["ema/weight"]
        assert tensor.dtype == np.float32
        assert (tensor != first.astype(np.float32)).any()  # in bfloat16 a change of a thousandth is lost
        with average.in_place():
            np.testing.assert_array_equal(session.state()["weight"], tensor.astype(first.dtype))


def test_the_averages_are_evaluated_and_the_state_trains_on_as_without(
    mlp_artifact: Path, batches: Batches, tmp_path: Path
) -> None:
    held_out = batches[:3]
    with Session(mlp_artifact) as plain, Session(mlp_artifact) as ours:
        train(plain, batches, epochs=2)
        result = train(
            ours, batches, epochs=2, ema=0.8, evaluation=Evaluation(held_out),
            checkpoints=Checkpoints(tmp_path / "net.safetensors", best=True, last=1),
        )  # fmt: skip
        expected = plain.state()
        for name, value in ours.state().items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
    saved, _ = read_arrays(tmp_path / "net.safetensors")
    averaged, _ = read_arrays(tmp_path / "net.ema.safetensors")
    for name, value in averaged.items():
        np.testing.assert_array_equal(value, saved.get(f"ema/{name}", saved[name]), err_msg=name)
    assert (averaged["0.weight"] != saved["0.weight"]).any()
    for file, loss in (("net.ema", result.evaluations[-1].loss), ("net.best", result.best)):
        with load(mlp_artifact, checkpoint=tmp_path / f"{file}.safetensors") as session:
            assert np.mean([session.eval_step(**batch) for batch in held_out]) == pytest.approx(loss, rel=1e-12)
    assert (tmp_path / "net.step-40.safetensors").read_bytes() == (tmp_path / "net.safetensors").read_bytes()
    assert read_position(tmp_path / "net.ema.safetensors", session) is None  # no run goes on from averages


@pytest.mark.parametrize("stop_at", [7, 20])
def test_a_resumed_run_continues_to_the_bit(mlp_artifact: Path, batches: Batches, tmp_path: Path, stop_at: int) -> None:
    def run(name: str, steps: int, **options: Any) -> dict[str, bytes]:
        with Session(mlp_artifact) as session:
            start = restore(session, tmp_path / "rest.safetensors") if options.pop("resume", False) else None
            wanted = Checkpoints(tmp_path / f"{name}.safetensors")
            train(session, batches, steps=steps, ema=0.9, checkpoints=wanted, start=start)
        return {part: (tmp_path / f"{name}{part}.safetensors").read_bytes() for part in ("", ".ema")}

    whole = run("whole", 30)
    run("rest", stop_at)
    assert run("rest", 30, resume=True) == whole


def test_of_several_steps_the_one_that_trains_is_averaged(tmp_path: Path) -> None:
    def step(outputs: int) -> ig.TrainStep:
        model = nn.Linear(4, outputs)
        inputs = {"x": torch.randn(5, 4), "y": torch.randn(5, outputs)}
        return ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)

    folder = ig.compile(ig.Steps({"first": step(3), "second": step(2)}), tmp_path / "net").directory
    path, batch = tmp_path / "net.safetensors", {"x": np.ones((5, 4), np.float32), "y": np.ones((5, 3), np.float32)}
    with load(folder) as session:
        train(session.step("first"), [batch] * 6, epochs=1, ema=0.9, checkpoints=Checkpoints(path))
        start = restore(session.step("first"), path)
        assert start.averages.keys() == {"first.weight", "first.bias"}
        assert train(session.step("first"), [batch] * 6, epochs=1, ema=0.9, start=start).step == 12


def test_what_would_lose_averages_is_refused(mlp_artifact: Path, batches: Batches, tmp_path: Path) -> None:
    path = tmp_path / "net.safetensors"
    with Session(mlp_artifact) as session:
        train(session, batches, epochs=1, ema=0.9, checkpoints=Checkpoints(path))
        start = restore(session, path)
        before = session.state()
        with pytest.raises(UserError, match="has moving averages, which a run without them would lose"):
            train(session, batches, epochs=1, start=start)
        for ema in (1.0, -0.1, True, "0.9"):
            with pytest.raises(UserError, match="ema is .*: it must be a number from 0 to below 1, such as 0.999"):
                train(session, batches, epochs=1, ema=ema, start=start)
        averages = {name: array for name, array in start.averages.items() if name != "0.weight"}
        with pytest.raises(ArtifactError, match="are those of other parameters"):
            MovingAverage(session, 0.9, averages)
        for name, value in session.state().items():
            np.testing.assert_array_equal(value, before[name])
