"""Steps whose named dimensions have no fixed size: one graph and one compiled function serve every size."""

from __future__ import annotations

import copy
import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from torch import Tensor, nn
from torch._higher_order_ops import scan
from torch._higher_order_ops.map import map
from torch.utils._sympy.functions import Mod

import irongrad as ig
from irongrad.graph.step_graph import Function, Value
from irongrad.operators.legalize.retrace import interpret_eager
from irongrad.passes.base import Context
from irongrad.passes.graph.simplify import Simplify
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.pipeline.driver import step_graph
from irongrad.pipeline.lower.reshapes import joined_and_split
from irongrad.runtime import Session
from irongrad.runtime.commands import run_module
from irongrad.runtime.errors import CaptureError, GuardError, UnsupportedOpError, UserError
from irongrad.runtime.golden import read_golden
from irongrad.runtime.golden_ctest import write_files
from irongrad.runtime.golden_plan import ARTIFACT, FILES, make_plan
from irongrad.runtime.initial_state import initial_state
from irongrad.runtime.manifest import GOLDEN
from irongrad.sizes.expressions import symbol
from irongrad.sizes.limits import limits_of, spelled
from tests.fixtures.tagger import batch_of, loss_of, tagger_step

Run = Callable[[list[str]], subprocess.CompletedProcess[str]]
B, T = symbol("B"), symbol("T")


@pytest.fixture(scope="module")
def joint() -> tuple[ig.TrainStep, Function]:
    step = tagger_step()
    return step, differentiate(capture(step)).joint


