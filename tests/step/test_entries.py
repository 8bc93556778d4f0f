"""Further entry points over the step's state: as eager computes them, with guards and buckets, or refused in words."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn.functional import cross_entropy

import irongrad as ig
from irongrad.cli import run as run_verb
from irongrad.graph.eager_control_flow import eager_control_flow
from irongrad.runtime import load
from irongrad.runtime.errors import CaptureError, GuardError, UserError
from irongrad.runtime.manifest import DRAWS, SEED


class Tagger(nn.Module):
    """A model with other things to do than its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 6)
        self.hidden = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.drop(torch.tanh(self.hidden(x))))

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).argmax(-1)

    def look(self, words: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self(self.table(words)) * scale, "words": words + 1}

    def sample(self) -> torch.Tensor:
        return self.out(torch.randn(3, 8))

    def count(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.calls


def make_step(model: nn.Module, entries: dict[str, Any], **changed: Any) -> ig.TrainStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    inputs = {"x": torch.randn(8, 6), "y": torch.randint(0, 3, (8,))}
    return ig.TrainStep(model, cross_entropy, optimizer, inputs, entries=entries, **changed)


def entries_of(model: Tagger) -> dict[str, Any]:
    return {
        "act": (model.act, {"x": torch.randn(2, 6)}),
        "look": ig.Entry(model.look, {"words": torch.tensor([0, 4, 1]), "scale": torch.tensor(2.0)}),
        "encode": (lambda z: model.hidden(z), {"z": torch.randn(1, 6)}),
        "sample": (model.sample, {}),
    }


@pytest.fixture(scope="module", params=["fixed", "any size", "buckets"])
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tagger, Path]:
    torch.manual_seed(0)
    model = Tagger()
    names = {"x": {0: "B"}, "y": {0: "B"}, "act.x": {0: "B"}}
    varied = {"fixed": {}, "any size": {"dynamic": names}, "buckets": {"dynamic": names, "buckets": {"B": [4, 16]}}}
    directory = tmp_path_factory.mktemp("entries") / "net"
    ig.compile(make_step(model, entries_of(model), **varied[request.param]), directory)
    return model, directory


def test_entries_compute_what_eager_does_after_training(compiled: tuple[Tagger, Path]) -> None:
    directory = compiled[1]
    with load(directory) as session:
        x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
        session.train_step(x=x, y=y)
        after = Tagger()
        state = session.state()
        after.load_state_dict({n: torch.as_tensor(state[n]) for n in after.state_dict()})
        after.eval()
        with torch.no_grad():
            for rows in (2, 1, 5, 16) if "B" in session.manifest.sizes else (2,):
                obs = torch.randn(rows, 6)
                np.testing.assert_array_equal(session.call("act", x=obs), after.act(obs))
            words = torch.tensor([3, 3, 0])
            found = session.call("look", words=words, scale=0.5)
            np.testing.assert_allclose(found["logits"], after.look(words, torch.tensor(0.5))["logits"], atol=1e-6)
            np.testing.assert_array_equal(found["words"], [4, 4, 1])
            z = torch.randn(1, 6)
            np.testing.assert_allclose(session.call("encode", z=z), after.hidden(z), atol=1e-6)
        assert session.call("act", {"x": torch.randn(2, 6)})[0].shape == (2,)


def test_bad_inputs_of_an_entry_are_refused_and_change_nothing(compiled: tuple[Tagger, Path]) -> None:
    with load(compiled[1]) as session:
        before = session.state()
        with pytest.raises(GuardError, match=r"look: words: every value must be in \[0, 4\].*expected 4 but have 5"):
            session.call("look", words=np.array([0, 5, 0]), scale=1.0)
        with pytest.raises(GuardError, match="act: the input 'x' is missing"):
            session.call("act", obs=np.zeros((2, 6), np.float32))
        with pytest.raises(UserError, match="no entry point 'play'"):
            session.call("play", x=np.zeros((2, 6), np.float32))
        for name, array in session.state().items():
            np.testing.assert_array_equal(array, before[name])


def test_a_sampling_entry_draws_anew_and_starts_again_from_its_seed(compiled: tuple[Tagger, Path]) -> None:
    with load(compiled[1]) as session:
        first, second = session.call("sample"), session.call("sample")
        assert not np.array_equal(first, second)
        assert int(session.state()[SEED]) == 0
        session.reset()
        np.testing.assert_array_equal(session.call("sample"), first)


