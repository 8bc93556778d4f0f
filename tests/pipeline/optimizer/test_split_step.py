"""Split steps compute the same as whole ones, and refuse a second piece that does not match the first."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import irongrad as ig
from irongrad.graph.step_graph import Function, Value
from irongrad.memory_model.kernel_roles import is_constant, is_view
from irongrad.operators.legalize.retrace import interpret
from irongrad.operators.random import Draws
from irongrad.passes import passes_at
from irongrad.pipeline.bisect.bisect import bisect
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.pipeline.driver import step_graph
from irongrad.pipeline.optimizer.split_step import pieces_of
from irongrad.pipeline.optimizer.update import add_optimizer
from irongrad.runtime import Session
from irongrad.runtime.errors import CaptureError, GuardError, UserError
from irongrad.runtime.golden import read_golden
from irongrad.runtime.golden_ctest import write_files
from irongrad.runtime.golden_plan import ARTIFACT, FILES, make_plan
from irongrad.runtime.initial_state import initial_state
from irongrad.runtime.manifest import GOLDEN
from irongrad.runtime.manifest_file import read_manifest


class _Slots(nn.Module):
    """Four guesses an image. The backward needs the statistics of BatchNorm and the draws of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.layers(x)
        return {"guess": self.head(features), "features": features}


def _loss(outputs: dict[str, Tensor], y: Tensor, match: Tensor) -> Tensor:
    return F.mse_loss(outputs["guess"].gather(1, match), y)


def _match(outputs: dict[str, Any], y: Any) -> dict[str, Any]:
    """Match the targets of each row to its guesses in ascending order."""
    guess = np.asarray(outputs["guess"])
    return {"match": np.argsort(guess, axis=1)[:, : y.shape[1]].astype(np.int64)}


def _batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(5, 6, generator=generator), "y": torch.randn(5, 2, generator=generator)}


def _step() -> ig.TrainStep:
    torch.manual_seed(0)
    model = _Slots()
    inputs = {**_batch(0), "match": torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [1, 0]])}
    step = ig.TrainStep(model, _loss, torch.optim.AdamW(model.parameters(), lr=1e-2), inputs)
    return ig.pieces(step, between=["match"])


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pieces") / "slots"
    ig.compile(_step(), directory)
    return directory


@pytest.fixture
def session(artifact: Path) -> Session:
    return Session(artifact)


@pytest.fixture(scope="module")
def joint() -> Function:
    return add_optimizer(differentiate(capture(_step()))).functions["joint"]


def test_the_pieces_compute_the_same_as_the_whole_step(joint: Function):
    forward, finish = pieces_of(joint)
    generator = torch.Generator().manual_seed(1)
    known: dict[Value, Tensor] = {}
    for i, argument in enumerate(joint.arguments):
        like = joint.example(i)
        draw = torch.rand(like.shape, generator=generator) + 0.5
        known[argument] = draw if like.is_floating_point() else torch.ones(like.shape, dtype=like.dtype)
    whole = dict(zip(joint.results, interpret(joint.graph, [known[a] for a in joint.arguments]), strict=True))
    first = dict(zip(forward.results, interpret(forward.graph, [known[a] for a in forward.arguments]), strict=True))
    known |= {v: t for v, t in first.items() if v.kind == "saved"}
    second = dict(zip(finish.results, interpret(finish.graph, [known[a] for a in finish.arguments]), strict=True))
    for value, expected in whole.items():
        made = first[value] if value in first else second[value]
        assert torch.equal(made, expected), value


def test_the_pieces_share_no_work(joint: Function):
    """Only views and constants are computed twice, and the first piece ends where the model ends."""
    forward, finish = pieces_of(joint)
    assert {a.name for a in forward.arguments if a.kind == "input"} == {"x"}
    assert {a.name for a in finish.arguments if a.kind == "input"} == {"y", "match"}
    assert {r.kind for r in forward.results} == {"output", "saved"}
    assert _work(forward) + _work(finish) == _work(joint)
    assert _work(forward) > 0


def _work(function: Function) -> int:
    return sum(n.op == "call_function" and not is_view(n) and not is_constant(n) for n in function.graph.graph.nodes)


