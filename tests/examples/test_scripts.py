"""Each of the scripts trains through its artifact as through eager: the same numbers, entries and state."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irongrad as ig
from tests.examples.eager_session import EagerSession, EagerSteps

FOLDER = Path(__file__).parents[2] / "examples" / "scripts"
LINES = 60


@dataclass
class Recorder:
    """Passes calls on to a session, and keeps what each returns.

    Attributes:
        found: the name of each call and what it returned, in order.
    """

    session: Any
    found: list[tuple[str, Any]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = getattr(self.session, name)(*args, **kwargs)
            self.found.append((f"{name}{args}", result))
            return result

        return call


@dataclass(frozen=True)
class Script:
    """The sizes of a script in the tests.

    Attributes:
        sizes: arguments of `make_step` and of `train`.
        made: arguments of `make_step` alone.
        trained: arguments of `train` alone.
        entries: the artifact's entry points beside `train_step`.
    """

    sizes: dict[str, int]
    made: dict[str, int]
    trained: dict[str, int]
    entries: tuple[str, ...]


SCRIPTS = {
    "vae": Script({"batch": 300}, {"width": 16, "latent": 3}, {"epochs": 1}, ("encode", "decode", "sample")),
    "dqn": Script({"batch": 16}, {"width": 8, "every": 4}, {"steps": 60, "starts": 20}, ("act",)),
    "ppo": Script({"batch": 16, "envs": 2}, {"width": 8}, {"updates": 2, "length": 16}, ("act",)),
    "byol": Script({"batch": 32}, {"width": 16, "dim": 8}, {"steps": 6}, ("embed",)),
    "ddpm": Script({"batch": 16}, {"width": 16, "timesteps": 10}, {"steps": 6}, ("sample",)),
    "nanogpt": Script({"batch": 4, "block": 16}, {"n_embd": 16, "n_layer": 1}, {"steps": 6}, ("generate",)),
    "translation": Script({"batch": 64}, {"width": 64}, {"steps": 6}, ("greedy_decode",)),
    "distillation": Script({"batch": 300}, {}, {"epochs": 1}, ("eval_step",)),
    "dcgan": Script({"batch": 400, "nz": 4}, {"width": 4}, {"epochs": 1}, ("sample",)),
    "wgan_gp": Script({"batch": 16}, {"width": 8}, {"steps": 3}, ("sample",)),
    "td3": Script({"batch": 16}, {"width": 8}, {"steps": 40, "starts": 20}, ("act",)),
    "word_language_model": Script(
        {"batch": 4, "bptt": 5, "ntoken": 50}, {"ninp": 8}, {"epochs": 2, "most": 4}, ("next_word", "reset_carry")
    ),
    "mnist": Script({"batch": 149}, {"width": 4}, {"epochs": 2}, ("eval_step",)),
}


@pytest.fixture(autouse=True)
def _scripts_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    for name in (*SCRIPTS, "cartpole", "pendulum"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def run(name: str, directory: Path) -> tuple[Recorder, Recorder, Any]:
    """Train a script through its artifact and through eager; return both, and what `train` returned of both."""
    script, module = SCRIPTS[name], importlib.import_module(name)
    steps = [module.make_step(**script.sizes, **script.made) for _ in range(2)]
    every = [one for step in steps for one in (step.steps.values() if isinstance(step, ig.Steps) else [step])]
    for group in (g for step in every for g in step.optimizer.param_groups if "eps" in g):
        group["eps"] = 1e-4  # Adam makes a whole update of a gradient that is rounding alone, as of a bias of keys
    session = ig.compile(steps[0], directory, entry_points=("train_step", *script.entries)).load()
    eager = EagerSteps(steps[1]) if isinstance(steps[1], ig.Steps) else EagerSession(steps[1])
    recorders = Recorder(session), Recorder(eager)
    known = {n: v for n, v in script.sizes.items() if n in module.train.__code__.co_varnames}
    returned = []
    for recorder, step in zip(recorders, steps, strict=True):
        optimizer = {"optimizer": step.optimizer} if "optimizer" in module.train.__code__.co_varnames else {}
        returned.append(module.train(recorder, **known, **script.trained, **optimizer))
    return *recorders, returned


def flat(found: Any) -> list[np.ndarray]:
    """The numbers of what a call returned, in order."""
    if found is None:
        return []
    if isinstance(found, dict):
        found = tuple(found.values())
    return [a for part in found for a in flat(part)] if isinstance(found, tuple) else [np.asarray(found)]


# It compiles for most of a minute.
SLOW = ("translation", "td3", "wgan_gp", "distillation", "byol")


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in SCRIPTS])
def test_a_script_trains_as_eager_does(name: str, tmp_path: Path) -> None:
    compiled, eager, _ = run(name, tmp_path / "net")
    assert len(compiled.found) == len(eager.found) > 2
    for (call, found), (_, expected) in zip(compiled.found, eager.found, strict=True):
        for a, b in zip(flat(found), flat(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5, err_msg=call)
    state = compiled.session.state()
    for tensor, expected in eager.session.state().items():
        largest = float(np.abs(expected).max(initial=1e-2))
        np.testing.assert_allclose(state[tensor], expected, rtol=0, atol=1e-4 * largest, err_msg=tensor)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_less_than_sixty_lines(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) < LINES


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dqn", "ppo"])
def test_an_agent_balances_the_pole_as_long_as_in_eager(name: str, tmp_path: Path) -> None:
    module = importlib.import_module(name)
    returns = [
        module.train(session)
        for session in (ig.compile(module.make_step(), tmp_path / "net").load(), EagerSession(module.make_step()))
    ]
    compiled, eager = (np.mean(r[-20:]) for r in returns)
    assert compiled > 0.8 * min(eager, 300)
    assert compiled > 150
