"""Federations over Flower's own classes, against eager PyTorch in float64; the network is in `test_superlink.py`."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime.errors import UserError
from irongrad.runtime.safetensors_file import read_arrays
from irongrad.training import Arrays

ROOT = Path(__file__).parents[3]
PROGRAM = Path(__file__).parent / "federation.py"
BATCH, MU, RATE = 8, 0.5, 0.2
SAMPLES = {1: 24, 2: 16, 3: 17}
# Node 3 comes after the first round, and node 2 is gone after the second.
ROUNDS = [[1, 2], [1, 2, 3], [1, 3]]
Task = Callable[..., Any]


class Net(nn.Module):
    """An adapter over a frozen layer, with BatchNorm: it has parameters, buffers and state of every kind."""

    def __init__(self, *, frozen: bool = False) -> None:
        super().__init__()
        self.base = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.head = nn.Linear(12, 4)
        self.base.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(torch.tanh(self.base(x))))


class TiedNet(Net):
    """Two of its layers share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
        self.outer.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.outer(self.inner(x)))


def make_step(*, model: nn.Module | None = None, loss_scale: float | None = None) -> ig.TrainStep:
    torch.manual_seed(0)
    model = model or Net()
    return ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE, momentum=0.9),
        inputs={"x": torch.randn(BATCH, 6), "y": torch.randint(0, 4, (BATCH,))},
        clip_grad_norm=0.4,
        loss_scale=loss_scale,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flower")


@pytest.fixture(scope="module")
def artifact(folder: Path) -> Path:
    ig.compile(make_step(), folder / "net")
    return folder / "net"


def initial_of(artifact: Path) -> dict[str, np.ndarray]:
    from irongrad.runtime.initial_state import initial_state

    whole = initial_state(artifact)
    return {n: a for n, a in whole.items() if not n.startswith(("optimizer/", "irongrad/")) and a.dtype == np.float32}


@pytest.fixture(scope="module")
def data() -> dict[int, dict[str, np.ndarray]]:
    """The samples of each node, of a distribution of its own."""
    made = {}
    for node, samples in SAMPLES.items():
        rng = np.random.default_rng(node)
        x = rng.standard_normal((samples, 6)).astype(np.float32) + np.float32(node - 2)
        made[node] = {"x": x, "y": rng.integers(0, 4, samples)}
    return made


@pytest.fixture(scope="module")
def task(flower_python: Path, artifact: Path, data: dict[int, dict[str, np.ndarray]], folder: Path) -> Task:
    """`task(name, **plan)`: run a task of `federation.py` where Flower is, and return what it found."""
    np.savez(folder / "data.npz", **{f"{n}{node}": a for node, arrays in data.items() for n, a in arrays.items()})
    np.savez(folder / "initial.npz", **initial_of(artifact))

    def run(name: str, **plan: Any) -> Any:
        paths = {"artifact": artifact, "data": folder / "data.npz", "initial": folder / "initial.npz"}
        whole = {n: str(p) for n, p in paths.items()} | {"checkpoint": str(folder / "end.safetensors"), **plan}
        (folder / "plan.json").write_text(json.dumps(whole))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLWR_TELEMETRY_ENABLED": "0"}
        done = subprocess.run(
            [flower_python, PROGRAM, name, folder / "plan.json"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


class EagerNode:
    """A client in eager float64, which keeps its optimizer from round to round."""

    def __init__(self, arrays: dict[str, np.ndarray], rate: float) -> None:
        self.step = make_step()
        self.model = copy.deepcopy(self.step.model).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9)
        self.data, self.made = Arrays(arrays, BATCH), 0

    def round(self, state: dict[str, torch.Tensor], steps: int | None, mu: float) -> tuple[dict[str, Any], int]:
        """Train for an epoch or so many steps; return the tensors that a server averages, and the samples."""
        self.model.load_state_dict(state, strict=False)
        anchor = [p.detach().clone() for p in self.model.parameters()]
        count = self.data.steps if steps is None else steps
        for _ in range(count):
            epoch, batch = divmod(self.made, self.data.steps)
            self._train(next(self.data.epoch(epoch, batch))[0], anchor, mu)
            self.made += 1
        found = self.model.state_dict()
        return {n: found[n].clone() for n in state}, count * BATCH

    def _train(self, batch: Any, anchor: list[torch.Tensor], mu: float) -> None:
        x, y = torch.from_numpy(batch["x"]).double(), torch.from_numpy(batch["y"])
        pull = sum(((p - a) ** 2).sum() for p, a in zip(self.model.parameters(), anchor, strict=True))
        loss = nn.functional.cross_entropy(self.model(x), y) + mu / 2 * pull
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.4)
        self.optimizer.step()


