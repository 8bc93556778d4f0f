"""Modules in the torch dialect -> linalg on tensors, by one of two routes.

`linalg` is torch-mlir's own lowering. `stablehlo` has torch-mlir lower to StableHLO (openxla.org/stablehlo/spec), and
IREE's StableHLO input lower that, so what differs between the two is all that differs in the compiled step. Both run in
a process of their own: torch-mlir 20261001 ends the whole process on some inputs (an assertion in its scatter lowering,
a division by zero for an empty matmul), which must not take the user's Python with it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch_mlir
from iree.compiler import ir
from iree.compiler.tools import binaries as iree_binaries
from torch_mlir.dialects import func
from torch_mlir.ir import FunctionType, InsertionPoint, Location, Module

from irongrad.diagnostics.toolchain_errors import lowering_error, toolchain_error
from irongrad.runtime.errors import IronGradError, UnsupportedOpError, UserError

ROUTES = ("linalg", "stablehlo")
_TO_LINALG = (
    "builtin.module(torchdynamo-export-to-torch-backend-pipeline,torch-backend-to-linalg-on-tensors-backend-pipeline)"
)
_TO_STABLEHLO = (
    "builtin.module(torchdynamo-export-to-torch-backend-pipeline,"
    "torch-backend-to-stablehlo-backend-pipeline{enable-static-shape=true})"
)
_FROM_STABLEHLO = "--iree-stablehlo-input-transformation-pipeline"

# Between its passes, where it takes two fifths of torch-mlir's time: what comes out is verified when it is assembled.
_UNVERIFIED = "--verify-each=false"
_BYTECODE = "--emit-bytecode"  # IREE reads it in half the time of text
_MAIN = "main"


def known_route(name: str) -> str:
    """`name`, which is a route's.

    Raises:
        UserError: it is none's.
    """
    if name not in ROUTES:
        raise UserError(f"there is no route {name!r}; the routes are {', '.join(ROUTES)}")
    return name


@dataclass(frozen=True)
class Lowered:
    """A module on its way down, as MLIR text or bytecode.

    Attributes:
        torch: in the torch dialect.
        linalg: in linalg on tensors.
        stablehlo: in StableHLO; empty on the route without it.
    """

    torch: bytes
    linalg: bytes
    stablehlo: bytes = b""


def lower(module: Module, route: str, scratch: Path) -> Lowered:
    """Lower `module` to linalg; intermediate files are left in `scratch` when something fails.

    Raises:
        UnsupportedOpError: an operator cannot be lowered with its arguments on this route; with the user's line.
        ToolchainError: torch-mlir or IREE fails otherwise; with its diagnostic and the user's line.
    """
    if route == "linalg":
        options = [f"--pass-pipeline={_TO_LINALG}", _BYTECODE]
        return Lowered(*_torch_mlir_opt(module, options, scratch / "linalg.mlirbc"))
    _add_main(module)
    try:
        torch, stablehlo = _torch_mlir_opt(module, [f"--pass-pipeline={_TO_STABLEHLO}"], scratch / "stablehlo.mlir")
    except IronGradError as error:
        raise UnsupportedOpError(f"{error}. This is the route over StableHLO; compile with --route linalg") from error
    linalg = _without_main(_from_stablehlo(scratch / "stablehlo.mlir"))
    return Lowered(torch, linalg.encode(), stablehlo)


def _add_main(module: Module) -> None:
    """Give `module` a function that does nothing.

    torch-mlir 20261001 refines shapes, which are all known here, from one function of a module, and refuses one of
    several functions and no `main`.
    """
    with Location.unknown(module.context), InsertionPoint.at_block_begin(module.body):
        function = func.FuncOp(_MAIN, FunctionType.get([], []))
        with InsertionPoint(function.add_entry_block()):
            func.ReturnOp([])


def _without_main(text: str) -> str:
    with ir.Context():
        module = ir.Module.parse(text)
        (main,) = (op for op in module.body.operations if ir.StringAttr(op.attributes["sym_name"]).value == _MAIN)
        main.operation.erase()
        return str(module.operation.get_asm(enable_debug_info=True))


def _torch_mlir_opt(module: Module, options: Sequence[str], output: Path) -> tuple[bytes, bytes]:
    """Run torch-mlir on `module`. Returns what it read, and what it wrote."""
    command = [str(Path(torch_mlir.__path__[0]) / "_mlir_libs" / "torch-mlir-opt"), *options]
    source = output.with_name("torch.mlirbc")
    with source.open("wb") as file:
        module.operation.write_bytecode(file)
    result = _run([*command, _UNVERIFIED], source, output)
    if result.returncode != 0:  # again, for a verifier may say more than what failed on invalid code; and from text
        source = source.with_suffix(".mlir")
        source.write_text(module.operation.get_asm(enable_debug_info=True))
        result = _run(command, source, output)
    if result.returncode != 0:
        raise lowering_error(result, source)
    return source.read_bytes(), output.read_bytes()


def _from_stablehlo(source: Path) -> str:
    output = source.with_name("linalg.mlir")
    result = _run([iree_binaries.find_tool("iree-opt"), _FROM_STABLEHLO], source, output)
    if result.returncode != 0:
        raise toolchain_error("iree-opt", result, source)
    return output.read_text()


def _run(command: list[str], source: Path, output: Path) -> subprocess.CompletedProcess[str]:
    command = [*command, "--mlir-print-debuginfo", str(source), "-o", str(output)]
    return subprocess.run(command, capture_output=True, text=True, check=False)
