"""Several steps over one state: each trains as in the user's own loop, and sees what the others have changed."""

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
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import irongrad as ig
from irongrad.cli.main import cli
from irongrad.runtime import load
from irongrad.runtime.errors import ArtifactError, CaptureError, UserError

REAL, NOISE = torch.randn(16, 2, generator=torch.Generator().manual_seed(1)), torch.randn(16, 3)


class Pair(nn.Module):
    """The critic's view: its verdicts on real and on generated samples."""

    def __init__(self, critic: nn.Module, generator: nn.Module) -> None:
        super().__init__()
        self.critic = critic
        self._generator = [generator]  # in a list, so that its parameters are not this module's

    def forward(self, real: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.critic(real), self.critic(self._generator[0](z).detach())


def critic_loss(out: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    real, fake = out
    return bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))


class Gan:
    """A generator and a critic, each with its optimizer, and the two phases of their training."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator = nn.Sequential(nn.Linear(3, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Dropout(0.0), nn.Linear(8, 1))
        self.of_generator = torch.optim.Adam(self.generator.parameters(), lr=1e-2, betas=(0.5, 0.9))
        self.of_critic = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)

    def generator_loss(self, fake: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        verdict = self.critic(fake)
        return bce(verdict, torch.ones_like(verdict)), {"score": verdict.mean()}

    def clip(self, model: nn.Module, limit: float = 0.3) -> None:
        for parameter in self.critic.parameters():
            parameter.clamp_(-limit, limit)

    def steps(self, **changed: Any) -> ig.Steps:
        pair = Pair(self.critic, self.generator)
        critic = ig.TrainStep(
            pair, critic_loss, self.of_critic, {"real": REAL, "z": NOISE}, after_step=self.clip, **changed
        )
        entries = {"sample": (self.generator, {"z": NOISE[:4]})}
        generator = ig.TrainStep(
            self.generator, self.generator_loss, self.of_generator, {"z": NOISE}, entries=entries, **changed
        )
        return ig.Steps({"critic": critic, "generator": generator})

    def train_critic(self, real: torch.Tensor, z: torch.Tensor) -> float:
        self.of_critic.zero_grad()
        loss = critic_loss((self.critic(real), self.critic(self.generator(z).detach())))
        loss.backward()
        self.of_critic.step()
        with torch.no_grad():
            self.clip(self.critic)
        return loss.item()

    def train_generator(self, z: torch.Tensor) -> tuple[float, float]:
        self.of_generator.zero_grad()
        loss, values = self.generator_loss(self.generator(z))
        loss.backward()
        self.of_generator.step()
        return loss.item(), values["score"].item()


def make_gan() -> ig.Steps:
    """What `irongrad compile` compiles."""
    return Gan().steps()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("steps") / "gan"
    ig.compile(make_gan(), directory)
    return directory


def assert_same_state(state: dict[str, np.ndarray], module: nn.Module, prefix: str) -> None:
    for name, tensor in module.state_dict().items():
        np.testing.assert_allclose(state[prefix + name], tensor, atol=2e-6, err_msg=name)


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"real": torch.randn(16, 2, generator=generator), "z": torch.randn(16, 3, generator=generator)}


def test_phases_train_as_in_the_users_loop(compiled: Path, tmp_path: Path) -> None:
    gan = Gan()
    with load(compiled) as session:
        for round_ in range(4):
            for number in range(2):
                data = batch(10 * round_ + number)
                assert session.train_step(step="critic", **data) == pytest.approx(gan.train_critic(**data), abs=1e-5)
            z = batch(round_)["z"]
            gan.of_generator.param_groups[0]["lr"] = 0.01 / (round_ + 1)
            loss, values = session.train_step(step="generator", z=z, lr=0.01 / (round_ + 1))
            assert (loss, values["score"]) == pytest.approx(gan.train_generator(z), abs=1e-5)
        state = session.state()
        assert_same_state(state, gan.critic, "critic.critic.")
        assert_same_state(state, gan.generator, "generator.")
        assert (state["irongrad/steps/critic"], state["irongrad/steps/generator"]) == (8, 4)
        session.save(tmp_path / "gan.safetensors")
    with load(compiled, checkpoint=tmp_path / "gan.safetensors") as session:  # one checkpoint holds all
        data = batch(99)
        assert session.step("critic").train_step(**data) == pytest.approx(gan.train_critic(**data), abs=1e-5)
        gan.generator.eval()
        np.testing.assert_allclose(session.call("sample", z=NOISE[:4]), gan.generator(NOISE[:4]).detach(), atol=1e-5)


def test_the_other_entry_points_of_a_step(compiled: Path) -> None:
    gan, z = Gan(), batch(3)["z"]
    with load(compiled) as session:
        generator = session.step("generator")
        session.grad_step(step="generator", z=z)
        sums, count = generator.gradients()
        assert count == 1
        assert set(sums) == {f"generator.{n}" for n, _ in gan.generator.named_parameters()}
        assert session.apply_step(step="generator") == 1
        gan.train_generator(z)
        losses, _ = session.train_steps(step="generator", z=np.stack([z.numpy()] * 2))
        assert losses == pytest.approx([gan.train_generator(z)[0] for _ in range(2)], abs=1e-5)
        assert_same_state(session.state(), gan.generator, "generator.")
        session.reset()
        assert session.eval_step(step="critic", **batch(1)) == pytest.approx(
            session.call("critic.eval_step", **batch(1)).item()
        )
        with pytest.raises(UserError, match="give step=, one of critic, generator"):
            session.train_step(z=z)
        for name in ("actor", ["critic"], None):
            with pytest.raises(UserError, match="has no step"):
                session.train_step(step=name, z=z)
        with pytest.raises(UserError, match="this is a view of the step 'generator'"):
            generator.step("critic")


def test_several_steps_on_the_command_line(compiled: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> Any:
        outcome = CliRunner().invoke(cli, [*arguments, "--json"])
        assert outcome.exit_code == 0, outcome.output
        return json.loads(outcome.stdout)

    listed = run("inspect", str(compiled))
    assert {"critic.train_step", "generator.train_step", "sample"} <= listed["commands"].keys()
    assert run("verify", str(compiled))["passed"]
    np.save(tmp_path / "z.npy", NOISE[:4].numpy())
    run("run", str(compiled), "sample", "--input", f"z={tmp_path / 'z.npy'}")
    np.savez(tmp_path / "z.npz", z=np.concatenate([NOISE] * 3))
    trained = run("train", str(compiled), "--data", str(tmp_path / "z.npz"), "--step", "generator")
    assert len(trained["epochs"]) == 1
    refused = CliRunner().invoke(cli, ["train", str(compiled), "--data", str(tmp_path / "z.npz")])
    assert "give --step" in str(refused.exception)
    plan = run("golden", str(compiled), "-o", str(tmp_path / "golden"))
    assert len(plan["checks"]) > 20
    done = subprocess.run(
        ["ctest", "--test-dir", str(tmp_path / "golden")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout


def test_steps_are_checked_and_rebuilt(compiled: Path) -> None:
    source = f"{__file__}:make_gan"
    checked = CliRunner().invoke(cli, ["check", source, "--json"])
    assert [part["compiles"] for part in json.loads(checked.stdout)["steps"].values()] == [True, True]
    assert CliRunner().invoke(cli, ["rebuild", str(compiled)]).exit_code == 0


class Agent(nn.Module):
    """Two heads over one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.policy = nn.Linear(8, 2)
        self.value = nn.Linear(8, 1)
        self.noise = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.body(x))
        return {"policy": self.policy(self.noise(hidden)), "value": self.value(hidden)}


