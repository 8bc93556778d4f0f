"""A compiled step with buckets, which share one state, against eager float64 at every size."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import irongrad as ig
from irongrad.runtime import Session
from irongrad.runtime.errors import GuardError


class _Tagger(nn.Module):
    """Computes tags for tokens from their neighbours, with a BatchNorm over all true tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.norm = nn.BatchNorm1d(4)
        self.layer = nn.Conv1d(4, 3, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.norm(self.embedding(x).transpose(1, 2)))


def _loss(tags: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(tags, y[:, ::2], ignore_index=2)


def _batch(b: int, t: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * b + t)
    limits = {"x": 9, "y": 3}
    return {n: torch.randint(0, limit, (b, t), generator=generator) for n, limit in limits.items()}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return _Tagger()


@pytest.fixture(scope="module")
def step(model: nn.Module) -> ig.TrainStep:
    return ig.TrainStep(
        model,
        _loss,
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        _batch(3, 5),
        dynamic={"x": {0: "B", 1: "T"}, "y": {0: "B", 1: "T"}},
        buckets=[{"B": 4, "T": 4}, {"B": 4, "T": 8}],
        clip_grad_norm=0.5,
    )


@pytest.fixture(scope="module")
def session(step: ig.TrainStep, tmp_path_factory: pytest.TempPathFactory) -> Session:
    directory: Path = tmp_path_factory.mktemp("buckets") / "tagger"
    entry_points = ["train_step", "train_steps", "grad_step", "eval_step", "predict", "reset"]
    return ig.compile(step, directory, entry_points=entry_points).load()


def test_every_size_trains_one_state_as_eager_does(
    session: Session, step: ig.TrainStep, trains_as_eager: Callable[..., None]
):
    batches = [_batch(b, t) for b, t in [(3, 5), (1, 4), (4, 8), (2, 3), (4, 7), (3, 4)]]
    trains_as_eager(session, step, batches, rtol=2e-6, state=(2e-5, 2e-6))


def test_outputs_have_their_own_sizes(session: Session, model: nn.Module):
    session.reset()
    reference = copy.deepcopy(model).double().eval()
    for b, t in [(1, 3), (4, 4), (3, 6), (2, 8)]:
        batch = _batch(b, t)
        arrays = {n: v.numpy() for n, v in batch.items()}
        with torch.no_grad():
            expected = reference(batch["x"])
        np.testing.assert_allclose(session.predict(x=arrays["x"]), expected.numpy(), rtol=1e-5, atol=1e-6)
        assert session.eval_step(**arrays) == pytest.approx(_loss(expected, batch["y"]).item(), rel=1e-5)


def test_the_manifest_names_dimensions_and_buckets(session: Session):
    manifest = session.manifest
    assert manifest.buckets == ({"B": 4, "T": 4}, {"B": 4, "T": 8})
    predict = manifest.entry_point("predict")
    assert predict is not None
    assert predict.inputs[0].shape == ("B", "T")
    assert predict.outputs[0].shape == ("B", 3, "(((T - 1)//2)) + 1")
    steps = manifest.entry_point("train_steps")
    assert steps is not None
    assert steps.inputs[0].shape == ("K", "B", "T")


def _stack(b: int, t: int) -> dict[str, np.ndarray]:
    batch = {n: v.numpy() for n, v in _batch(b, t).items()}
    return {"x": np.stack([batch["x"], batch["x"][::-1], 8 - batch["x"]]), "y": np.stack([batch["y"]] * 3)}


@pytest.mark.parametrize(("b", "t"), [(3, 3), (4, 7)])
def test_train_steps_takes_the_same_steps_as_train_step(session: Session, b: int, t: int):
    stack, rates = _stack(b, t), [0.1, 0.2, 0.05]
    session.reset()
    one_by_one = [session.train_step(**{n: v[k] for n, v in stack.items()}, lr=rate) for k, rate in enumerate(rates)]
    expected = session.state()
    session.reset()
    np.testing.assert_allclose(session.train_steps(**stack, lr=rates), one_by_one, rtol=1e-6)
    for name, value in session.state().items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": (3, 5, 4), "y": (3, 5, 4)}, r"x: dimension 1 \(B\) must be in \[1, 4\]; the step was not run"),
        ({"x": (3, 2, 4), "y": (3, 3, 4)}, r"y: dimension 1 \(B\) must be as large as dimension 1 of x"),
        ({"x": (3, 2, 4), "y": (2, 2, 4)}, r"y and x are stacked over different numbers of steps \(dimension 0\)"),
    ],
)
def test_stacks_of_wrong_sizes_are_refused_and_change_nothing(
    session: Session, shapes: dict[str, tuple[int, int, int]], message: str
):
    session.reset()
    before = session.state()
    with pytest.raises(GuardError, match=message):
        session.train_steps(**{n: np.zeros(shape, np.int64) for n, shape in shapes.items()})
    stack = _stack(2, 4)
    stack["y"][2, 1, 1] = 3  # in the last step only
    with pytest.raises(GuardError, match=r"y: every value must be in \[0, 2\]"):
        session.train_steps(**stack)
    for name, value in session.state().items():
        np.testing.assert_array_equal(value, before[name])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": (5, 4), "y": (5, 4)}, r"x: dimension 0 \(B\) must be in \[1, 4\]; the step was not run"),
        ({"x": (2, 9), "y": (2, 9)}, r"x: dimension 1 \(T\) must be in \[1, 8\]"),
        ({"x": (0, 4), "y": (0, 4)}, r"x: dimension 0 \(B\) must be in \[1, 4\]"),
        ({"x": (2, 4), "y": (3, 4)}, r"y: dimension 0 \(B\) must be as large as dimension 0 of x"),
    ],
)
def test_sizes_that_no_bucket_holds_are_refused_and_change_nothing(
    session: Session, batch: dict[str, tuple[int, int]], message: str
):
    session.reset()
    before = session.state()
    with pytest.raises(GuardError, match=message):
        session.train_step(**{n: np.zeros(shape, np.int64) for n, shape in batch.items()})
    with pytest.raises(GuardError, match=r"y: every value must be in \[0, 2\]"):
        session.train_step(x=np.zeros((2, 4), np.int64), y=np.full((2, 4), 3))
    for name, value in session.state().items():
        np.testing.assert_array_equal(value, before[name])