def _simplified(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    made = copy.deepcopy(graph)
    assert Simplify().run(made, Context("joint")).changed
    made.recompile()
    return made


@pytest.mark.parametrize("write", [lambda graph: graph, joined_and_split, _simplified])
@pytest.mark.parametrize(("b", "t"), [(3, 5), (2, 1), (1, 7), (5, 90), (70, 2)])
def test_one_graph_is_right_at_every_size(joint: tuple[ig.TrainStep, Function], b: int, t: int, write: Any):
    step, function = joint
    model, batch = copy.deepcopy(step.model).double(), batch_of(b, t)
    loss = loss_of(model(batch["x"]), batch["y"])
    loss.backward()
    state = {**dict(step.model.named_parameters()), **dict(step.model.named_buffers())}
    given = [batch[a.name] if a.kind == "input" else state[a.name].detach() for a in function.arguments]
    graph = write(function.graph)
    made = dict(
        zip(function.results, interpret_eager(graph, given), strict=True)
    )  # it ignores the graph's strides, which belong to the example's sizes
    torch.testing.assert_close(made[Value("output", "loss")].double(), loss.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(made[Value("gradient", name)].double(), parameter.grad, rtol=1e-4, atol=1e-6)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(made[Value("state", name)].double(), buffer.double(), rtol=1e-5, atol=1e-6)


def test_reshapes_become_joined_and_split_dimensions(joint: tuple[ig.TrainStep, Function]):
    aten = torch.ops.aten
    before = [n for n in joint[1].graph.graph.nodes if n.target is aten.view.default]
    after = joined_and_split(joint[1].graph)
    left = [n for n in after.graph.nodes if n.target is aten.view.default]
    assert len(before) > len(left)
    assert all(isinstance(s, int) for n in left for s in n.meta["val"].shape)
    assert any(n.target is torch.ops.prims.collapse.default for n in after.graph.nodes)


def test_limits_become_intervals_if_they_can():
    limits = limits_of([sympy.Le(T, 96), sympy.Ge(T, 3), sympy.Ne(B, 1), sympy.Lt(B * T, 1000)], ["B", "T"])
    assert (limits.smallest, limits.largest) == ({"B": 2, "T": 3}, {"T": 96})
    assert limits.conditions == (sympy.Lt(B * T, 1000),)
    assert limits.allow({"B": 2, "T": 96})
    assert not limits.allow({"B": 2, "T": 97})
    assert not limits.allow({"B": 11, "T": 96})


def test_a_table_of_positions_is_a_limit_and_so_is_a_batch_of_one():
    limits = limits_of([sympy.Le(T, 96), sympy.Ne(B * T, 1)], ["B", "T"])
    assert step_graph(tagger_step(attends=False)).limits == limits
    assert [spelled(c) for c in limits.conditions] == ["B*T != 1"]


def test_a_multiple_is_a_condition_in_words():
    (condition,) = limits_of([sympy.Eq(Mod(T, 8), 0)], ["T"]).conditions
    assert spelled(condition) == "T a multiple of 8"


def test_an_operator_that_needs_a_fixed_size_is_refused_at_its_line():
    model = nn.Sequential(nn.Conv1d(3, 3, 1), nn.AdaptiveAvgPool1d(4))
    inputs = {"x": torch.randn(2, 3, 10)}
    step = ig.TrainStep(
        model, lambda out: out.square().mean(), torch.optim.SGD(model.parameters()), inputs, dynamic={"x": {2: "T"}}
    )
    with pytest.raises((UnsupportedOpError, CaptureError), match="'T'") as error:
        step_graph(step)
    assert "pool" in str(error.value)
    assert "leave 'T' out of dynamic" in str(error.value)


class _FirstRows(nn.Module):
    """Takes a fixed number of rows, for which PyTorch keeps no guard: it takes every size for two or more."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows, self.layer = rows, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).squeeze(0)
        return h + h[: self.rows].mean(0)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_fewer_rows_than_the_model_takes_are_refused(rows: int):
    model = _FirstRows(rows)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(
        model, lambda h: h.square().mean(), optimizer, {"x": torch.randn(5, 4)}, dynamic={"x": {0: "B"}}
    )
    limits = differentiate(capture(step)).limits
    assert limits is not None
    assert limits.smallest == {"B": rows}


def test_a_trial_of_a_size_that_an_operator_does_not_take_logs_nothing(monkeypatch: pytest.MonkeyPatch):
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", said.append)
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handlers", [handler])
    model = nn.Sequential(nn.Linear(3, 3), _Applied(lambda x: x.topk(2, 0)[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = {"x": torch.randn(5, 3)}
    step = ig.TrainStep(model, lambda h: h.square().mean(), optimizer, inputs, dynamic={"x": {0: "B"}})
    assert step_graph(step).limits.smallest == {"B": 2}
    assert not said


def test_a_fallback_needs_buckets_and_sizes_beyond_them():
    with pytest.raises(CaptureError, match="the step has no buckets"):
        tagger_step(bucket_fallback="dynamic")
    with pytest.raises(CaptureError, match="must be 'dynamic'"):
        tagger_step(buckets={"B": [4], "T": [8]}, bucket_fallback="pad")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"functions of any size leave B, T open: give buckets for B, T"),
        ({"buckets": {"B": [4], "T": [8]}, "bucket_fallback": "dynamic"}, "leave out bucket_fallback"),
    ],
)
@pytest.mark.parametrize("budget", [{"max_memory": "50%"}, {"passes": "dce,rematerialise{max_memory=50%}"}])
def test_a_budget_of_memory_needs_known_sizes(
    tmp_path: Path, options: dict[str, Any], message: str, budget: dict[str, str]
):
    with pytest.raises(UserError, match=f"max_memory needs known sizes.*{message}"):
        ig.compile(tagger_step(**options), tmp_path / "artifact", **budget)


def test_the_route_over_stablehlo_needs_known_sizes(tmp_path: Path):
    with pytest.raises(UserError, match="StableHLO needs known sizes, .* leave B, T open: give buckets for B, T, or"):
        ig.compile(tagger_step(), tmp_path / "artifact", route="stablehlo")


def test_the_name_of_the_dimension_of_steps_is_reserved():
    with pytest.raises(CaptureError, match="'K', as the steps of train_steps are called; rename it"):
        tagger_step(dynamic={"x": {1: "K"}, "y": {1: "K"}})


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    step = tagger_step(attends=False, buckets={"B": [4], "T": [8]}, bucket_fallback="dynamic")
    directory: Path = tmp_path_factory.mktemp("any_size") / "tagger"
    ig.compile(step, directory, entry_points=["train_step", "train_steps", "eval_step", "reset"])
    return directory


@pytest.fixture(scope="module")
def session(artifact: Path) -> Session:
    return ig.runtime.load(artifact)


def test_calls_that_no_bucket_holds_train_the_same_state(session: Session, trains_as_eager: Callable[..., None]):
    batches = [batch_of(b, t) for b, t in [(3, 5), (4, 9), (6, 4), (2, 8), (5, 70), (1, 96)]]
    trains_as_eager(session, tagger_step(attends=False), batches, rtol=1e-5, state=(1e-4, 1e-5))


@pytest.mark.parametrize(("b", "t"), [(3, 5), (6, 11)])
def test_many_steps_in_one_call_are_the_same_steps(session: Session, b: int, t: int):
    batch = {n: v.numpy() for n, v in batch_of(b, t).items()}
    session.reset()
    one_by_one = [session.train_step(**batch) for _ in range(3)]
    expected = session.state()
    session.reset()
    made = session.train_steps(**{n: np.stack([v] * 3) for n, v in batch.items()})
    np.testing.assert_allclose(made, one_by_one, rtol=1e-6)
    for name, value in session.state().items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6, atol=1e-7)


REFUSALS = [
    (
        {"x": (2, 97), "y": (2, 97)},
        "x: dimension 1 (T) must be in [1, 96]; the step was not run; shape dimension 1 mismatch; expected 96 but "
        "have 97",
    ),
    (
        {"x": (2, 4), "y": (3, 4)},
        "y: dimension 0 (B) must be as large as dimension 0 of x; the step was not run; shape dimension 0 mismatch; "
        "expected 2 but have 3",
    ),
    (
        {"x": (2, 9), "y": (2, 10)},
        "y: dimension 1 (T) must be as large as dimension 1 of x; the step was not run; shape dimension 1 mismatch; "
        "expected 9 but have 10",
    ),
]


@pytest.mark.parametrize(("shapes", "message"), REFUSALS)
def test_a_session_and_iree_run_module_refuse_in_the_same_words(
    artifact: Path, session: Session, iree_run: Run, shapes: dict[str, tuple[int, int]], message: str
):
    session.reset()
    before = session.state()
    with pytest.raises(GuardError) as error:
        session.train_step(**{n: np.zeros(shape, np.int64) for n, shape in shapes.items()})
    assert message in str(error.value)
    for name, value in session.state().items():
        np.testing.assert_array_equal(value, before[name])
    values = {n: f"{shape[0]}x{shape[1]}xi64=0" for n, shape in shapes.items()}
    alone = iree_run(run_module(session.manifest, artifact, "train_step", inputs=values))
    assert alone.returncode != 0
    assert message in alone.stderr


def test_the_golden_checks_pass_and_refuse_in_the_same_words(
    artifact: Path, session: Session, iree_run: Run, tmp_path: Path
):
    plan = make_plan(session.manifest, {"": read_golden(artifact / GOLDEN)}, initial_state(artifact))
    write_files(plan, session.manifest, tmp_path)
    assert next(c for c in plan.checks if c.name.endswith("train_step.too_large.T")).refusal in REFUSALS[0][1]
    for check in (c for c in plan.checks if ".train_step" in c.name):
        command = [a.replace(ARTIFACT, str(artifact)).replace(FILES, str(tmp_path)) for a in check.command]
        result = iree_run(command)
        assert (result.returncode != 0) == bool(check.refusal), check.name
        assert check.refusal in result.stderr


def test_the_manifest_says_which_sizes_there_are(session: Session):
    assert session.manifest.sizes == {"B": (1, None), "T": (1, 96)}


class _NormOverSteps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        steps = self.linear(x)
        return nn.functional.layer_norm(steps, steps.shape[1:]).amax(1)


class _Mixture(nn.Module):
    """Experts whose weighted sum is an einsum of three operands; opt-einsum orders their products by size."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bst,bsd,tdh->bh", self.router(x).softmax(-1), x / x.shape[1], self.experts)


class _Moved(nn.Module):
    """Rolls, splits, sorts and scans along dimensions of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        b, t = h.shape[:2]
        h = h.roll((1, -2), (0, 1)) * h + h.roll(t // 2, 1)
        first, second = torch.cat([h, h.sin()]).chunk(2)
        h = first.sort(1, descending=True)[0] + second[second[:, 0, 0].argsort()] + h.median(1, keepdim=True)[0]
        sums = h.cumsum(1) / t + (h > 0).cumsum(0) / b + h.logcumsumexp(0)
        return (sums + h.cummax(1)[0] * h.cummin(0)[0]).mean(1).tanh()


class _Placed(nn.Module):
    """Weighs steps by their places, and samples an image at points that are computed for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 6)

    def forward(self, x: Tensor) -> Tensor:
        places = (
            torch.linspace(-1, 1, x.shape[1], dtype=x.dtype).unsqueeze(1)
            + (x.shape[1] - torch.arange(x.shape[1])[:, None]) / 8
        )
        h = (self.linear(x) * places).mean(1)
        image = h.view(-1, 1, 2, 3)
        grid = nn.functional.affine_grid(h.view(-1, 2, 3), [*image.shape[:2], 2, 2], align_corners=False)
        return nn.functional.grid_sample(image, grid, align_corners=False).flatten(1)


