"""Checkpoints continue a compiled run in eager PyTorch, and an eager run in compiled code."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn, optim
from torch.optim.swa_utils import AveragedModel

import irongrad as ig
from irongrad.pipeline.oracle.rounding_noise import RoundingNoise
from irongrad.pipeline.package import Artifact
from irongrad.runtime.errors import ArtifactError, UserError
from tests.fixtures.step_copies import twin_of

Make = Callable[[list[nn.Parameter]], Any]


class Net(nn.Module):
    """A model with tied weights, BatchNorm, a frozen parameter and parameters without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(10, 6), nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 10)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        self.head.bias.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(tokens)).tanh())


OPTIMIZERS: dict[str, Make] = {
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2),
}


def make_step(make: Make) -> ig.TrainStep:
    torch.manual_seed(0)
    model = Net()
    inputs = {"tokens": torch.randint(0, 10, (12,)), "y": torch.randint(0, 10, (12,))}
    return ig.TrainStep(model, nn.functional.cross_entropy, make(list(model.parameters())), inputs)


@pytest.fixture(scope="module", params=OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Make, Artifact]:
    directory = tmp_path_factory.mktemp("checkpoint") / "artifact"
    return request.param, ig.compile(make_step(request.param), directory, entry_points=("train_step",))


def train_eager(step: ig.TrainStep, steps: int, seed: int | None = None) -> dict[str, torch.Tensor]:
    """Train `step` in place and return the new state dict of its model."""
    dtype = next(step.model.parameters()).dtype
    inputs = {n: t.to(dtype) if t.is_floating_point() else t for n, t in step.inputs.items()}
    with RoundingNoise(seed) if seed is not None else nullcontext():
        for _ in range(steps):
            step.optimizers[0].zero_grad()
            step.loss(step.model(inputs["tokens"]), inputs["y"]).backward()
            step.optimizers[0].step()
    return {n: t.detach().clone() for n, t in step.model.state_dict().items()}


def train_compiled(artifact: Artifact, step: ig.TrainStep, steps: int, checkpoint: Path | None = None) -> Any:
    session = artifact.load(checkpoint=checkpoint)
    for _ in range(steps):
        session.train_step(**{n: t.numpy() for n, t in step.inputs.items()})
    return session


def references(make: Make, steps: int) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    exact = train_eager(twin_of(make_step(make), torch.float64), steps)
    samples = [train_eager(twin_of(make_step(make), torch.float32), steps, seed) for seed in (None, 0, 1, 2)]
    return exact, samples


def test_a_checkpoint_loads_as_a_strict_state_dict(pair: tuple[Make, Artifact], tmp_path: Path) -> None:
    make, artifact = pair
    path = tmp_path / "model.safetensors"
    session = train_compiled(artifact, make_step(make), 2)
    session.save(path)
    model = Net()
    wanted = model.state_dict().keys()
    model.load_state_dict({n: t for n, t in load_file(path).items() if n in wanted}, strict=True)
    for name, tensor in model.state_dict().items():
        spec = next(s for s in session.manifest.state if name in (s.name, *s.aliases))
        np.testing.assert_array_equal(tensor.numpy(), session.state()[spec.name])


def test_eager_training_continues_a_compiled_run(
    pair: tuple[Make, Artifact], tmp_path: Path, agree: Callable[..., None]
) -> None:
    make, artifact = pair
    path = tmp_path / "half.safetensors"
    train_compiled(artifact, make_step(make), 3).save(path)
    step = make_step(make)
    with torch.no_grad():
        step.model.embed.weight.zero_()  # all of it must come from the checkpoint
    loaded = ig.load_checkpoint(path, step.model, step.optimizer)
    assert loaded.keys() == step.model.state_dict().keys()
    found = train_eager(step, 3)
    agree({n: t.numpy() for n, t in found.items()}, *references(make, 6))


def test_compiled_training_continues_an_eager_run(
    pair: tuple[Make, Artifact], tmp_path: Path, agree: Callable[..., None]
) -> None:
    make, artifact = pair
    path = tmp_path / "half.safetensors"
    step = make_step(make)
    train_eager(step, 3)
    ig.save_checkpoint(path, step.model, step.optimizer, artifact.directory)
    state = train_compiled(artifact, step, 3, checkpoint=path).state()
    exact, samples = references(make, 6)
    exact.pop("head.weight")  # another name of embed.weight
    agree(state, exact, samples)
    assert state["irongrad/steps"] >= 4


