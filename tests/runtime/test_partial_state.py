"""A session takes the model's tensors alone, or fewer of them; what is absent keeps its value or is reset."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime import Session
from irongrad.runtime.errors import ArtifactError, UserError
from tests.conftest import make_mlp_step


class Tied(nn.Module):
    """Two layers with one weight, BatchNorm's buffers and a frozen scale."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))) * self.scale


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tied, Path]:
    torch.manual_seed(0)
    model = Tied()
    trained = [p for p in model.parameters() if p.requires_grad]
    inputs = {"x": torch.randn(6, 4), "y": torch.randn(6, 4)}
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.AdamW(trained, lr=0.05), inputs)
    directory = tmp_path_factory.mktemp("partial") / "step"
    ig.compile(step, directory)
    return copy.deepcopy(model), directory


BATCH = {n: np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32) for n in ("x", "y")}


def _others(model: Tied) -> Tied:
    other = copy.deepcopy(model)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.add_(torch.ones_like(tensor))
    return other


def _arrays(model: nn.Module) -> dict[str, np.ndarray]:
    return {n: t.numpy().copy() for n, t in model.state_dict().items()}


PARTS: dict[str, Callable[[str], bool]] = {
    "the state_dict": lambda n: True,
    "the parameters": lambda n: n in ("scale",) or n.endswith(("weight", "bias")),
    "the trained parameters": lambda n: n.endswith(("weight", "bias")),
    "another name of a tied tensor": lambda n: n.endswith(("weight", "bias")) and n != "first.weight",
}


@pytest.mark.parametrize("absent", ["keep", "reset"])
@pytest.mark.parametrize("part", PARTS)
def test_a_part_replaces_its_tensors_alone(compiled: tuple[Tied, Path], part: str, absent: str, tmp_path: Path) -> None:
    model, directory = compiled
    session = Session(directory)
    given = {n: a for n, a in _arrays(_others(model)).items() if PARTS[part](n)}
    safetensors.numpy.save_file(given, tmp_path / "part.safetensors")
    for load in (
        lambda: session.load_state(given, absent=absent),
        lambda: session.restore(tmp_path / "part.safetensors", absent=absent),
    ):
        session.reset()
        session.train_step(**BATCH)
        rest = session.state() if absent == "keep" else session.initial_state()
        load()
        found = session.state()
        tied = {"first.weight", "last.weight"}
        expected = {n: given[n] if n in given else rest[n] for n in found if n not in tied}
        assert len(expected) > len(given)
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=name)
        for name in tied:
            np.testing.assert_array_equal(found[name], given["last.weight"], err_msg=name)


def test_a_loaded_model_trains_on_as_load_state_dict_lets_it(compiled: tuple[Tied, Path]) -> None:
    model, directory = compiled
    session, eager = Session(directory), copy.deepcopy(model).double()
    optimizer = torch.optim.AdamW([p for p in eager.parameters() if p.requires_grad], lr=0.05)
    x, y = (torch.from_numpy(BATCH[n]).double() for n in ("x", "y"))
    for step in range(4):
        if step == 2:
            eager.load_state_dict({n: t.double() for n, t in _others(model).state_dict().items()})
            session.load_state(_arrays(_others(model)))
        loss = nn.functional.mse_loss(eager(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(session.train_step(**BATCH), loss.item(), rtol=1e-5)


def test_a_hole_in_a_part_is_refused_and_changes_nothing(compiled: tuple[Tied, Path]) -> None:
    model, directory = compiled
    session = Session(directory)
    before = session.state()
    arrays = _arrays(model)
    for name, message in [
        ("first.bias", "first.bias is missing"),
        ("norm.running_mean", "norm.running_mean is missing"),
    ]:
        with pytest.raises(ArtifactError, match=message):
            session.load_state({n: a + 1 for n, a in arrays.items() if n != name})
    with pytest.raises(ArtifactError, match="their values differ"):
        session.load_state(arrays | {"first.weight": arrays["first.weight"] + 1})
    with pytest.raises(UserError, match="must be 'keep' or 'reset'"):
        session.load_state(arrays, absent="zero")
    for name, value in session.state().items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_the_initial_state_of_another_artifact_is_not_taken(mlp_artifact: Path, tmp_path: Path) -> None:
    directory = Path(shutil.copytree(mlp_artifact, tmp_path / "copy"))
    session = Session(directory)
    ig.compile(make_mlp_step(seed=1), directory)
    with pytest.raises(ArtifactError, match="was replaced by another artifact since it was loaded"):
        session.initial_state()
