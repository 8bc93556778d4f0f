from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from irongrad.jax import export_step
from irongrad.jax.bundle import INDEX, read_bundle
from irongrad.jax.evaluate import Noise, Wide, evaluate, noise_table
from irongrad.runtime.errors import ArtifactError, CaptureError, UnsupportedOpError
from irongrad.runtime.manifest import Role


def sgd(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
    return {"w": state["w"] - 0.1 * gradient}, loss


STATE = {"w": np.ones((3, 2), np.float32)}
INPUTS = {"x": np.ones((4, 3), np.float32)}


def test_a_bundle_lists_every_state_tensor(bundle: Path) -> None:
    index = read_bundle(bundle).index
    roles = {s.name: (s.role, s.dtype, s.shape) for s in index.state}
    assert roles["params/w"] == (Role.PARAMETER, "float32", (4, 6))
    assert roles["opt/momentum"] == (Role.OPTIMIZER, "float32", (6, 3))
    assert roles["key"] == (Role.RANDOM, "uint32", (2,))
    assert roles["old_key"] == (Role.RANDOM, "uint32", (2,))
    assert roles["average"] == (Role.BUFFER, "bfloat16", ())
    assert roles["warm"] == (Role.BUFFER, "bool", ())
    assert roles["count"] == (Role.COUNTER, "int32", ())
    assert index.versions["jax"] == jax.__version__
    assert [p.name for p in index.programs["predict"].arguments] == ["params/u", "params/v", "params/w", "x"]
    assert [p.name for p in index.programs["predict"].results] == ["classes", "logits"]


def test_exporting_needs_no_compiler() -> None:
    code = "import sys, irongrad.jax; print([m for m in ('torch', 'torch_mlir', 'iree.compiler') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_golden_values_are_those_of_float64(bundle: Path) -> None:
    """The first loss, computed by hand with numpy in float64, equals the golden one up to float64 rounding."""
    found = read_bundle(bundle)
    state, x = found.state, found.golden.inputs["x"].astype(np.float64)
    h = np.zeros((5, 6))
    for t in range(3):
        h = np.tanh(x[:, t] @ state["params/w"].astype(np.float64) + h @ state["params/u"].astype(np.float64))
    logits = h @ state["params/v"].astype(np.float64)
    np.testing.assert_allclose(found.golden.expected["predict/0/logits"], logits, rtol=1e-14)
    shifted = logits - logits.max(1, keepdims=True)
    rows = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(5), found.golden.inputs["y"]]
    loss = rows[found.golden.inputs["mask"]].mean()
    assert abs(found.golden.expected["eval/0/"] - loss) < 1e-14
    assert 0 < found.golden.allowed["eval/0/"] < 1e-4


def test_random_bits_are_those_of_the_step_itself() -> None:
    program = jax.make_jaxpr(lambda key: jax.random.bernoulli(key, 0.3, (1000,)))(jax.random.key(0))
    own = jax.random.bernoulli(jax.random.key(0), 0.3, (1000,))
    with jax.enable_x64(True):
        (wide,) = evaluate(program, [jax.random.key(0)], Wide())
    (noisy,) = evaluate(program, [jax.random.key(0)], Noise(noise_table(0)))
    assert (wide == own).all()
    assert (noisy == own).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.lax.scan(lambda c, r: (c * 0.5 + jnp.sin(r), c), jnp.zeros(3), x),
        lambda x: jax.lax.fori_loop(0, 5, lambda i, v: v * jnp.asarray(x)[i % 2] + 1 / 3, jnp.ones(3)),
        lambda x: jax.lax.while_loop(lambda v: v.sum() < 100, lambda v: v * 1.5, jnp.abs(x) + 1),
        lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
        lambda x: jax.grad(lambda y: y[jnp.array([0, 0, 1])].sum() * y.std())(x),
        lambda x: jax.nn.gelu(x) + jax.nn.logsumexp(x, 1, keepdims=True),
        lambda x: jax.checkpoint(lambda y: jnp.exp(jnp.sin(y)))(x),
        lambda x: jnp.sort(x, 0) + jnp.cumsum(x, 1) + x.astype(jnp.float16).astype(jnp.float32),
        lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2, 2), (1, 1), "SAME"),
    ],
)
def test_a_program_in_float64_is_near_the_one_in_float32(function: Any) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    program = jax.make_jaxpr(function)(x)
    own = jax.tree_util.tree_leaves(function(x))
    with jax.enable_x64(True):
        wide = evaluate(program, [x.astype(np.float64)], Wide())
    for a, b in zip(own, wide, strict=True):
        assert b.dtype == (np.float64 if a.dtype == np.float32 else a.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2)
    noisy = evaluate(program, [x], Noise(noise_table(0)))
    for a, b in zip(own, noisy, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)
        assert a.dtype != np.float32 or a.size < 3 or (np.asarray(a) != np.asarray(b)).any() or "max" in str(program)