def test_steps_of_one_model_share_an_optimizer_and_the_random_numbers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    agent, x = Agent(), torch.randn(6, 4)
    groups = [list(agent.body.parameters()), list(agent.policy.parameters()), list(agent.value.parameters())]
    optimizer = torch.optim.Adam([{"params": g} for g in groups], lr=1e-2)
    steps = ig.Steps(
        {
            "policy": ig.TrainStep(agent, lambda out: out["policy"].square().mean(), optimizer, {"x": x}, seed=3),
            "value": ig.TrainStep(agent, lambda out: out["value"].square().mean(), optimizer, {"x": x}, seed=3),
        }
    )
    ig.compile(steps, tmp_path / "agent")
    with load(tmp_path / "agent") as session:
        assert "body.weight" in session.state()
        assert session.train_step(step="policy", x=x) != session.train_step(step="policy", x=x)
        session.train_step(step="value", x=x)
        state = session.state()
        counts = [state[f"optimizer/step/{n}.weight"] for n in ("body", "policy", "value")]
        assert counts == [3, 2, 1]


def two(first: Any, second: Any) -> ig.Steps:
    return ig.Steps({"one": first, "two": second})


def test_what_cannot_be_several_steps_is_refused(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, torch.mean, sgd, {"x": x})
    other = ig.TrainStep(model, torch.mean, torch.optim.Adam(model.parameters()), {"x": x})
    with pytest.raises(CaptureError, match=r"(?s)'one' and 'two' update a parameter of shape.*test_steps.py:\d+"):
        two(step, other)
    with pytest.raises(CaptureError, match="give them one seed"):
        two(step, ig.TrainStep(model, torch.mean, sgd, {"x": x}, seed=1))
    with pytest.raises(CaptureError, match="the name 'train_step'"):
        ig.Steps({"train_step": step})
    with pytest.raises(CaptureError, match="is a Linear; it must be a TrainStep"):
        two(step, model)
    dampened = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    with pytest.raises(CaptureError, match="share a SGD, which counts its updates outside"):
        two(*(ig.TrainStep(model, torch.mean, dampened, {"x": x}) for _ in range(2)))
    twin = nn.Linear(4, 2)
    twin.weight.data = model.weight.data
    shared = ig.TrainStep(twin, torch.mean, torch.optim.SGD(twin.parameters(), lr=0.1), {"x": x})
    with pytest.raises(CaptureError, match="'two.weight' and 'weight' share memory"):
        ig.compile(two(step, shared), tmp_path / "net")
    with pytest.raises(UserError, match="max_memory plans one step"):
        ig.compile(two(step, step), tmp_path / "net", max_memory="50%")