def test_pieces_train_as_eager_does(session: Session):
    """Against float64, with BatchNorm, and with dropout that draws the same in both pieces."""
    step = _step()
    model = step.model.double().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(8):
        batch = _batch(number)
        made = session.run_pieces(_match, **{n: t.numpy() for n, t in batch.items()})
        with Draws(0, number):
            outputs = model(batch["x"].double())
        matches = _match({n: t.detach() for n, t in outputs.items()}, batch["y"])
        loss = _loss(outputs, batch["y"].double(), torch.from_numpy(matches["match"]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        np.testing.assert_allclose(made, loss.item(), rtol=1e-5)
    state = session.state()
    for name, tensor in model.state_dict().items():
        np.testing.assert_allclose(state[name], tensor.numpy(), rtol=2e-4, atol=2e-6, err_msg=name)
    assert state["irongrad/steps"] == 8


def test_a_forward_changes_nothing(session: Session):
    before = session.state()
    x = _batch(1)["x"].numpy()
    once, _ = session.forward(x=x)
    again, _ = session.forward(x=x)
    _check_equal(session.state(), before)
    _check_equal(once, again)


def test_a_second_piece_that_does_not_match_the_first_is_refused(session: Session):
    batch = {n: t.numpy() for n, t in _batch(2).items()}
    rest = {"y": batch["y"], "match": np.zeros((5, 2), np.int64)}
    before = session.state()

    def refused(ticket: int, message: str, **changed: Any) -> None:
        with pytest.raises(GuardError, match=message):
            session.finish_step(ticket, **{**rest, **changed})
        _check_equal(session.state(), before)

    refused(0, "no forward is open")
    _, stale = session.forward(x=batch["x"])
    _, ticket = session.forward(x=batch["x"])
    refused(stale, "ticket: it is that of an earlier forward")
    refused(ticket, r"match: every value must be in \[0, 3\]", match=np.full((5, 2), 4))
    refused(ticket, "y", y=np.zeros((5, 3), np.float32))
    session.finish_step(ticket, **rest)  # a refusal leaves the forward open
    before = session.state()
    refused(ticket, "no forward is open")


@pytest.mark.parametrize("replace", [lambda s: s.reset(), lambda s: s.load_state(s.initial_state())])
def test_a_forward_over_another_state_is_refused(session: Session, replace: Callable[[Session], None]):
    batch = {n: t.numpy() for n, t in _batch(2).items()}
    _, ticket = session.forward(x=batch["x"])
    replace(session)
    with pytest.raises(GuardError, match="no forward is open"):
        session.finish_step(ticket, y=batch["y"], match=np.zeros((5, 2), np.int64))


def test_iree_run_module_runs_the_first_piece_and_is_refused_the_second(artifact: Path, tmp_path: Path):
    manifest = read_manifest(artifact)
    plan = make_plan(manifest, {"": read_golden(artifact / GOLDEN)}, initial_state(artifact))
    write_files(plan, manifest, tmp_path)
    chosen = [c for c in plan.checks if re.search(r"\.(forward(\.ticket)?|finish_step)$", c.name)]
    assert any(c.refusal for c in chosen)
    assert any(not c.refusal for c in chosen)
    for check in chosen:
        command = [a.replace(ARTIFACT, str(artifact)).replace(FILES, str(tmp_path)) for a in check.command]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (check.refusal in done.stderr) if check.refusal else (done.returncode == 0), (done.stdout, done.stderr)


def _check_equal(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(
    ("between", "message"),
    [([], "between is empty"), (["x"], "between names 'x'"), (["z"], "between names 'z'")],
)
def test_between_names_inputs_of_the_loss(between: list[str], message: str):
    step = replace(_step(), between=())
    with pytest.raises(CaptureError, match=message):
        ig.pieces(step, between)


@pytest.mark.parametrize(
    "options",
    [{"accumulate": 5}, {"dynamic": {"x": {0: "B"}}}, {"dynamic": {"x": {0: "B"}}, "buckets": {"B": [8]}}],
    ids=["micro-batches", "any size", "buckets"],
)
def test_sizes_that_vary_are_refused(options: dict[str, Any]):
    step = replace(_step(), between=(), **options)
    with pytest.raises(CaptureError, match="in pieces has neither micro-batches nor sizes that vary: leave out"):
        ig.pieces(step, between=["match"])


def test_a_budget_of_memory_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="max_memory needs forward and backward in one piece"):
        ig.compile(_step(), tmp_path / "artifact", max_memory="50%")


def test_no_pass_changes_the_numbers_of_a_piece():
    findings = bisect(step_graph(_step()), passes_at(2))
    assert {f.function for f in findings} >= {"forward", "finish"}
    assert not any(f.changes_numbers for f in findings)
