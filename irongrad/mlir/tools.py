"""IREE's tools, in a process of their own, and IREE's passes in this one."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence

from iree.compiler import ir, passmanager
from iree.compiler.tools import binaries

from irongrad.analysis.timeline import Timeline, recording
from irongrad.mlir.pass_timing import FLAGS, passes_in, without_timing
from irongrad.runtime.errors import InternalError


def run_tool(tool: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `iree-compile` or `iree-opt`; its caller looks at the exit status."""
    timeline = recording()
    command = [binaries.find_tool(tool), *arguments, *(FLAGS if timeline is not None else ())]
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if timeline is not None:
        result.stderr = _noted(timeline, tool, arguments, start, result.stderr)
    return result


def _noted(timeline: Timeline, tool: str, arguments: Sequence[str], start: float, stderr: str) -> str:
    """Note a run of a tool and its passes; return its messages."""
    seconds = time.perf_counter() - start
    messages, report = without_timing(stderr)
    phases = [a.removeprefix("--compile-") for a in arguments if a.startswith("--compile-")]
    timeline.note(" ".join((tool, *phases)), start, seconds, {"arguments": " ".join(arguments)})
    for name, at, taken, whole in passes_in(report, start, seconds):
        timeline.note(name, at, taken, {"seconds, all threads": whole})
    return messages


def run_pipeline(module: ir.Module, passes: str) -> None:
    """Run IREE's `passes` on every function of `module`, in place, without MLIR's verifier in between.

    Raises:
        InternalError: a pass fails.
    """
    with module.context:
        manager = passmanager.PassManager.parse(f"builtin.module(util.func({passes}))")
        manager.enable_verifier(False)
        try:
            manager.run(module.operation)
        except ir.MLIRError as error:
            raise InternalError(f"IREE's passes {passes} fail: {error}") from error
