"""iree-compile and iree-opt on a file, without MLIR's verifier; after a failure with it, for its diagnostic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from irongrad.diagnostics.toolchain_errors import toolchain_error
from irongrad.mlir.tools import run_tool
from irongrad.pipeline.iree.remedies import check_remedies

# The verifier between IREE's passes takes a fifth of the time. What a phase is given is verified in any case.
UNVERIFIED = {"iree-compile": "--verify=false", "iree-opt": "--verify-each=false"}

# Up to its phase `stream` IREE works on functions in parallel. If one function computes and the others hand on the
# state, threads gain nothing, and setting its passes up for each of them is a fifth of the CPU time of these phases.
WITHOUT_THREADS = "--mlir-disable-threading"


def compile_file(flags: Sequence[str], source: Path, output: Path) -> None:
    """Run iree-compile on `source`.

    Raises:
        RefusedError: it failed, and other flags may help.
        ToolchainError: it failed; with its diagnostic.
    """
    _finished("iree-compile", [*flags, str(source), "-o", str(output)], flags, source)


def transform_file(passes: str, flags: Sequence[str], source: Path, output: Path) -> str:
    """Run IREE's `passes` on the module in `source` with iree-opt, which takes one of iree-compile's `flags`.

    Returns:
        What the passes print.

    Raises:
        RefusedError: it failed, and other flags may help.
        ToolchainError: it failed; with its diagnostic.
    """
    pipeline = f"--pass-pipeline=builtin.module({passes})"
    threads = [flag for flag in flags if flag == WITHOUT_THREADS]
    arguments = [pipeline, *threads, "--emit-bytecode", str(source), "-o", str(output)]
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