def test_noise_is_of_a_few_units_in_the_last_place() -> None:
    program = jax.make_jaxpr(lambda x: x * 3)(np.float32(1))
    values = [float(evaluate(program, [np.float32(1)], Noise(noise_table(s)))[0]) for s in range(20)]
    off = np.abs(np.array(values) - 3) / 3 / np.finfo(np.float32).eps
    assert 0 < off.max() <= 5


@pytest.mark.parametrize(
    ("step", "state", "said"),
    [
        (lambda s, x: sgd(s, x)[0], STATE, "must return the pair"),
        (lambda s, x: (sgd(s, x)[1], s), STATE, "a step returns \\(new state, loss\\)|one floating-point number"),
        (lambda s, x: (s, x), STATE, "must be one floating-point number"),
        (lambda s, x: ({"w": s["w"].astype(jnp.float16)}, x.sum()), STATE, "takes w as float32.*returns it as float16"),
        (lambda s: (s, s["w"].sum()), STATE, "the step takes no argument 'x'"),
        (lambda s, x, rate: (s, x.sum()), STATE, "takes 'rate', which is neither"),
        (sgd, {"w": "text"}, "a str at 'w', which is no array"),
        (sgd, {"w": np.ones((3, 2), np.complex64)}, "is complex64, which an artifact cannot hold"),
        (lambda s, x: (s, x.sum()), {"a/b": np.ones(2), "a": {"b": np.ones(2)}}, "two tensors .* 'a/b'"),
    ],
)
def test_a_step_with_a_wrong_signature_is_refused(step: Any, state: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=said):
        export_step(step, state, INPUTS, tmp_path / "b")


def test_a_lapack_call_is_refused_with_its_line(tmp_path: Path) -> None:
    def step(state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        return state, jnp.linalg.svd(x @ state["w"])[1].sum()

    with pytest.raises(UnsupportedOpError, match=r"test_export\.py:\d+: the step calls 'lapack_\w+'"):
        export_step(step, STATE, INPUTS, tmp_path / "b")


def test_symbolic_sizes_are_refused(tmp_path: Path) -> None:
    (size,) = jax.export.symbolic_shape("batch")
    with pytest.raises(UnsupportedOpError, match="its sizes batch vary"):
        export_step(sgd, STATE, {"x": jax.ShapeDtypeStruct((size, 3), np.float32)}, tmp_path / "b")


def test_a_range_that_excludes_example_values_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="not all of it in"):
        export_step(sgd, STATE, INPUTS, tmp_path / "b", ranges={"x": (0, 1)})


def test_the_version_of_stablehlo_can_be_chosen(tmp_path: Path) -> None:
    export_step(sgd, STATE, INPUTS, tmp_path / "b", stablehlo_version="1.9.0")
    assert read_bundle(tmp_path / "b").index.stablehlo == "1.9.0"
    with pytest.raises(UnsupportedOpError, match="cannot be written as StableHLO 99"):
        export_step(sgd, STATE, INPUTS, tmp_path / "c", stablehlo_version="99.0.0")


def test_a_missing_or_newer_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no whole bundle"):
        read_bundle(tmp_path)
    index = json.loads((bundle / INDEX).read_bytes())
    (tmp_path / INDEX).write_text(json.dumps(index | {"format_version": 99}))
    with pytest.raises(ArtifactError, match="format version 99"):
        read_bundle(tmp_path)