def eager_rounds(
    data: dict[int, dict[str, np.ndarray]],
    rounds: list[list[int]],
    strategy: str,
    steps: int | None = None,
    rate: float = RATE,
) -> dict[str, torch.Tensor]:
    """The parameters and buffers after the rounds; DiLoCo's outer optimizer is torch's own."""
    nodes = {node: EagerNode(arrays, rate) for node, arrays in data.items()}
    model = copy.deepcopy(make_step().model).double()
    state = {n: t for n, t in model.state_dict().items() if t.is_floating_point()}
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for members in rounds:
        results = [nodes[node].round(state, steps, MU if strategy == "fedprox" else 0.0) for node in members]
        total = sum(samples for _, samples in results)
        mean = {n: sum(found[n] * (samples / total) for found, samples in results) for n in state}
        if strategy == "diloco":
            for name, parameter in model.named_parameters():
                parameter.grad = state[name] - mean[name]
            outer.step()
            mean |= {n: p.detach().clone() for n, p in model.named_parameters()}
        state = mean
    return state


@pytest.mark.parametrize("strategy", ["fedavg", pytest.param("fedprox", marks=pytest.mark.slow), "diloco"])
def test_rounds_equal_eager_pytorchs(strategy: str, task: Task, data: dict, folder: Path) -> None:
    """Nodes join and leave, have different numbers of samples, and keep the momentum of their optimizers."""
    found = task("run", strategy=strategy, mu=MU, rounds=ROUNDS)
    assert found == {"errors": [], "torch": False}
    expected = eager_rounds(data, ROUNDS, strategy)
    made, _ = read_arrays(folder / "end.safetensors")
    for name, tensor in expected.items():
        np.testing.assert_allclose(made[name], tensor.numpy(), rtol=2e-5, atol=2e-6, err_msg=name)


def test_the_proximal_term_is_scaled_as_the_loss_is(task: Task, data: dict, folder: Path) -> None:
    ig.compile(make_step(loss_scale=1024.0), folder / "scaled")
    task("run", artifact=str(folder / "scaled"), strategy="fedprox", mu=MU, rounds=ROUNDS)
    made, _ = read_arrays(folder / "end.safetensors")
    expected = eager_rounds(data, ROUNDS, "fedprox")
    np.testing.assert_allclose(made["head.weight"], expected["head.weight"].numpy(), rtol=2e-5, atol=2e-6)


def test_the_strategies_differ_by_more_than_the_tolerance(data: dict) -> None:
    states = [eager_rounds(data, ROUNDS, name)["head.weight"] for name in ("fedavg", "fedprox", "diloco")]
    gaps = [float((a - b).abs().max()) for a, b in zip(states, states[1:] + states[:1], strict=True)]
    assert min(gaps) > 1e-3


def test_a_round_of_steps_goes_on_where_the_last_ended(task: Task, data: dict, folder: Path) -> None:
    task("run", strategy="fedavg", rounds=ROUNDS, steps=2)
    made, _ = read_arrays(folder / "end.safetensors")
    expected = eager_rounds(data, ROUNDS, "fedavg", steps=2)
    np.testing.assert_allclose(made["head.weight"], expected["head.weight"].numpy(), rtol=2e-5, atol=2e-6)


def test_the_servers_hyperparameters_reach_the_clients(task: Task, data: dict, folder: Path) -> None:
    task("run", strategy="fedavg", rounds=ROUNDS, hypers={"lr": 0.05})
    made, _ = read_arrays(folder / "end.safetensors")
    expected = eager_rounds(data, ROUNDS, "fedavg", rate=0.05)
    np.testing.assert_allclose(made["head.weight"], expected["head.weight"].numpy(), rtol=2e-5, atol=2e-6)


def test_a_second_server_goes_on_with_the_momentum_of_the_first(task: Task, data: dict, folder: Path) -> None:
    task("run", strategy="diloco", rounds=ROUNDS, first=2)
    made, _ = read_arrays(folder / "end.safetensors")
    expected = eager_rounds(data, ROUNDS, "diloco")
    np.testing.assert_allclose(made["head.weight"], expected["head.weight"].numpy(), rtol=2e-5, atol=2e-6)