class _Counting(nn.Module):
    """Adds to some elements of an argument and convolves the result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(3, 2, 3, padding=1)

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        return self.layer(x.scatter_add(2, places, torch.full_like(x, 0.5)))


def _images(b: int, t: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * b + t)
    places = torch.randint(0, 4, (b, 3, t), generator=generator)
    x, y = (torch.randn(b, c, t, generator=generator) for c in (3, 2))
    return {"x": x, "places": places, "y": y}


def test_inputs_that_fill_a_bucket_are_not_overwritten(tmp_path: Path):
    torch.manual_seed(0)
    model, examples = _Counting(), _images(3, 5)
    reference = copy.deepcopy(model).double()
    dynamic = {n: {0: "B", 2: "T"} for n in examples}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(
        model,
        F.mse_loss,
        optimizer,
        examples,
        model_inputs=["x", "places"],
        dynamic=dynamic,
        buckets=[{"B": 4, "T": 8}],
    )
    session = ig.compile(step, tmp_path / "counting", entry_points=["train_step"]).load()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for b, t in [(4, 8), (3, 5), (4, 8)]:
        batch = _images(b, t)
        given = {n: session.to_device(v.numpy()) for n, v in batch.items()}
        optimizer.zero_grad()
        loss = F.mse_loss(reference(batch["x"].double(), batch["places"]), batch["y"].double())
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(session.train_step(**given), loss.item(), rtol=2e-6)
        for name, value in given.items():
            np.testing.assert_array_equal(np.asarray(value), batch[name].numpy())
