from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core

from irongrad.frontends.import_bundle import import_bundle
from irongrad.jax import export_step
from irongrad.jax.pooling import pooling_rules
from irongrad.jax.programs import rewritten
from irongrad.mlir.tools import run_tool

# Windows, strides and padding of the last two dimensions.
POOLS = [
    ((3, 3), (2, 2), ((0, 1), (1, 1))),
    ((2, 2), (2, 2), ((0, 0), (0, 0))),
    ((3, 2), (1, 1), ((0, 0), (0, 0))),
    ((3, 3), (2, 1), ((2, 1), (1, 2))),
    ((2, 2), (3, 3), ((0, 0), (0, 0))),
]


def gradient_of(pool: Any, *, least: bool) -> Any:
    window, strides, padding = pool
    start, select = (jnp.inf, lax.min) if least else (-jnp.inf, lax.max)

    def loss(x: jax.Array) -> jax.Array:
        pooled = lax.reduce_window(x, start, select, (1, *window), (1, *strides), ((0, 0), *padding))
        return jnp.sum(jnp.sin(pooled))

    return jax.grad(loss)


def numbers(ties: bool) -> np.ndarray:
    x = np.random.default_rng(0).standard_normal((2, 7, 8)).astype(np.float32)
    return np.round(x) if ties else x


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("least", [False, True])
@pytest.mark.parametrize("ties", [False, True])
def test_the_gradient_goes_to_the_first_of_equal_elements_as_in_jax(pool: Any, least: bool, ties: bool) -> None:
    x = numbers(ties)
    program = jax.make_jaxpr(gradient_of(pool, least=least))(x)
    new = rewritten(program, pooling_rules())
    assert "select_and_scatter" in str(program)
    assert "select_and_scatter" not in str(new)
    (found,), (wanted,) = core.jaxpr_as_fun(new)(x), core.jaxpr_as_fun(program)(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)


def test_windows_that_overlap_compile(tmp_path: Path) -> None:
    gradient = gradient_of(POOLS[0], least=False)
    export_step(lambda x, s: (x - s * gradient(x), x.sum()), numbers(True), {"s": np.float32(0.5)}, tmp_path / "a.jax")
    import_bundle(tmp_path / "a.jax", tmp_path / "a", entry_points=("train_step", "export_state"))


def test_iree_still_lacks_overlapping_windows(tmp_path: Path) -> None:
    """When this fails, `irongrad.jax.pooling` can go."""
    exported = jax.export.export(jax.jit(gradient_of(POOLS[0], least=False)), platforms=["cpu"])(numbers(False))
    (tmp_path / "a.mlirbc").write_bytes(exported.mlir_module_serialized)
    lowered = run_tool("iree-opt", ["--iree-stablehlo-input-transformation-pipeline", str(tmp_path / "a.mlirbc")])
    assert lowered.returncode != 0
    assert "failed to legalize" in lowered.stderr