def test_names_are_pytorchs_and_the_rest_stays_with_the_node(task: Task) -> None:
    found = task("names")
    state = Net().state_dict()
    assert set(found["sent"]) == {n for n, t in state.items() if t.is_floating_point()}
    momenta = {f"optimizer/momentum_buffer/{n}" for n, _ in Net().named_parameters()}
    assert momenta | {"norm.num_batches_tracked", "irongrad/steps"} <= set(found["kept"])
    assert not set(found["sent"]) & set(found["kept"])
    assert found["metrics"]["num-examples"] == 24
    assert 0 < found["metrics"]["loss"] < 5


def test_of_a_frozen_base_nothing_is_sent(task: Task, folder: Path) -> None:
    ig.compile(make_step(model=Net(frozen=True)), folder / "frozen")
    sent = {n: a for n, a in initial_of(folder / "frozen").items() if not n.startswith("base.")}
    np.savez(folder / "frozen.npz", **sent)
    found = task("names", artifact=str(folder / "frozen"), initial=str(folder / "frozen.npz"))
    assert set(found["sent"]) == set(sent)
    assert not [n for n in found["kept"] if "base." in n]


def test_a_tied_weight_is_sent_once(task: Task, folder: Path) -> None:
    ig.compile(make_step(model=TiedNet()), folder / "tied")
    np.savez(folder / "tied.npz", **initial_of(folder / "tied"))
    found = task("names", artifact=str(folder / "tied"), initial=str(folder / "tied.npz"))
    assert "inner.weight" in found["sent"]
    assert "outer.weight" not in found["sent"]


def test_an_evaluation_is_that_of_the_servers_parameters(task: Task, artifact: Path, data: dict) -> None:
    found = task("evaluated")
    model = copy.deepcopy(make_step().model).double().eval()
    x, y = torch.from_numpy(data[1]["x"]).double(), torch.from_numpy(data[1]["y"])
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-5)
    assert found["num-examples"] == 24


def test_what_must_not_be_averaged_is_left_out(task: Task, data: dict, folder: Path) -> None:
    assert task("left_out") == {"errors": []}
    made, _ = read_arrays(folder / "end.safetensors")
    expected = eager_rounds(data, [[1]], "fedavg")
    np.testing.assert_allclose(made["head.weight"], expected["head.weight"].numpy(), rtol=2e-5, atol=2e-6)


EXPECTED = {
    "names": "ArtifactError: what the server sent does not fit this step (another model or optimizer?): "
    "net.base.weight is unknown; base.weight is missing; ",
    "shapes": "base.weight is float32[3, 3], the step has float32[12, 6]",
    "NaN sent": "NonFiniteError: what the server sent is NaN or infinite in base.weight",
    "NaN update": "NonFiniteError: ",
    "records": "UserError: what the server sent has 2 records of arrays; it must have one",
    "mu": "UserError: the server's proximal-mu is -1.0: it must be a number of 0 or more",
    "no gradients": "UserError: the server asks for FedProx, and the artifact was compiled without grad_step",
    "no train_step": "GuardError: the artifact was compiled without train_step, so no client can train it",
    "no length": "UserError: the client's data has no length",
    "not held out": "UserError: this client has no held-out data: give held_out",
    "empty": "UserError: this client's held-out data has no batch",
    "no epochs": "UserError: epochs is 0: it must be a whole number of 1 or more",
    "both": "UserError: a round has a number of epochs or a number of steps: give one of them",
    "server's artifact": "GuardError: the artifact was compiled without train_step",
    "server's hyper": "GuardError: train_step takes no argument 'lrr'",
    "server's number": "GuardError: train_step: lr must be a number, not 'fast'",
    "all fail": "UserError: of 2 clients none sent parameters in this round: client ",
}


def test_bad_input_gives_one_clear_error(task: Task, folder: Path) -> None:
    state = ["export_state", "import_state"]
    ig.compile(make_step(), folder / "trains", entry_points=["train_step", *state])
    ig.compile(make_step(), folder / "predicts", entry_points=["predict", *state])
    found = task("refusals", trains=str(folder / "trains"), predicts=str(folder / "predicts"))
    assert found.keys() == EXPECTED.keys()
    for name, message in EXPECTED.items():
        assert message in found[name], name


def test_without_flower_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("irongrad.integrations")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(UserError, match=r"Flower is not installed: pip install 'irongrad\[flower\]'"):
        from irongrad.integrations.flower import client  # noqa: F401
