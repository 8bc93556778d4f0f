"""The module checks constraints on sizes: the multiple that the model needs, and the user's own constraints."""

from __future__ import annotations

import copy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import irongrad as ig
from irongrad.graph.step_graph import Function, Value
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.runtime import Session
from irongrad.runtime.commands import run_module
from irongrad.runtime.errors import GuardError
from irongrad.runtime.golden import read_golden
from irongrad.runtime.golden_ctest import write_files
from irongrad.runtime.golden_plan import ARTIFACT, FILES, make_plan
from irongrad.runtime.initial_state import initial_state
from irongrad.runtime.manifest import GOLDEN

Run = Callable[[list[str]], subprocess.CompletedProcess[str]]


class _Blocks(nn.Module):
    """Splits sentences into blocks of four words, so the number of words must be a multiple of four."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        blocks = self.embedding(x).unflatten(1, (-1, 4))
        return self.head((blocks + blocks.mean(2, keepdim=True)).flatten(1, 2))


def _loss(tags: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(tags.flatten(0, 1), y.flatten(), ignore_index=2)


def _batch(b: int, t: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * b + t)
    limits = {"x": 9, "y": 3}
    return {n: torch.randint(0, limit, (b, t), generator=generator) for n, limit in limits.items()}


def _step(**options: Any) -> ig.TrainStep:
    torch.manual_seed(0)
    model = _Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    names = {n: {0: "B", 1: "T"} for n in ("x", "y")}
    return ig.TrainStep(model, _loss, optimizer, _batch(3, 8), dynamic=names, **options)


@pytest.fixture(scope="module")
def joint() -> tuple[ig.TrainStep, Function]:
    step = _step()
    return step, differentiate(capture(step)).joint


@pytest.mark.parametrize(("b", "t"), [(3, 8), (2, 4), (1, 12), (5, 40)])
def test_one_graph_is_right_at_every_multiple(joint: tuple[ig.TrainStep, Function], b: int, t: int):
    step, function = joint
    model, batch = copy.deepcopy(step.model), _batch(b, t)
    loss = _loss(model(batch["x"]), batch["y"])
    loss.backward()
    given = [
        batch[a.name] if a.kind == "input" else step.model.get_parameter(a.name).detach() for a in function.arguments
    ]
    made = torch.fx.Interpreter(function.graph).run(*given, enable_io_processing=False)
    found = dict(zip(function.results, made, strict=True))
    torch.testing.assert_close(found[Value("output", "loss")], loss.detach())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[Value("gradient", name)], parameter.grad)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    step = _step(buckets={"B": [4], "T": [8]}, bucket_fallback="dynamic", constraints=["B < T", "T <= 64"])
    directory: Path = tmp_path_factory.mktemp("constraints") / "blocks"
    ig.compile(step, directory, entry_points=["train_step", "reset"])
    return directory


@pytest.fixture(scope="module")
def session(artifact: Path) -> Session:
    return ig.runtime.load(artifact)


def test_multiples_train_in_buckets_and_beyond(session: Session, trains_as_eager: Callable[..., None]):
    batches = [_batch(b, t) for b, t in [(3, 8), (2, 4), (6, 12), (4, 8), (1, 64)]]
    trains_as_eager(session, _step(), batches, rtol=1e-5, state=(1e-4, 1e-6))


REFUSALS = [
    (
        (2, 10),
        "x: dimension 1 (T): the step needs T a multiple of 4; the step was not run; shape dimension 1 mismatch; "
        "expected 8 but have 10",
    ),
    (
        (9, 8),
        "x: dimension 0 (B): the step needs B < T; the step was not run; shape dimension 0 mismatch; expected 7 but "
        "have 9",
    ),
    (
        (2, 68),
        "x: dimension 1 (T) must be in [4, 64]; the step was not run; shape dimension 1 mismatch; expected 64 but "
        "have 68",
    ),
]


@pytest.mark.parametrize(("sizes", "message"), REFUSALS)
def test_a_refusal_names_the_constraint_and_the_value(
    artifact: Path, session: Session, iree_run: Run, sizes: tuple[int, int], message: str
):
    session.reset()
    before = session.state()
    with pytest.raises(GuardError) as error:
        session.train_step(**{n: np.zeros(sizes, np.int64) for n in ("x", "y")})
    assert message in str(error.value)
    for name, value in session.state().items():
        np.testing.assert_array_equal(value, before[name])
    values = dict.fromkeys(("x", "y"), f"{sizes[0]}x{sizes[1]}xi64=0")
    alone = iree_run(run_module(session.manifest, artifact, "train_step", inputs=values))
    assert alone.returncode != 0
    assert message in alone.stderr
    assert "INVALID_ARGUMENT" in alone.stderr


def test_the_golden_checks_break_every_constraint(artifact: Path, session: Session, iree_run: Run, tmp_path: Path):
    assert {c.text for c in session.manifest.constraints} == {"T a multiple of 4", "B < T"}
    assert all(c.broken for c in session.manifest.constraints)
    plan = make_plan(session.manifest, {"": read_golden(artifact / GOLDEN)}, initial_state(artifact))
    write_files(plan, session.manifest, tmp_path)
    chosen = [c for c in plan.checks if ".constraint." in c.name or ".out_of_range." in c.name]
    assert len(chosen) == 4
    for check in chosen:
        result = iree_run([a.replace(ARTIFACT, str(artifact)).replace(FILES, str(tmp_path)) for a in check.command])
        assert result.returncode != 0
        assert check.refusal in result.stderr, check.name
