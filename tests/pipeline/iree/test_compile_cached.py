"""Targets compile in parallel, to the same results as one by one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from threading import Barrier

import pytest

from irongrad.pipeline.iree import compile_cached
from irongrad.pipeline.iree.compile import compile_module
from irongrad.pipeline.iree.compile_cached import compile_all
from irongrad.runtime.errors import ToolchainError
from irongrad.runtime.manifest import EntryPoint
from irongrad.targets import parse_target

# Without locations in the text IREE adds its own, which hold the path of the file, so that outputs would differ.
TEXT = """
module {
  func.func @twice(%x: tensor<4xf32> loc("twice.py":1:1)) -> tensor<4xf32> {
    %y = arith.addf %x, %x : tensor<4xf32> loc("twice.py":2:1)
    return %y : tensor<4xf32> loc("twice.py":3:1)
  } loc("twice.py":1:1)
} loc("twice.py":1:1)
"""


@dataclass(frozen=True)
class Module:
    """A program for IREE."""

    text: str = TEXT
    bytecode: bytes = TEXT.encode()
    entry_points: tuple[EntryPoint, ...] = ()


def test_targets_compiled_in_parallel_equal_targets_compiled_alone(tmp_path: Path) -> None:
    targets = [parse_target(text) for text in ("llvm-cpu:cpu=x86-64-v3", "llvm-cpu:cpu=x86-64-v2", "vulkan")]
    together = compile_all(None, Module(), targets, tmp_path)
    alone = tmp_path / "alone"
    alone.mkdir()
    assert together == [compile_module(Module(), target, alone) for target in targets]
    assert len({made.vmfb for made in together}) == 3


def test_targets_run_at_once_in_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both, folders = Barrier(2, timeout=30), set()

    def meet(module: Module, target: object, scratch: Path, check: object, observer: object) -> object:
        folders.add(scratch)
        both.wait()
        return target

    monkeypatch.setattr(compile_cached, "compile_module", meet)
    monkeypatch.setattr(compile_cached.os, "cpu_count", lambda: 2)
    targets = [parse_target("llvm-cpu"), parse_target("vulkan")]
    assert compile_all(None, Module(), targets, tmp_path) == targets
    assert len(folders) == 2


def test_the_first_target_that_fails_is_named(tmp_path: Path) -> None:
    targets = [parse_target("llvm-cpu"), replace(parse_target("vulkan"), flags=("--no-such-flag",))]
    with pytest.raises(ToolchainError, match="for the target 'vulkan': iree-compile failed: .*no-such-flag"):
        compile_all(None, Module(), targets, tmp_path)


@pytest.mark.parametrize("name", ["version", "sources", "host"])
def test_the_key_of_a_module(name, monkeypatch):
    target, other = parse_target("llvm-cpu"), parse_target("llvm-cpu:cpu=x86-64-v3")
    before = compile_cached.module_key(b"module", target)
    assert compile_cached.module_key(b"module", target) == before
    assert len({before, compile_cached.module_key(b"nodule", target), compile_cached.module_key(b"module", other)}) == 3
    monkeypatch.setattr(compile_cached, name, lambda *arguments: "other")
    assert compile_cached.module_key(b"module", target) != before
