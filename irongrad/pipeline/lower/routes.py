"""Modules in the torch dialect -> linalg on tensors, by one of two routes.

The route `linalg` is torch-mlir's own lowering. On the route `stablehlo`, torch-mlir lowers to StableHLO
(openxla.org/stablehlo/spec), and IREE's StableHLO input pipeline lowers that to linalg. All other stages are the same,
so compiled steps differ only by the lowering. Both routes run in a separate process, to protect the user's Python.
torch-mlir 20261001 aborts on some inputs: an assertion in its scatter lowering, a division by zero for an empty matmul.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch_mlir
from iree.compiler import ir
from torch_mlir.dialects import func
from torch_mlir.ir import FunctionType, InsertionPoint, Location, Module

from irongrad.diagnostics.toolchain_errors import lowering_error, toolchain_error
from irongrad.mlir.tools import run_tool
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

# Verification between the passes takes two fifths of torch-mlir's time. `assemble` verifies the result anyway.
_UNVERIFIED = "--verify-each=false"
_BYTECODE = "--emit-bytecode"  # IREE reads bytecode in half the time of text
_MAIN = "main"


def known_route(name: str) -> str:
    """Return `name` if it is the name of a route.

    Raises:
        UserError: no route has this name.
    """
    if name not in ROUTES:
        raise UserError(f"there is no route {name!r}; the routes are {', '.join(ROUTES)}")
    return name


@dataclass(frozen=True)
class Lowered:
    """One module at each level of its lowering, as MLIR text or bytecode.

    Attributes:
        torch: the module in the torch dialect.
        linalg: the module in linalg on tensors.
        stablehlo: the module in StableHLO; empty on the route `linalg`.
    """

    torch: bytes
    linalg: bytes
    stablehlo: bytes = b""


def lower(module: Module, route: str, scratch: Path) -> Lowered:
    """Lower `module` to linalg by `route`; intermediate files stay in `scratch` if something fails.

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
    """Add an empty function `main` to `module`.

    torch-mlir 20261001 refines shapes starting from one function. It refuses a module of several functions without a
    `main`. All shapes are known here, so an empty `main` suffices.
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
    """Run torch-mlir-opt on `module`; return its input and its output."""
    command = [str(Path(torch_mlir.__path__[0]) / "_mlir_libs" / "torch-mlir-opt"), *options]
    source = output.with_name("torch.mlirbc")
    with source.open("wb") as file:
        module.operation.write_bytecode(file)
    result = _run([*command, _UNVERIFIED, *_files(source, output)])
    if result.returncode != 0:  # again, from text and verified: on invalid code the verifier may say more
        source = source.with_suffix(".mlir")
        source.write_text(module.operation.get_asm(enable_debug_info=True))
        result = _run([*command, *_files(source, output)])
    if result.returncode != 0:
        raise lowering_error(result, source)
    return source.read_bytes(), output.read_bytes()


def _from_stablehlo(source: Path) -> str:
    output = source.with_name("linalg.mlir")
    result = run_tool("iree-opt", [_FROM_STABLEHLO, *_files(source, output)])
    if result.returncode != 0:
        raise toolchain_error("iree-opt", result, source)
    return output.read_text()


def _files(source: Path, output: Path) -> list[str]:
    return ["--mlir-print-debuginfo", str(source), "-o", str(output)]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