def test_a_fresh_optimizer_keeps_the_artifacts_state(pair: tuple[Make, Artifact], tmp_path: Path) -> None:
    make, artifact = pair
    step = make_step(make)
    path = tmp_path / "fresh.safetensors"
    ig.save_checkpoint(path, step.model, step.optimizer, artifact.directory)
    found, initial = artifact.load(checkpoint=path).state(), artifact.load().state()
    assert all((found[n] == initial[n]).all() for n in initial)


def test_a_round_trip_through_eager_changes_nothing(pair: tuple[Make, Artifact], tmp_path: Path) -> None:
    make, artifact = pair
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    session = train_compiled(artifact, make_step(make), 2)
    session.save(first)
    step = make_step(make)
    ig.load_checkpoint(first, step.model, step.optimizer)
    ig.save_checkpoint(second, step.model, step.optimizer, artifact.directory)
    before, after = load_file(first), load_file(second)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[n], after[n]) for n in before if n != "irongrad/steps")


def test_another_model_is_refused(pair: tuple[Make, Artifact], tmp_path: Path) -> None:
    make, artifact = pair
    path = tmp_path / "model.safetensors"
    artifact.load().save(path)
    with pytest.raises(ArtifactError, match="checkpoint of another model"):
        ig.load_checkpoint(path, nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(ArtifactError, match="the checkpoint .*nowhere does not exist"):
        ig.load_checkpoint(tmp_path / "nowhere", Net())
    with pytest.raises(ArtifactError, match="a parameter that is none of the model's"):
        ig.load_checkpoint(path, Net(), optim.SGD(Net().parameters()))
    step = make_step(make)
    wide = Net()
    wide.norm = nn.BatchNorm1d(7)
    with pytest.raises(ArtifactError, match=r"norm.weight has shape \(7,\)"):
        ig.save_checkpoint(path, wide, None, artifact.directory)
    with pytest.raises(ArtifactError, match=r"has no embed.weight|has no "):
        ig.save_checkpoint(path, nn.Linear(2, 2), step.optimizer, artifact.directory)


class Phases:
    """A generator and a critic with an average of the generator, BatchNorm, and an optimizer for each."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.generator = nn.Sequential(nn.Linear(3, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
        self.critic = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
        self.target = nn.Linear(2, 1)
        self.of_generator = optim.Adam(self.generator.parameters(), lr=0.01)
        self.of_critic = optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
        self.average = AveragedModel(self.generator, avg_fn=lambda old, new, _: 0.9 * old + 0.1 * new)

    def critic_loss(self, out: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        fake = self.generator(z).detach()
        return self.critic(fake).mean() - out.mean() + (self.target(fake) - self.critic(fake)).square().mean()

    def generator_loss(self, out: torch.Tensor) -> torch.Tensor:
        return -self.critic(out).mean() + out.square().mean()

    def follow(self, model: nn.Module) -> None:
        self.target.weight.mul_(0.5).add_(self.critic[2].weight[:, :2], alpha=0.5)

    def steps(self, period: int = 1) -> ig.Steps:
        critic = ig.TrainStep(
            self.critic,
            self.critic_loss,
            self.of_critic,
            {"x": X, "z": Z},
            model_inputs=["x"],
            modules={"target": self.target},
            after_step=ig.every(period, self.follow),
        )
        generator = ig.TrainStep(
            self.generator, self.generator_loss, self.of_generator, {"z": Z}, after_step=ig.every(2, self.average)
        )
        return ig.Steps({"critic": critic, "generator": generator})

    def train(self, rounds: range) -> None:
        for number in rounds:
            for optimizer, loss in (
                (self.of_critic, lambda: self.critic_loss(self.critic(X), Z)),
                (self.of_generator, lambda: self.generator_loss(self.generator(Z))),
            ):
                optimizer.zero_grad()
                loss().backward()
                optimizer.step()
                if optimizer is self.of_critic:
                    with torch.no_grad():
                        self.follow(self.critic)
            if (number + 1) % 2 == 0:
                self.average.update_parameters(self.generator)

    def state(self) -> dict[str, torch.Tensor]:
        parts = {"critic": self.critic, "generator": self.generator, "target": self.target, "average": self.average}
        return {f"{n}.{k}": t for n, module in parts.items() for k, t in module.state_dict().items()}


X, Z = torch.randn(8, 2), torch.randn(8, 3)


def assert_same(found: Phases, wanted: Phases) -> None:
    for name, tensor in wanted.state().items():
        torch.testing.assert_close(found.state()[name], tensor, atol=2e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def phases(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return ig.compile(Phases().steps(), tmp_path_factory.mktemp("phases") / "artifact", entry_points=("train_step",))


def train_phases(artifact: Artifact, rounds: int, checkpoint: Path | None = None) -> Any:
    session = artifact.load(checkpoint=checkpoint)
    for _ in range(rounds):
        session.train_step(step="critic", x=X, z=Z)
        session.train_step(step="generator", z=Z)
    return session


def test_a_checkpoint_of_several_steps_goes_back_into_the_users_objects(phases: Artifact, tmp_path: Path) -> None:
    wanted, found = Phases(), Phases(seed=1)
    wanted.train(range(6))
    train_phases(phases, 3).save(tmp_path / "half")
    loaded = ig.load_checkpoint(tmp_path / "half", found.steps())
    assert loaded["irongrad/steps/critic"] == 3
    found.train(range(3, 6))
    assert_same(found, wanted)


def test_several_steps_go_on_compiled_after_an_eager_run(phases: Artifact, tmp_path: Path) -> None:
    eager, wanted = Phases(), Phases()
    eager.train(range(3))
    wanted.train(range(6))
    ig.save_checkpoint(tmp_path / "half", eager.steps(), artifact=phases.directory)
    train_phases(phases, 3, tmp_path / "half").save(tmp_path / "whole")
    found = Phases(seed=1)
    ig.load_checkpoint(tmp_path / "whole", found.steps())
    assert_same(found, wanted)


def test_a_checkpoint_that_does_not_fit_changes_nothing(phases: Artifact, tmp_path: Path) -> None:
    path = tmp_path / "phases"
    train_phases(phases, 1).save(path)
    found = Phases()
    found.average = AveragedModel(nn.Linear(3, 2))
    steps = ig.Steps({"critic": found.steps().steps["critic"], "other": Phases().steps().steps["generator"]})
    before = {n: t.clone() for n, t in found.state().items()}
    with pytest.raises(ArtifactError, match="has no other.0.weight"):
        ig.load_checkpoint(path, steps)
    wide = Phases()
    wide.target = nn.Linear(4, 1)
    with pytest.raises(ArtifactError, match=r"target.weight has shape \(1, 2\), and in the eager model \(1, 4\)"):
        ig.load_checkpoint(path, wide.steps())
    with pytest.raises(UserError, match="a step has its optimizers"):
        ig.load_checkpoint(path, found.steps(), found.of_critic)
    with pytest.raises(UserError, match="and this is a list"):
        ig.load_checkpoint(path, [found.critic])  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the optimizer of a checkpoint is a str"):
        ig.save_checkpoint(path, found.critic, "net", phases.directory)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a step has its optimizers.*artifact= by name"):
        ig.save_checkpoint(path, found.steps(), phases.directory)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="give the artifact's directory"):
        ig.save_checkpoint(path, found.steps())
    assert all(torch.equal(t, before[n]) for n, t in found.state().items())


def test_a_period_needs_a_count_that_no_optimizer_may_have(phases: Artifact, tmp_path: Path) -> None:
    path, eager = tmp_path / "phases", Phases()
    with pytest.raises(UserError, match=r"updates=\{'critic': 100\}"):
        ig.save_checkpoint(path, eager.steps(period=2), artifact=phases.directory)
    with pytest.raises(UserError, match="a dictionary with one for each step"):
        ig.save_checkpoint(path, eager.steps(), artifact=phases.directory, updates={"critic": 3})
    ig.save_checkpoint(path, eager.steps(period=2), artifact=phases.directory, updates={"critic": 3, "generator": 4})
    state = phases.load(checkpoint=path).state()
    assert (state["irongrad/steps/critic"], state["irongrad/steps/generator"]) == (3, 4)


def test_a_checkpoint_of_the_trainable_state_leaves_frozen_tensors_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    optimizer = optim.SGD(model[1].parameters(), lr=0.1, momentum=0.9)
    step = ig.TrainStep(model, lambda o: o.square().mean(), optimizer, {"x": torch.randn(3, 4)})
    artifact = ig.compile(step, tmp_path / "artifact", entry_points=("train_step",))
    session = artifact.load()
    session.train_step(x=torch.randn(3, 4))
    session.save(tmp_path / "part", trainable=True)
    with torch.no_grad():
        model[1].weight.zero_()
    frozen = model[0].weight.clone()
    ig.load_checkpoint(tmp_path / "part", step)
    np.testing.assert_array_equal(model[1].weight.detach(), session.state()["1.weight"])
    assert torch.equal(model[0].weight, frozen)
