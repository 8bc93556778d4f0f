"""Run iree-compile and iree-opt on a file without MLIR's verifier; after a failure, with it, for its diagnostic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from irongrad.diagnostics.toolchain_errors import toolchain_error
from irongrad.mlir.tools import run_tool
from irongrad.pipeline.iree.remedies import check_remedies

# The verifier between IREE's passes takes a fifth of the time. The input of each phase is verified in any case.
UNVERIFIED = {"iree-compile": "--verify=false", "iree-opt": "--verify-each=false"}

# Up to its phase `stream`, IREE works on functions in parallel. If one function computes and the others only copy the
# state, threads gain nothing. To set up IREE's passes for each thread takes a fifth of the CPU time of these phases.
WITHOUT_THREADS = "--mlir-disable-threading"


def compile_file(flags: Sequence[str], source: Path, output: Path) -> None:
    """Run iree-compile on `source`.

    Raises:
        RefusedError: the run failed, and other flags may avoid the failure.
        ToolchainError: the run failed; the message has the diagnostic.
    """
    _finished("iree-compile", [*flags, str(source), "-o", str(output)], flags, source)


def transform_file(passes: str, flags: Sequence[str], source: Path, output: Path, *own: str) -> str:
    """Run IREE's `passes` on the module in `source` with iree-opt.

    Args:
        passes: the passes, in the syntax of MLIR's textual pipelines.
        flags: the flags of iree-compile; iree-opt accepts only `WITHOUT_THREADS` of them.
        source: the file of the module.
        output: the file to write.
        own: further flags of iree-opt.

    Returns:
        The output of the passes.

    Raises:
        RefusedError: the run failed, and other flags may avoid the failure.
        ToolchainError: the run failed; the message has the diagnostic.
    """
    pipeline = f"--pass-pipeline=builtin.module({passes})"
    threads = [flag for flag in flags if flag == WITHOUT_THREADS]
    arguments = [pipeline, *threads, *own, "--emit-bytecode", str(source), "-o", str(output)]
    return _finished("iree-opt", arguments, flags, source)


def _finished(tool: str, arguments: Sequence[str], flags: Sequence[str], source: Path) -> str:
    result = run_tool(tool, [UNVERIFIED[tool], *arguments])
    check_remedies(flags, result)
    if result.returncode != 0:
        result = run_tool(tool, arguments)
        check_remedies(flags, result)
    if result.returncode != 0:
        raise toolchain_error(tool, result, source)
    return result.stdout