def test_entries_run_from_the_command_line_and_without_python(compiled: tuple[Tagger, Path], tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    given = [str(compiled[1]), "act", "--input", f"x={tmp_path / 'x.npy'}", "--json"]
    outcome = CliRunner().invoke(run_verb.command, given)
    assert outcome.exit_code == 0, outcome.output
    with load(compiled[1]) as session:
        actions = session.call("act", x=x)
        assert json.loads(outcome.output)["outputs"]["output"] == actions.tolist()
        module = f"--module={compiled[1] / session.target.file}"
    state = f"--parameters=state={compiled[1] / 'state.irpa'}"
    flags = [module, state, "--parameter_mode=preload", "--device=local-sync", "--function=act"]
    command = ["iree-run-module", *flags, f"--input=@{tmp_path / 'x.npy'}"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip().endswith(f"2xi64={actions[0]} {actions[1]}")


def test_a_chosen_entry_can_stand_alone(tmp_path: Path) -> None:
    model = Tagger()
    ig.compile(make_step(model, entries_of(model)), tmp_path / "net", entry_points=["act"])
    with load(tmp_path / "net") as session:
        assert [e.name for e in session.manifest.entry_points] == ["act", "export_state", "import_state"]


class Noisy(nn.Module):
    """A model that draws in an entry, and not in its training step."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x)

    def act(self, x: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Categorical(logits=self(x)).sample()


def test_an_entry_may_draw_where_the_training_step_does_not(tmp_path: Path) -> None:
    model = Noisy()
    ig.compile(make_step(model, {"act": (model.act, {"x": torch.randn(64, 6)})}), tmp_path / "net")
    with load(tmp_path / "net") as session:
        x = torch.randn(64, 6)
        assert not np.array_equal(session.call("act", x=x), session.call("act", x=x))
        session.train_step(x=x[:8], y=torch.zeros(8, dtype=torch.int64))
        assert int(session.state()[DRAWS]) == 2


def test_a_loop_of_an_entry_may_hold_dropout_and_attention_that_draw_nothing(tmp_path: Path) -> None:
    model = Tagger()

    def roll_out(x: torch.Tensor) -> torch.Tensor:
        def one(x: torch.Tensor, number: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            new = torch.tanh(model.hidden(model.drop(x)))[:, :6] + number
            return nn.functional.scaled_dot_product_attention(new, x, x), new[0].clone()

        return scan(one, x, torch.arange(3.0))[1]

    ig.compile(make_step(model, {"roll_out": (roll_out, {"x": torch.randn(2, 6)})}), tmp_path / "net")
    with load(tmp_path / "net") as session, eager_control_flow(), torch.no_grad():
        x = torch.randn(2, 6)
        model.eval()
        np.testing.assert_allclose(session.call("roll_out", x=x), roll_out(x), atol=1e-5)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (lambda m: {"count": (m.count, {"x": torch.randn(2)})}, r"test_entries.py:\d+.*\n.*'count' changes 'calls'"),
        (lambda m: {"act": (m.act, {"y": torch.randn(2, 6), "z": torch.randn(1)})}, "entries.'act'. has the inputs"),
        (lambda m: {"predict": (m.act, {"x": torch.randn(2, 6)})}, "every artifact uses itself"),
        (lambda m: {"act": m.act}, "must be a function and its example inputs"),
        (lambda m: {"act": (m.act, {"x": 3})}, "input 'x' is a int"),
        (
            lambda m: {"act": (lambda x: 3.0, {"x": torch.randn(2, 6)})},
            "the entry 'act' returns a float, and no tensor",
        ),
        (lambda m: {"act": (lambda x: None, {"x": torch.randn(2, 6)})}, "the entry 'act' returns nothing"),
        (lambda m: {"act": (lambda x: (m(x) for _ in x), {"x": torch.randn(2, 6)})}, "returns a generator, and no"),
        (lambda m: {"act": (lambda x, z: m(x), {"x": torch.randn(2, 6), "z": torch.randn(1)})}, "does not use its inp"),
    ],
)
def test_what_an_entry_cannot_be_is_refused(entries: Any, message: str, tmp_path: Path) -> None:
    model = Tagger()
    with pytest.raises(CaptureError, match=message):
        ig.compile(make_step(model, entries(model)), tmp_path / "net", cache=False)


def test_an_entry_that_draws_outside_of_pytorch_is_refused(tmp_path: Path) -> None:
    model = Tagger()
    noisy = {"act": (lambda x: model(x) + float(np.random.rand()), {"x": torch.randn(2, 6)})}
    with pytest.raises(CaptureError, match=r"test_entries.py:\d+"):
        ig.compile(make_step(model, noisy), tmp_path / "net", cache=False)


def test_a_dimension_of_an_entry_is_one_of_the_step() -> None:
    model = Tagger()
    with pytest.raises(CaptureError, match="the dimension 'N', which no input of the step has"):
        make_step(model, entries_of(model), dynamic={"act.x": {0: "N"}})


def test_an_entry_whose_results_differ_from_run_to_run_is_refused(tmp_path: Path) -> None:
    model = Tagger()
    counts: list[int] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        return model(x) + id(counts) % 7

    with pytest.raises(CaptureError, match="two eager runs of the entry 'act' .* differ in a result"):
        ig.compile(make_step(model, {"act": (counted, {"x": torch.randn(2, 6)})}), tmp_path / "net", cache=False)


def test_a_step_without_draws_has_an_entry_that_samples(tmp_path: Path) -> None:
    model = nn.Linear(6, 3)
    entries = {"sample": (lambda: model(torch.randn(2, 6)), {}), "norm": (lambda: model.weight.norm(), {})}
    ig.compile(make_step(model, entries), tmp_path / "net")
    with load(tmp_path / "net") as session:
        assert (session.call("sample") != session.call("sample")).all()
        session.train_step(x=torch.randn(8, 6), y=torch.zeros(8, dtype=torch.int64))
        assert session.state()[DRAWS] == 2


def test_entries_that_are_left_out_leave_no_input_behind(tmp_path: Path) -> None:
    model = Tagger()
    names = {"x": {0: "B"}, "y": {0: "B"}, "act.x": {0: "B"}}
    step = make_step(model, entries_of(model), dynamic=names)
    ig.compile(step, tmp_path / "net", entry_points=["train_step", "encode"])
    with load(tmp_path / "net") as session:
        assert [spec.name for spec in session.entry("train_step").inputs] == ["x", "y"]
        session.train_step(x=torch.randn(8, 6), y=torch.zeros(8, dtype=torch.int64))