@pytest.mark.parametrize("model", [_NormOverSteps, _Mixture, _Moved, _Placed])
def test_a_model_trains_at_every_size(model: type[nn.Module], tmp_path: Path):
    """The sums of a norm are over whole blocks of 64 and a rest, and the blocks of the rest are empty at every size."""
    torch.manual_seed(0)
    eager = model()
    loss, optimizer = nn.functional.mse_loss, torch.optim.SGD(eager.parameters(), lr=0.1)
    inputs = {"x": torch.randn(2, 5, 3), "y": torch.randn(2, 4)}
    step = ig.TrainStep(eager, loss, optimizer, inputs, dynamic={"x": {0: "B", 1: "T"}, "y": {0: "B"}})
    session = ig.compile(step, tmp_path, entry_points=["train_step"]).load()
    for b, t in [(2, 5), (1, 1), (3, 2), (2, 33), (1, 70)]:
        x, y = torch.randn(b, t, 3), torch.randn(b, 4)
        optimizer.zero_grad()
        wanted = loss(eager(x), y)
        wanted.backward()
        optimizer.step()
        np.testing.assert_allclose(session.train_step(x=x.numpy(), y=y.numpy()), wanted.item(), rtol=1e-4)
    for name, parameter in eager.named_parameters():
        np.testing.assert_allclose(session.state()[name], parameter.detach(), rtol=1e-3, atol=1e-4)


