"""Indices of JAX steps in and out of range: dropped, clamped or filled as JAX does, in every mode and dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from jax import lax
from jax.extend import core

from irongrad.frontends.import_bundle import import_bundle
from irongrad.jax import export_step
from irongrad.jax.indices import AS_CLAMPED, AS_DROPPED, AS_FILLED, index_rules
from irongrad.jax.programs import rewritten
from irongrad.mlir.tools import run_tool
from irongrad.runtime import load
from irongrad.runtime.manifest import PROVED, IndexSpec
from irongrad.runtime.session import Session

ROWS, COLUMNS, COUNT = 6, 5, 4
X = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
V = np.array([1.5, -2.5, 3.5, 0.5], np.float32)
GETS = ("clip", "fill", "promise_in_bounds")
SETS = ("clip", "drop", "promise_in_bounds")
WRITES = ("add", "max", "min", "multiply")

Program = Callable[..., Any]


def get(mode: str) -> Program:
    return lambda x, v, i, j: (x.at[i, j].get(mode=mode), x.at[i].get(mode=mode), x.at[:, j].get(mode=mode))


def write(how: str, mode: str) -> Program:
    return lambda x, v, i, j: (
        getattr(x.at[i, j], how)(v, mode=mode),
        getattr(x.at[i], how)(v[:, None], mode=mode),
        getattr(x.at[i, 1:4], how)(0.5, mode=mode),
    )


def put(mode: str) -> Program:
    """One value in all places: JAX leaves open which of several values stays in a place."""
    return lambda x, v, i, j: (
        x.at[i, j].set(7.0, mode=mode),
        x.at[:, j].set(7.0, mode=mode),
        x.at[i].apply(lambda row: 7.0 + 0 * row, mode=mode),
        (x > 0).at[i].set(True, mode=mode),
    )


def slices(x: Any, v: Any, i: Any, j: Any) -> Any:
    return (
        lax.dynamic_slice(x, (i[0], j[1]), (2, 3)),
        lax.dynamic_update_slice(x, 0 * x[:2, :3], (i[2], j[3])),
        jax.vmap(lambda row, k: lax.dynamic_slice(row, (k,), (3,)))(x[:COUNT], i),
        jax.vmap(lambda row, k: lax.dynamic_update_slice(row, v[:2], (k,)))(x[:COUNT], i),
        jax.vmap(lambda row, k: row.at[k].add(1.0))(x[:COUNT], j),
    )


def loops(x: Any, v: Any, i: Any, j: Any) -> Any:
    def body(carried: Any, k: Any) -> Any:
        return carried.at[k, j].add(v, mode="drop"), carried[k].sum()

    def turn(carried: Any) -> Any:
        n, rows = carried
        return n + 1, rows.at[i[n]].set(1.0 * n, mode="drop")

    return lax.scan(body, x, i), lax.while_loop(lambda c: c[0] < COUNT, turn, (0, x))


def gradients(x: Any, v: Any, i: Any, j: Any) -> Any:
    return (
        jax.grad(lambda t: (jnp.take(t, i, axis=0, mode="clip") ** 2).sum())(x),
        jax.grad(lambda t: (t.at[i, j].get(mode="fill", fill_value=0) ** 2).sum())(x),
        jax.grad(lambda t: jnp.sin(t.at[i].add(v[:, None], mode="drop")).sum())(x),
        jax.grad(lambda t: (jnp.take_along_axis(t, i[:, None], 0) ** 2).sum())(x),
        jax.ops.segment_sum(x[:COUNT], i, num_segments=3),
    )


PROGRAMS: dict[str, Program] = (
    {f"get {mode}": get(mode) for mode in GETS}
    | {f"{how} {mode}": write(how, mode) for how in WRITES for mode in SETS}
    | {f"set {mode}": put(mode) for mode in SETS}
    | {"slices": slices, "loops": loops, "gradients": gradients}
)


def all_programs(x: Any, v: Any, i: Any, j: Any) -> dict[str, Any]:
    return {name.replace(" ", "_"): program(x, v, i, j) for name, program in PROGRAMS.items()}


_jitted = jax.jit(all_programs)


def numbers(dtype: Any) -> st.SearchStrategy[Any]:
    """Indices near the ends of the tensor and of the dtype."""
    about = np.iinfo(dtype)
    near = [n for n in range(-ROWS - 2, ROWS + 3) if n >= about.min]
    far = [about.min, about.min + 1, about.max - 1, about.max, about.max // 2]
    return arrays.arrays(dtype, COUNT, elements=st.sampled_from([*near, *near, *far]))


INDICES = st.sampled_from([np.int8, np.uint8, np.uint32]).flatmap(
    lambda dtype: st.tuples(numbers(dtype), numbers(dtype))
)


def close(found: Any, wanted: Any) -> bool:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return all(np.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True) for a, b in pairs)


@cache
def both(dtype: Any) -> tuple[Any, Any]:
    """All programs on indices of `dtype`, as JAX runs them and rewritten, both compiled."""
    program = jax.make_jaxpr(all_programs)(X, V, np.zeros(COUNT, dtype), np.zeros(COUNT, dtype))
    new = rewritten(program, index_rules(lambda spec: None))
    quick = {"xla_backend_optimization_level": 0}
    return tuple(jax.jit(core.jaxpr_as_fun(p), compiler_options=quick) for p in (program, new))


@settings(max_examples=100, deadline=None)
@given(INDICES)
def test_a_rewritten_program_gives_what_jax_gives(indices: tuple[Any, Any]) -> None:
    as_it_is, new = both(indices[0].dtype)
    assert close(new(X, V, *indices), as_it_is(X, V, *indices))


@pytest.fixture(scope="session")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Session:
    """All programs as one compiled step; the state holds their results between two tensors that nothing writes."""
    directory = tmp_path_factory.mktemp("indices")
    i, j = np.array([0, 5, 2, 2], np.int32), np.array([4, 0, 1, 3], np.int32)
    shapes = jax.eval_shape(all_programs, X, V, i, j)
    state = {"a": X, "results": jax.tree.map(lambda s: np.zeros(s.shape, s.dtype), shapes), "z": X + 1}
    export_step(step, state, {"v": V, "i": i, "j": j}, directory / "step.jax")
    import_bundle(directory / "step.jax", directory / "step", entry_points=("train_step", "export_state"))
    return load(directory / "step")


def step(state: Any, v: Any, i: Any, j: Any) -> Any:
    return {**state, "results": all_programs(state["a"], v, i, j)}, jnp.sum(v)


@settings(max_examples=200, deadline=None)
@given(numbers(np.int32), numbers(np.int32))
def test_a_compiled_step_gives_what_jax_gives(imported: Session, i: Any, j: Any) -> None:
    imported.train_step(v=V, i=i, j=j)
    found = imported.state()
    wanted, _ = jax.tree_util.tree_flatten_with_path(_jitted(X, V, i, j))
    for path, value in wanted:
        name = "results/" + jax.tree_util.keystr(path, simple=True, separator="/")
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    np.testing.assert_array_equal(found["a"], X)
    np.testing.assert_array_equal(found["z"], X + 1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint32])
def test_narrow_and_unsigned_indices(dtype: Any, tmp_path: Path) -> None:
    """200 as a byte is not -56, and an index of a byte goes into a dimension of 300."""
    x = np.arange(300 if dtype != np.int8 else 100, dtype=np.float32)
    i = np.array([3, 90, 7], dtype)

    def gather(state: Any, i: Any) -> Any:
        x = state["x"]
        return {"x": x.at[i].add(1.0), "y": x[i], "z": lax.dynamic_slice(x, (i[1],), (2,))}, x[i[0]]

    state = {"x": x, "y": np.zeros(3, np.float32), "z": np.zeros(2, np.float32)}
    export_step(gather, state, {"i": i}, tmp_path / "step.jax")
    import_bundle(tmp_path / "step.jax", tmp_path / "step", entry_points=("train_step", "export_state"))
    session = load(tmp_path / "step")
    far = np.array([0, np.iinfo(dtype).max, np.iinfo(dtype).max // 2], dtype)
    session.train_step(i=far)
    wanted, _ = gather(jax.tree.map(jnp.asarray, state), jnp.asarray(far))
    assert close({n: session.state()[n] for n in wanted}, wanted)


def test_the_manifest_lists_every_index(imported: Session) -> None:
    found = imported.manifest.indices
    assert {s.how for s in found} == {AS_CLAMPED, AS_DROPPED, AS_FILLED}
    assert all(s.line.startswith("test_indices.py:") for s in found)
    spec = next(s for s in found if s.operator == "dynamic_slice" and "(2, 3)" in s.line)
    assert spec == IndexSpec(spec.line, "dynamic_slice", "[0, 4]", AS_CLAMPED)


def test_constant_indices_are_proved() -> None:
    found: list[IndexSpec] = []
    program = jax.make_jaxpr(lambda x: x.at[1:5:2, ::2].set(x[jnp.array([0, 3]), ::2]))(X)
    new = rewritten(program, index_rules(found.append))
    assert {s.how for s in found} == {PROVED}
    assert close(core.jaxpr_as_fun(new)(X), core.jaxpr_as_fun(program)(X))


@pytest.mark.parametrize(
    ("program", "guard"),
    [
        (lambda x, i: jnp.take(x, i, axis=0, mode="clip"), "arith.minsi"),
        (lambda x, i: x.at[i].add(1.0, mode="drop"), "arith.cmpi"),
    ],
)
def test_iree_still_trusts_indices(program: Program, guard: str, tmp_path: Path) -> None:
    """When this fails, IREE guards indices, and `irongrad.jax.indices` can go."""
    i = jax.ShapeDtypeStruct((COUNT,), np.uint32)  # which JAX does not wrap
    exported = jax.export.export(jax.jit(program), platforms=["cpu"])(X, i)
    (tmp_path / "a.mlirbc").write_bytes(exported.mlir_module_serialized)
    lowered = run_tool("iree-opt", ["--iree-stablehlo-input-transformation-pipeline", str(tmp_path / "a.mlirbc")])
    assert lowered.returncode == 0
    assert guard not in lowered.stdout
