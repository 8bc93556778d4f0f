"""Readable forms of every stage's output, for `--dump-dir`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch
from pathlib import Path
from typing import Any

from iree.compiler import ir
from torch_mlir import ir as torch_ir
from torch_mlir.dialects import torch as torch_dialect

from irongrad.graph.step_graph import Function, StepGraph
from irongrad.mlir.walk import parsed
from irongrad.passes.base import PassResult
from irongrad.passes.manager import PassRecord
from irongrad.pipeline.assemble.assemble import AssembledModule
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.differentiate.differentiate import JointStep
from irongrad.pipeline.lower.importer import ImportedStep
from irongrad.pipeline.oracle.expected_values import ExpectedAtSizes


def dump_stage(directory: Path, number: int, name: str, result: object) -> None:
    """Write the readable form of a stage's output as `<number>_<name>….<extension>`."""
    directory.mkdir(parents=True, exist_ok=True)
    for suffix, text in readable(result):
        (directory / f"{number:02d}_{name}{suffix}").write_text(text)


def dump_pass(directory: Path, number: int, record: PassRecord, function: Function) -> None:
    """Write a function after a pass as `<number>_<pass>.<function>.fx`."""
    directory.mkdir(parents=True, exist_ok=True)
    counts = "".join(f"# {name}: {count}\n" for name, count in record.stats.items())
    (directory / f"{number:02d}_{record.name}.{record.function}.fx").write_text(counts + _code(function))


def dump_module_pass(directory: Path, number: int, name: str, result: PassResult, module: ir.Module) -> None:
    """Write IREE's module after a pass as `<number>_<phase>.<pass>.mlir`."""
    directory.mkdir(parents=True, exist_ok=True)
    counts = "".join(f"// {stat}: {count}\n" for stat, count in result.stats.items())
    (directory / f"{number:02d}_{name}.mlir").write_text(counts + str(module))


@singledispatch
def readable(result: Any) -> Iterator[tuple[str, str]]:
    """Yield the suffix and text of each file that shows `result`; nothing for results that are shown elsewhere."""
    yield from ()


@readable.register
def _(result: dict) -> Iterator[tuple[str, str]]:  # type: ignore[type-arg]
    for step, value in result.items():
        yield from ((f".{step}{suffix}" if step else suffix, text) for suffix, text in readable(value))


@readable.register
def _(result: CapturedStep) -> Iterator[tuple[str, str]]:
    yield ".train.txt", str(result.train)
    for name, made in result.inference.items():
        yield f".{name}.txt", str(made.program)


def _code(function: Function) -> str:
    arguments = "\n".join(f"#   {a.kind} {a.name}" for a in function.arguments)
    results = "\n".join(f"#   {r.kind} {r.name}" for r in function.results)
    code = function.graph.print_readable(print_output=False, include_stride=False)
    return f"# arguments\n{arguments}\n# results\n{results}\n{code}\n"


@readable.register
def _(result: JointStep) -> Iterator[tuple[str, str]]:
    yield ".joint.fx", _code(result.joint)


@readable.register
def _(result: StepGraph) -> Iterator[tuple[str, str]]:
    for name, function in result.functions.items():
        yield f".{name}.fx", _code(function)


@readable.register
def _(result: ImportedStep) -> Iterator[tuple[str, str]]:
    yield ".torch.mlir", _torch_text(result.modules.torch)
    if result.modules.stablehlo:
        yield ".stablehlo.mlir", result.modules.stablehlo.decode()
    yield ".linalg.mlir", _text(result.modules.linalg, lines=True)


def _torch_text(module: bytes) -> str:
    """A module in the torch dialect, with the user's lines."""
    with torch_ir.Context() as context:
        torch_dialect.register_dialect(context)
        context.allow_unregistered_dialects = True  # the dialect `torch_c` has no Python bindings
        return str(torch_ir.Module.parse(module).operation.get_asm(enable_debug_info=True))


def _text(module: bytes, *, lines: bool) -> str:
    """A module in IREE's dialects as text, with the user's lines or without."""
    with parsed(module) as whole:
        return str(whole.operation.get_asm(enable_debug_info=lines))


@readable.register
def _(result: AssembledModule) -> Iterator[tuple[str, str]]:
    yield ".mlir", _text(result.bytecode, lines=False)


@readable.register
def _(result: ExpectedAtSizes) -> Iterator[tuple[str, str]]:
    golden = result.own.golden
    rows = (f"{key}\tallowed {golden.allowed[key]:.3e}\tshape {value.shape}" for key, value in golden.expected.items())
    yield ".txt", "\n".join([f"oracle {golden.oracle}, {golden.steps} steps", *rows]) + "\n"
