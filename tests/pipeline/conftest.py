"""Compiling small steps, and judging their numbers as the compiler itself does."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from iree.compiler import ir
from iree.compiler.tools.binaries import find_tool

import irongrad as ig
from irongrad.pipeline import driver
from irongrad.pipeline.compile import COMMON_FLAGS, _compile_to_flow, _phase
from irongrad.pipeline.functions import flat_function, trace_function
from irongrad.pipeline.importer import import_functions
from irongrad.pipeline.operations import bytecode_of, parsed
from irongrad.pipeline.package import Artifact
from irongrad.targets import parse_target
from irongrad.tolerance import FACTOR, FLOOR_ULPS

Compile = Callable[..., Artifact]
FlowOf = Callable[..., bytes]
Agree = Callable[[Mapping[str, np.ndarray], Mapping[str, torch.Tensor], Sequence[Mapping[str, torch.Tensor]]], None]


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compile:
    """`compiled(step, *entry_points, steps=3)`: compile, verified against eager float64 over so many steps."""
    number = 0

    def run(step: ig.TrainStep, *entry_points: str, steps: int = 3) -> Artifact:
        nonlocal number
        number += 1
        monkeypatch.setattr(driver, "GOLDEN_STEPS", steps)
        return ig.compile(step, tmp_path / f"artifact{number}", entry_points=entry_points or None)

    return run


@pytest.fixture
def agree() -> Agree:
    """`agree(found, exact, samples)`: `found` is as near to eager float64 as eager float32 runs are, within FACTOR."""

    def check(
        found: Mapping[str, np.ndarray],
        exact: Mapping[str, torch.Tensor],
        samples: Sequence[Mapping[str, torch.Tensor]],
    ) -> None:
        for name, truth in exact.items():
            spread = max(float((s[name].double() - truth).abs().max()) for s in samples)
            floor = FLOOR_ULPS * torch.finfo(torch.float32).eps * float(truth.abs().max())
            error = float((torch.from_numpy(np.asarray(found[name], np.float64)) - truth).abs().max())
            assert error <= FACTOR * spread + floor, f"{name}: error {error}, eager float32 {spread}, floor {floor}"

    return check


@pytest.fixture
def flow_of(tmp_path: Path) -> FlowOf:
    """`flow_of(function, given, edit)`: a function's module after the phase `flow`, with its linalg edited before."""

    def run(
        function: Callable[..., object],
        given: Sequence[torch.Tensor],
        edit: Callable[[ir.Module], None] = lambda module: None,
    ) -> bytes:
        target = parse_target("llvm-cpu")
        graph, _ = trace_function(flat_function(function, given, gradients=False), function)
        source = tmp_path / "step.mlirbc"
        with parsed(import_functions(graph, tmp_path).modules.linalg) as module:
            edit(module)
            source.write_bytes(bytecode_of(module))
        return _compile_to_flow(target, [*COMMON_FLAGS, *target.flags], source)

    return run


@pytest.fixture
def is_the_whole_phase() -> Callable[[bytes, Path, Sequence[str]], None]:
    """`is_the_whole_phase(stream, source, flags)`: a module is what iree-compile makes of `source` in one run."""

    def check(stream: bytes, source: Path, flags: Sequence[str]) -> None:
        whole = source.with_name("whole.mlirbc")
        arguments = ["--compile-from=flow", "--compile-to=stream", "--emit-mlir-bytecode", str(_phase(source, "flow"))]
        subprocess.run([find_tool("iree-compile"), *flags, *arguments, "-o", str(whole)], check=True)
        with parsed(stream) as module:
            found = str(module)
        with parsed(whole.read_bytes()) as module:
            assert found == str(module)

    return check