def test_several_steps_can_be_compiled_to_an_entry_alone(tmp_path: Path) -> None:
    ig.compile(make_gan(), tmp_path / "gan", entry_points=["sample"])
    with load(tmp_path / "gan") as session:
        assert session.call("sample", z=NOISE[:4]).shape == (4, 2)
        assert not [s.name for s in session.manifest.state if s.name.startswith("optimizer/")]


class Twin(nn.Module):
    """One of two critics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat(parts, -1)).squeeze(-1)


class TwoCritics:
    """An actor and two critics under one optimizer; steps have the names of parameters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.actor, self.one, self.two = nn.Linear(2, 1), Twin(), Twin()
        self.of_critics = torch.optim.Adam([*self.one.parameters(), *self.two.parameters()], lr=1e-2)
        self.of_actor = torch.optim.Adam(self.actor.parameters(), lr=1e-2)

    def critic_loss(self, value: torch.Tensor, obs: torch.Tensor, action: torch.Tensor, y: torch.Tensor) -> Any:
        return (value - y).square().mean() + (self.two(obs, action) - y).square().mean()

    def actor_loss(self, action: torch.Tensor, obs: torch.Tensor) -> torch.Tensor:
        return -torch.minimum(self.one(obs, action), self.two(obs, action)).mean()

    def steps(self) -> ig.Steps:
        batch = {"obs": torch.randn(6, 2), "action": torch.randn(6, 1), "y": torch.randn(6)}
        critic = ig.TrainStep(
            self.one,
            self.critic_loss,
            self.of_critics,
            batch,
            model_inputs=["obs", "action"],
            loss_inputs=list(batch),
            modules={"two": self.two},
        )
        obs = {"obs": batch["obs"]}
        actor = ig.TrainStep(self.actor, self.actor_loss, self.of_actor, obs, loss_inputs=["obs"])
        return ig.Steps({"weight": critic, "layers": actor})


def test_two_critics_under_one_optimizer_and_names_of_parts(tmp_path: Path) -> None:
    agent = TwoCritics()
    ig.compile(TwoCritics().steps(), tmp_path / "net")
    with load(tmp_path / "net") as session:
        for _ in range(4):
            obs, action, y = torch.randn(6, 2), torch.randn(6, 1), torch.randn(6)
            agent.of_critics.zero_grad()
            loss = agent.critic_loss(agent.one(obs, action), obs, action, y)
            loss.backward()
            agent.of_critics.step()
            assert session.train_step(step="weight", obs=obs, action=action, y=y) == pytest.approx(
                loss.item(), abs=1e-5
            )
            agent.of_actor.zero_grad()
            agent.actor_loss(agent.actor(obs), obs).backward()
            agent.of_actor.step()
            session.train_step(step="layers", obs=obs)
        state = session.state()
        assert_same_state(state, agent.one, "weight.")
        assert_same_state(state, agent.two, "weight.two.")
        assert_same_state(state, agent.actor, "layers.")


