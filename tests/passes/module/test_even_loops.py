"""Loops whose condition returns fewer values than it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from irongrad.frontends.import_bundle import import_bundle
from irongrad.jax import export_step
from irongrad.passes.module.even_loops import EvenLoops
from irongrad.runtime.errors import IronGradError

OPTIMIZER = optax.lbfgs(memory_size=2)


def step(state: Any, x: Any) -> Any:
    """L-BFGS, whose line search is a loop in a loop."""

    def loss_of(w: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ w) - 1) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state["w"])
    updates, opt = OPTIMIZER.update(gradient, state["opt"], state["w"], value=loss, grad=gradient, value_fn=loss_of)
    return {"w": optax.apply_updates(state["w"], updates), "opt": opt}, loss


def imported(directory: Path) -> None:
    w = jnp.asarray([0.1, -0.2, 0.3])
    x = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)
    export_step(step, {"w": w, "opt": OPTIMIZER.init(w)}, {"x": x}, directory / "step.jax")
    import_bundle(directory / "step.jax", directory / "step", entry_points=("train_step", "export_state"), cache=False)


def test_a_line_search_compiles(tmp_path: Path) -> None:
    imported(tmp_path)


@pytest.mark.slow
def test_iree_still_cannot_convert_such_loops(tmp_path: Path, without: Any) -> None:
    """When this fails, IREE is fixed, and the pass can go."""
    without(EvenLoops)
    with pytest.raises(IronGradError) as refused:
        imported(tmp_path)
    assert "region branch point" in str(refused.value.__cause__)
