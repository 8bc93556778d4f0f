"""A small convolutional network in JAX on scikit-learn's handwritten digits, with Optax's AdamW and dropout.

python examples/jax_digits.py build/digits.jax       # where JAX is: exports the step, and the data as an .npz
irongrad import build/digits.jax -o build/jax_digits  # where the compiler is
irongrad train build/jax_digits --data build/digits.npz --epochs 10  # where neither is
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import BATCH, load_digits
from jax import lax

import irongrad.jax

OPTIMIZER = optax.scale_by_adam()
DECAY, KEEP = 1e-2, 0.9


def initial_state(seed: int = 0, channels: int = 16) -> dict:
    """Parameters, Adam's moments and a random key."""
    keys = jax.random.split(jax.random.key(seed), 4)
    init = jax.nn.initializers.he_normal()
    params = {
        "conv1": {"w": init(keys[0], (3, 3, 1, channels)), "b": jnp.zeros(channels)},
        "conv2": {"w": init(keys[1], (3, 3, channels, 2 * channels)), "b": jnp.zeros(2 * channels)},
        "linear": {"w": init(keys[2], (8 * channels, 10)), "b": jnp.zeros(10)},
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params), "key": keys[3]}


def logits(params: dict, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Two convolutions, each with a ReLU and a pooling, and a linear layer; dropout before it where a key is given."""
    x = jnp.transpose(x, (0, 2, 3, 1))
    for layer in (params["conv1"], params["conv2"]):
        x = lax.conv_general_dilated(x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu(x + layer["b"])
        n, h, w, c = x.shape
        x = x.reshape(n, h // 2, 2, w // 2, 2, c).max((2, 4))
    x = x.reshape(len(x), -1)
    if key is not None:
        x = jnp.where(jax.random.bernoulli(key, KEEP, x.shape), x / KEEP, 0)
    return x @ params["linear"]["w"] + params["linear"]["b"]


def loss(params: dict, x: jax.Array, y: jax.Array, key: jax.Array | None = None) -> jax.Array:
    """Cross-entropy."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, x, key), y).mean()


def train_step(state: dict, x: jax.Array, y: jax.Array, lr: float) -> tuple[dict, jax.Array]:
    """One step of AdamW; the learning rate is an input."""
    key, now = jax.random.split(state["key"])
    value, gradients = jax.value_and_grad(loss)(state["params"], x, y, now)
    updates, moments = OPTIMIZER.update(gradients, state["optimizer"])
    params = jax.tree.map(lambda p, u: p - lr * (u + DECAY * p), state["params"], updates)
    return {"params": params, "optimizer": moments, "key": key}, value


def batches() -> dict[str, np.ndarray]:
    """The training images, with labels in int32, as JAX has integers."""
    data, _ = load_digits()
    return {"x": data["x"], "y": data["y"].astype(np.int32)}


def export(path: str | Path, batch: int = BATCH, channels: int = 16) -> None:
    """Write the bundle."""
    irongrad.jax.export_step(
        train_step,
        initial_state(channels=channels),
        {n: a[:batch] for n, a in batches().items()},
        path,
        hypers={"lr": 2e-3},
        evaluate=lambda state, x, y: loss(state["params"], x, y),
        predict=lambda state, x: logits(state["params"], x),
        ranges={"y": (0, 9)},
    )


if __name__ == "__main__":
    bundle = Path(sys.argv[1] if len(sys.argv) > 1 else "build/digits.jax")
    export(bundle)
    np.savez(bundle.with_name("digits.npz"), **batches())
