"""Buffers over a limit are kept from call to call, and no call sees values that another call left there."""

from __future__ import annotations

import ctypes
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import irongrad as ig
from irongrad.pipeline.iree.compile import compile_module
from irongrad.runtime import Session
from irongrad.targets import llvm_cpu, parse_target
from tests.fixtures.module_texts import TextModule, functions_of


def test_calls_in_any_order_give_the_same_bits(
    mlp_step: ig.TrainStep, mlp_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llvm_cpu, "_LARGEST_FREED", 0)
    ig.compile(mlp_step, tmp_path / "kept", cache=False)
    monkeypatch.chdir(tmp_path)
    anew, kept = (_results(ig.runtime.load(path), mlp_step) for path in (mlp_artifact, tmp_path / "kept"))
    assert anew.keys() == kept.keys()
    for name, value in anew.items():
        np.testing.assert_array_equal(kept[name], value, err_msg=name)


def _results(session: Session, step: ig.TrainStep) -> dict[str, Any]:
    """The results of all entry points that compute, called in turn, and the final state."""
    x, y = (v.numpy() for v in step.inputs.values())
    found: dict[str, Any] = {}
    for turn in range(3):
        found[f"train {turn}"] = session.train_step(x=x, y=y)
        found[f"eval {turn}"] = session.eval_step(x=x, y=y)
        session.grad_step(x=x, y=y)
        session.apply_step()
        found[f"predict {turn}"] = session.predict(x=x)
        found[f"steps {turn}"] = session.train_steps(x=np.stack([x, x]), y=np.stack([y, y]))
        session.save(Path(f"{turn}.safetensors"))
    session.restore(Path("0.safetensors"))
    for turn in range(2):
        found[f"again {turn}"] = session.train_step(x=x, y=y)
    session.reset()
    found["after a reset"] = session.train_step(x=x, y=y)
    return found | session.state()


class Allocated(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t) for name in ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"]
    ] + [(name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")]


class Large(TextModule):
    """A portable module with an intermediate value of 128 MiB."""

    @property
    def text(self) -> str:
        """The module."""
        left, right, product, sums = (f"tensor<{s}xf32>" for s in ("4096x32", "32x8192", "4096x8192", "4096"))
        return f"""func.func @f(%a: {left}, %b: {right}) -> {sums} {{
          %zero = arith.constant 0.0 : f32
          %room = tensor.empty() : {product}
          %zeros = linalg.fill ins(%zero : f32) outs(%room : {product}) -> {product}
          %c = linalg.matmul ins(%a, %b : {left}, {right}) outs(%zeros : {product}) -> {product}
          %less = tensor.empty() : {sums}
          %none = linalg.fill ins(%zero : f32) outs(%less : {sums}) -> {sums}
          %sums = linalg.reduce {{ arith.addf }} ins(%c : {product}) outs(%none : {sums}) dimensions = [1]
          return %sums : {sums}
        }}"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="reads the allocation statistics of glibc")
@pytest.mark.parametrize("is_kept", [False, True])
def test_iree_still_keeps_no_memory_over_64_mib(tmp_path: Path, is_kept: bool) -> None:
    """When the case without kept buffers fails, IREE keeps such memory, and `keep-buffers` can go."""
    target = parse_target("llvm-cpu")
    compiled = compile_module(Large(), target if is_kept else replace(target, largest_freed=None), tmp_path)
    loaded = functions_of(compiled.vmfb, "local-task")
    a, b = np.ones((4096, 32), np.float32), np.ones((32, 8192), np.float32)
    before = _bytes_in_use()
    np.testing.assert_array_equal(loaded.f(a, b).to_host(), 32.0 * 8192)
    after = _bytes_in_use()
    assert after - before < 2**20
    assert compiled.statistics.transients["f"] >= 2**27


def _bytes_in_use() -> int:
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Allocated
    found = libc.mallinfo2()
    return int(found.uordblks + found.hblkhd)