class _Scan(nn.Module):
    """A recurrent cell whose body tests the size of its batch."""

    def __init__(self, test: Callable[[Any], bool]) -> None:
        super().__init__()
        self.linear, self.test = nn.Linear(3, 3), test

    def forward(self, x: Tensor) -> Tensor:
        def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
            state = torch.tanh(self.linear(state) + row)
            if self.test(state.shape[0]):
                state = state * 2
            return state, state.clone()

        state, rows = scan(step, torch.zeros(x.shape[1], 3), x)
        return state + rows.mean(0)


class _Map(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return map(lambda row: torch.tanh(self.linear(row)).cumsum(1), x)[-1]


def _loops(model: nn.Module) -> ig.TrainStep:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = {"x": torch.randn(4, 2, 3), "y": torch.randn(2, 3)}
    return ig.TrainStep(
        model, nn.functional.mse_loss, optimizer, inputs, dynamic={"x": {0: "T", 1: "B"}, "y": {0: "B"}}
    )


@pytest.mark.parametrize("make", [lambda: _Scan(lambda size: size < 5), _Map], ids=["scan", "map"])
def test_loops_of_the_model_take_sizes_of_one(make: Callable[[], nn.Module], tmp_path: Path):
    session = ig.compile(_loops(make()), tmp_path, entry_points=["train_step"]).load()
    step = _loops(make())
    for t, b in [(4, 2), (1, 1), (3, 1), (1, 4)]:
        x, y = torch.randn(t, b, 3), torch.randn(b, 3)
        step.optimizer.zero_grad()
        wanted = step.loss(step.model(x), y)
        wanted.backward()
        step.optimizer.step()
        np.testing.assert_allclose(session.train_step(x=x.numpy(), y=y.numpy()), wanted.item(), rtol=1e-5)
    assert session.manifest.sizes == {"B": (1, 4 if make is not _Map else None), "T": (1, None)}


def test_both_halves_of_a_dimension_are_slices_of_any_size():
    """PyTorch asks for several conditions at once there."""

    def step(x: Tensor) -> Tensor:
        half = x.shape[0] // 2
        return torch.cat([x[:half] * 2, x[half:]])

    model = nn.Sequential(nn.Linear(3, 3), _Applied(step))
    inputs = {"x": torch.randn(5, 3)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = ig.TrainStep(model, lambda h: h.square().mean(), optimizer, inputs, dynamic={"x": {0: "B"}})
    assert step_graph(made).limits.largest == {}


class _Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


@pytest.mark.parametrize("test", [lambda size: size > 1, lambda size: size != 1])
def test_a_test_of_a_size_in_the_body_of_a_loop_is_a_limit(test: Callable[[Any], bool]):
    assert step_graph(_loops(_Scan(test))).limits.smallest == {"T": 1, "B": 2}


class _Interleaved(nn.Module):
    """Writes its rows in turn, and columns with gaps, into tensors of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        rows, columns = torch.zeros_like(h), torch.zeros_like(h)
        for i in range(3):
            rows[i::3] = h[i::3] * (i + 1)
        columns[:, ::2] = h[:, 1:] * 2
        columns[::2, 1::2] = h[::2, :1] * 3
        return (rows * columns).sum(0)


def test_slices_with_gaps_are_written_at_every_size(tmp_path: Path):
    torch.manual_seed(0)
    model = _Interleaved()
    inputs = {"x": torch.randn(7, 3), "y": torch.randn(3)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = ig.TrainStep(model, nn.functional.mse_loss, optimizer, inputs, dynamic={"x": {0: "B"}})
    eager = copy.deepcopy(model).double()
    session = ig.compile(step, tmp_path / "step", entry_points=["train_step"]).load()
    for rows in (7, 6, 8, 20):
        x, y = torch.randn(rows, 3), torch.randn(3)
        loss = nn.functional.mse_loss(eager(x.double()), y.double())
        gradients = torch.autograd.grad(loss, list(eager.parameters()))
        assert session.train_step(x=x.numpy(), y=y.numpy()) == pytest.approx(loss.item(), rel=1e-5)
        with torch.no_grad():
            for parameter, gradient in zip(eager.parameters(), gradients, strict=True):
                parameter -= 0.01 * gradient


class _Packed(nn.Module):
    """Marks rows of several sequences by a running count, and looks the marks up, as decoders of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, starts: Tensor) -> Tensor:
        hidden, number = self.linear(x), starts.cumsum(-1)
        rows, places = torch.arange(x.shape[0]), torch.arange(x.shape[1])
        same = number[rows[:, None, None], places[:, None]] == number[rows[:, None, None], places]
        return hidden + (hidden @ hidden.transpose(1, 2)).masked_fill(~same, 0.0) @ hidden


@pytest.mark.parametrize("length", [64, 70])
def test_a_running_count_is_of_any_length_whatever_that_of_the_example(length: int) -> None:
    """64 elements are whole blocks of the count."""
    model = _Packed()
    inputs = {"x": torch.randn(2, length, 4), "starts": torch.randint(2, (2, length)), "y": torch.randn(2, length, 4)}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dynamic = {name: {0: "B", 1: "T"} for name in inputs}
    step = ig.TrainStep(model, nn.functional.mse_loss, optimizer, inputs, dynamic=dynamic, model_inputs=("x", "starts"))
    limits = step_graph(step).limits
    assert limits is not None
    assert limits.allow({"B": 3, "T": 33})