def test_each_of_several_steps_carries_values_of_its_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, h = nn.GRU(3, 4), torch.zeros(1, 2, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(out: tuple[torch.Tensor, torch.Tensor]) -> Any:
        return out[0].square().mean(), {"hx": out[1]}

    one, other = (
        ig.TrainStep(model, loss, optimizer, {"input": torch.randn(n, 2, 3)}, carry={"hx": h}) for n in (3, 5)
    )
    ig.compile(two(one, other), tmp_path / "net", entry_points=["train_step", "reset_carry"])
    with load(tmp_path / "net") as session:
        session.train_step(step="one", input=torch.randn(3, 2, 3))
        state = session.state()
        assert state["carry/hx/one"].any()
        assert not state["carry/hx/two"].any()
        session.reset_carry()
        assert not session.state()["carry/hx/one"].any()


def make_scaled(scaler: torch.amp.GradScaler | None = None) -> ig.Steps:
    torch.manual_seed(0)
    one, other, x = nn.Linear(4, 2), nn.Linear(4, 2), torch.randn(3, 4)
    return two(
        *(
            ig.TrainStep(
                model,
                lambda o: o.square().mean(),
                torch.optim.SGD(model.parameters(), lr=0.1),
                {"x": x},
                precision="f16",
                loss_scale=scaler or torch.amp.GradScaler("cpu", init_scale=64.0),
            )
            for model in (one, other)
        )
    )


def test_each_of_several_steps_has_its_own_loss_scale(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="'one' and 'two' share a GradScaler"):
        make_scaled(torch.amp.GradScaler("cpu"))
    ig.compile(make_scaled(), tmp_path / "net", entry_points=["train_step"])
    with load(tmp_path / "net") as session:
        for _ in range(3):
            session.train_step(step="one", x=torch.randn(3, 4))
        state = session.state()
        assert (state["scaler/growth_tracker/one"], state["scaler/growth_tracker/two"]) == (3, 0)
        session.save(tmp_path / "three")
    scaled = make_scaled()
    ig.load_checkpoint(tmp_path / "three", scaled)
    assert [step.scaler.state_dict()["_growth_tracker"] for step in scaled.steps.values()] == [3, 0]  # type: ignore[union-attr]


def test_the_entry_points_of_each_step_are_chosen_by_name(tmp_path: Path) -> None:
    ig.compile(Gan().steps(), tmp_path / "net", entry_points=["sample", "critic.eval_step"])
    with load(tmp_path / "net") as session:
        own = {e.symbol for e in session.manifest.all_entry_points}
        assert own == {"export_state", "import_state", "sample", "critic.eval_step"}
        session.eval_step(step="critic", **batch(1))


def test_the_state_of_one_module_of_several(compiled: Path) -> None:
    gan = Gan()
    nn.init.ones_(gan.generator[3].weight)
    with load(compiled) as session:
        before = session.state()
        with pytest.raises(ArtifactError, match="names of one module, which begin with 'generator' here"):
            session.load_state(gan.generator.state_dict())
        session.load_state({f"generator.{n}": t for n, t in gan.generator.named_parameters()})
        changed = {n for n, value in session.state().items() if (before[n] != value).any()}
        assert changed == {"generator.3.weight"}
        with pytest.raises(UserError, match=r"critic.export_gradients, generator.export_gradients; in Python, session"):
            session.gradients()
        with pytest.raises(UserError, match="carries nothing from call to call"):
            session.reset_carry()


def test_an_input_that_is_called_step_is_refused() -> None:
    model, x = nn.Linear(4, 2), torch.randn(3, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ig.TrainStep(model, lambda out, step: out.mean() * step, optimizer, {"x": x, "step": torch.tensor(1.0)})
    with pytest.raises(CaptureError, match="the step 'one' has an input 'step'"):
        two(step, step)
