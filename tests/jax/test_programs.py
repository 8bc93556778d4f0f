from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from irongrad.jax import export_step
from irongrad.jax.bundle import read_bundle
from irongrad.jax.programs import all_operations, rewritten, without_prints
from irongrad.runtime.errors import UnsupportedOpError

X = np.ones((4, 3), np.float32)


def printing(x: Any) -> Any:
    jax.debug.print("x {x}", x=x[0])

    def body(carried: Any, row: Any) -> Any:
        jax.debug.print("row {row}", row=row, ordered=True)
        jax.debug.callback(print, carried)
        return lax.cond(row[0] > 0, lambda c: c * 2, lambda c: c, carried), row.sum()

    return lax.scan(body, x[0], x)


def test_prints_are_dropped_and_their_lines_are_named() -> None:
    program = jax.make_jaxpr(printing)(X)
    new, lines = without_prints(program)
    assert not {e.primitive.name for e, _ in all_operations(new.jaxpr)} & {"debug_print", "debug_callback"}
    assert not new.effects
    assert [line.partition(": ")[2] for line in lines] == [
        'jax.debug.print("x {x}", x=x[0])',
        'jax.debug.print("row {row}", row=row, ordered=True)',
        "jax.debug.callback(print, carried)",
    ]
    for a, b in zip(jax.tree.leaves(printing(X)), jax.core.eval_jaxpr(new.jaxpr, new.consts, X), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_step_that_prints_is_exported_with_a_notice(tmp_path: Path) -> None:
    def step(state: Any, x: Any) -> Any:
        jax.debug.print("state {state}", state=state)
        return state + x.sum(), state

    with pytest.warns(UserWarning, match="the artifact does not print: .*test_programs.py.*jax.debug.print"):
        export_step(step, np.float32(0), {"x": X}, tmp_path / "a.jax")
    assert read_bundle(tmp_path / "a.jax").golden.expected["loss/2/"] == 24


@pytest.mark.parametrize("call", [jax.pure_callback, jax.experimental.io_callback])
def test_calls_of_python_are_refused(call: Any, tmp_path: Path) -> None:
    def step(state: Any, x: Any) -> Any:
        return state, call(lambda v: v, jax.ShapeDtypeStruct((), np.float32), x.sum())

    with pytest.raises(
        UnsupportedOpError, match=r"test_programs.py:\d+: return state, call.* calls Python \(\w+_callback"
    ):
        export_step(step, np.float32(0), {"x": X}, tmp_path / "a.jax")


def test_steps_for_several_devices_are_refused(tmp_path: Path) -> None:
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("data",))

    def step(w: Any, x: Any) -> Any:
        return w, jax.shard_map(
            lambda x: lax.pmean(x.mean(), "data"), mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec()
        )(x)

    with pytest.raises(UnsupportedOpError, match=r"test_programs.py:\d+.*several devices \(shard_map with .*psum"):
        export_step(step, np.float32(0), {"x": X}, tmp_path / "a.jax")

    with pytest.raises(UnsupportedOpError, match="collective .*data"):
        export_step(lambda w, x: (w, lax.psum(x.sum(), "data")), np.float32(0), {"x": X}, tmp_path / "a.jax")


def test_a_rule_replaces_operations_in_loops_branches_and_calls() -> None:
    def function(x: Any) -> Any:
        inner = jax.jit(lambda v: jnp.sin(v) + 1)
        scanned, _ = lax.scan(lambda c, r: (jnp.sin(c) + r.sum(), inner(r)), x[0, 0], x)
        return lax.cond(scanned > 0, jnp.sin, inner, scanned)

    program = jax.make_jaxpr(function)(X)
    new = rewritten(program, {"sin": lambda site: jnp.cos})
    names = [e.primitive.name for e, _ in all_operations(new.jaxpr)]
    assert "sin" not in names
    assert names.count("cos") == 4
