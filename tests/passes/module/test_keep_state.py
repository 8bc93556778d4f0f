"""Steps that leave a tensor of the state as it is, and store an update of it elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from irongrad.frontends.import_bundle import import_bundle
from irongrad.jax import export_step
from irongrad.passes.module.keep_state import KeepState
from irongrad.runtime.errors import VerificationError

X = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)


def step(state: Any, i: Any) -> Any:
    x = state["x"]
    new = {
        "x": x,
        "rows": x[i[:2]],
        "update": lax.dynamic_update_slice(x, jnp.full((2, 3), 9.0), (i[2], i[3])),
    }
    return new, jnp.sum(new["rows"])


def imported(directory: Path) -> None:
    state = {"x": X, "rows": np.zeros((2, 5), np.float32), "update": np.zeros((6, 5), np.float32)}
    export_step(step, state, {"i": np.array([0, 1, 4, 2], np.int32)}, directory / "step.jax")
    import_bundle(directory / "step.jax", directory / "step", cache=False)


def test_the_state_is_kept(tmp_path: Path) -> None:
    imported(tmp_path)


def test_iree_still_updates_the_state(tmp_path: Path, without: Any) -> None:
    """When this fails, IREE is fixed, and the pass can go."""
    without(KeepState)
    with pytest.raises(VerificationError, match="state/1/x"):
        imported(tmp_path)
