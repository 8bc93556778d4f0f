"""IREE's tools, in a process of their own, and IREE's passes in this one."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from iree.compiler import ir, passmanager
from iree.compiler.tools import binaries

from irongrad.runtime.errors import InternalError


def run_tool(tool: str, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run `iree-compile` or `iree-opt`; its caller looks at the exit status."""
    return subprocess.run([binaries.find_tool(tool), *arguments], capture_output=True, text=True, check=False)


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
