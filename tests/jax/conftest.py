"""JAX steps that the tests export."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irongrad.jax import export_step

State = dict[str, Any]


def initial_state() -> State:
    """The state of a recurrent network: a typed key, an old-style key, a bfloat16, a boolean and a counter in it."""
    rng = np.random.default_rng(0)
    return {
        "params": {
            n: rng.normal(0, 0.3, s).astype("float32") for n, s in (("w", (4, 6)), ("u", (6, 6)), ("v", (6, 3)))
        },
        "opt": {"momentum": jnp.zeros((6, 3))},
        "key": jax.random.key(7),
        "old_key": jax.random.PRNGKey(1),
        "average": jnp.zeros((), jnp.bfloat16),
        "warm": np.array(False),
        "count": 0,
    }


def forward(params: State, x: jax.Array) -> jax.Array:
    """Run a recurrence over the second dimension of `x`; return the logits of its last value."""

    def cell(h: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(row @ params["w"] + h @ params["u"]), None

    last, _ = jax.lax.scan(cell, jnp.zeros((len(x), 6)), jnp.swapaxes(x, 0, 1))
    return last @ params["v"]


def loss_of(params: State, x: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
    """The mean cross-entropy of the rows that `mask` selects."""
    rows = -jnp.take_along_axis(jax.nn.log_softmax(forward(params, x)), y[:, None], 1)[:, 0]
    return jnp.sum(jnp.where(mask, rows, 0)) / jnp.sum(mask)


@partial(jax.jit, donate_argnums=0)
def train_step(
    state: State, x: jax.Array, y: jax.Array, mask: jax.Array, lr: float, decay: float
) -> tuple[State, jax.Array]:
    """Gradient descent with noise on the inputs, momentum on one matrix, and a branch."""
    key, now = jax.random.split(state["key"])
    noisy = x + 0.1 * jax.random.normal(now, x.shape)
    loss, gradients = jax.value_and_grad(loss_of)(state["params"], noisy, y, mask)
    momentum = 0.9 * state["opt"]["momentum"] + gradients["v"]
    gradients = {**gradients, "v": momentum}
    rate = jax.lax.cond(state["warm"], lambda: lr * 1.0, lambda: lr * 0.5)
    params = jax.tree.map(lambda p, g: p - rate * (g + decay * p), state["params"], gradients)
    new = {
        "params": params,
        "opt": {"momentum": momentum},
        "key": key,
        "old_key": jax.random.fold_in(state["old_key"], 3),
        "average": (0.9 * state["average"] + 0.1 * loss).astype(jnp.bfloat16),
        "warm": state["count"] >= 1,
        "count": state["count"] + 1,
    }
    return new, loss


def inputs(seed: int = 0) -> dict[str, np.ndarray]:
    """A random batch."""
    rng = np.random.default_rng(seed)
    return {
        "x": rng.standard_normal((5, 3, 4)).astype(np.float32),
        "y": rng.integers(0, 3, 5, dtype=np.int32),
        "mask": np.array([True, True, False, True, True]),
    }


class Recurrent(NamedTuple):
    """A JAX step.

    Attributes:
        step: the jitted function.
        state: its initial state.
        inputs: makes a batch from a seed.
    """

    step: Callable[..., tuple[State, jax.Array]]
    state: State
    inputs: Callable[[int], dict[str, np.ndarray]]


@pytest.fixture
def recurrent() -> Recurrent:
    return Recurrent(train_step, initial_state(), inputs)


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The step above, exported."""
    directory = tmp_path_factory.mktemp("bundles") / "step.jax"
    export_step(
        train_step,
        initial_state(),
        inputs(),
        directory,
        hypers={"lr": 0.5, "decay": 1e-3},
        evaluate=lambda state, x, y, mask: loss_of(state["params"], x, y, mask),
        predict=lambda state, x: {"logits": forward(state["params"], x), "classes": forward(state["params"], x) > 0},
        ranges={"y": (0, 2)},
    )
    return directory
