"""A bundle of a JAX step -> an artifact like that of a TrainStep: `irongrad import`.

JAX has already differentiated and lowered the step. IREE's StableHLO input converts each of its programs to linalg. In
the step graph, a program is a function with known arguments and results, but without operators. Assembling, compiling,
verifying and packaging are the same as for every step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from iree.compiler import ir
from torch.fx import Graph, GraphModule

from irongrad.cache import default_store
from irongrad.diagnostics.stage_errors import reported_as
from irongrad.diagnostics.toolchain_errors import toolchain_error
from irongrad.graph.dtypes import mlir_type
from irongrad.graph.step_graph import Function, Range, StateTensor, StepGraph, Value
from irongrad.jax.bundle import Bundle, Port, read_bundle
from irongrad.mlir.tools import run_tool
from irongrad.pipeline.assemble.assemble import Part
from irongrad.pipeline.assemble.interface import describe, selected
from irongrad.pipeline.assemble.step_functions import torch_dtype
from irongrad.pipeline.backend import portable_module
from irongrad.pipeline.guards.decisions import Indices
from irongrad.pipeline.guards.range_checks import add_guards
from irongrad.pipeline.iree.compile_cached import compile_all
from irongrad.pipeline.lower.importer import ImportedStep, import_functions
from irongrad.pipeline.lower.routes import Lowered
from irongrad.pipeline.oracle.expected_values import Expected, ExpectedAtSizes
from irongrad.pipeline.package import Artifact, Origin, package, write_state
from irongrad.runtime.errors import InternalError, ToolchainError
from irongrad.runtime.manifest import STEPS, Role
from irongrad.runtime.scratch import scratch_directory
from irongrad.runtime.staging import check_output
from irongrad.targets import parse_targets

_TO_LINALG = "--iree-stablehlo-input-transformation-pipeline"
_INLINE = "--pass-pipeline=builtin.module(inline,symbol-dce)"


@reported_as("the import of a bundle")
def import_bundle(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    target: str | Sequence[str] = "llvm-cpu",
    *,
    entry_points: Sequence[str] | None = None,
    cache: bool = True,
) -> Artifact:
    """Compile a bundle of `irongrad.jax.export_step` into an artifact directory, and verify it; needs no JAX.

    Args:
        directory: the bundle.
        output: the directory to write.
        target: one target or several, as for `irongrad.compile`.
        entry_points: the entry points to include, all by default.
        cache: whether to use the cache on disk, to find IREE's earlier results and to keep new ones.

    Raises:
        ArtifactError: the bundle is damaged.
        ToolchainError: IREE cannot read or compile a module of the bundle.
        VerificationError: the compiled step disagrees with JAX in float64; nothing is written.
    """
    check_output(Path(output))
    names = [target] if isinstance(target, str) else list(target)
    targets = parse_targets(names)
    bundle = read_bundle(Path(directory))
    ranges = tuple(
        Range(s.name, s.minimum, s.maximum, s.exempt)
        for s in bundle.index.inputs
        if s.minimum is not None and s.maximum is not None
    )
    graph = add_guards(step_graph(bundle), Indices(ranges, specs=bundle.index.indices))
    interface = describe(graph, entry_points)
    graph = selected(graph, interface)
    with scratch_directory() as scratch:
        module = portable_module([Part(lowered(bundle, graph, scratch), interface)])
        store = default_store() if cache else None
        compiled = compile_all(store, module, targets, scratch)
        versions = {n: v for n, v in bundle.index.versions.items() if n in ("jax", "jaxlib")}
        origin = Origin(names, route="stablehlo", versions=versions)
        expected = {"": ExpectedAtSizes(Expected(iter((bundle.golden,))))}
        return package(module, compiled, origin, expected, write_state(module, scratch), Path(output))


def step_graph(bundle: Bundle) -> StepGraph:
    """The step graph of a bundle; its functions have no operators."""
    index = bundle.index
    state = [StateTensor(s.name, s.role, _tensor(bundle.state[s.name]), s.aliases) for s in index.state]
    state.append(StateTensor(STEPS, Role.COUNTER, torch.tensor(0)))
    inputs = {s.name: torch.zeros(s.shape, dtype=torch_dtype(s.dtype)) for s in index.inputs}
    functions = {name: opaque(name, _arguments(name, bundle), _results(name, bundle)) for name in index.programs}
    hypers = {h.name: h.default for h in index.hypers}
    return StepGraph(tuple(state), (), inputs, hypers, functions=functions)


def _tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(np.array(array).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


_COUNT = Port("state", STEPS, "int64", ())


def _arguments(name: str, bundle: Bundle) -> tuple[Port, ...]:
    """The arguments of a function: those of its program, with float64 hyperparameters; for `step`, also its count."""
    parameters = [
        replace(p, dtype="float64") if p.kind == "hyper" else p for p in bundle.index.programs[name].arguments
    ]
    return (*parameters, *([_COUNT] if name == "step" else []))


def _results(name: str, bundle: Bundle) -> tuple[Port, ...]:
    return (*bundle.index.programs[name].results, *([_COUNT] if name == "step" else []))


def opaque(name: str, arguments: Sequence[Port], results: Sequence[Port]) -> Function:
    """Create a function with known arguments and results only; its graph is the call of one stand-in operator."""
    graph = Graph()
    parameters = [graph.placeholder(f"arg{i}") for i in range(len(arguments))]
    for node, port in zip(parameters, arguments, strict=True):
        node.meta["val"] = _example(port)
    call = graph.call_function(imported, (name, *parameters))
    outputs = [graph.call_function(_result, (call, i)) for i in range(len(results))]
    for node, port in zip(outputs, results, strict=True):
        node.meta["val"] = _example(port)
    graph.output(tuple(outputs))
    values = [tuple(Value(p.kind, p.name) for p in ports) for ports in (arguments, results)]
    return Function(GraphModule({}, graph), *values)


def imported(name: str, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Stand-in for a program in a graph, because the program is not a graph of operators.

    Raises:
        InternalError: always; the program cannot run here.
    """
    raise InternalError(f"the imported program {name!r} is known to IREE only")


def _result(results: tuple[torch.Tensor, ...], index: int) -> torch.Tensor:
    return results[index]


def _example(port: Port) -> torch.Tensor:
    return torch.empty(port.shape, dtype=torch_dtype(port.dtype), device="meta")


def lowered(bundle: Bundle, graph: StepGraph, scratch: Path) -> ImportedStep:
    """Lower all functions of the graph to linalg: the bundle's programs, and the range checks.

    Raises:
        ToolchainError: IREE cannot read a module; the message has its diagnostic.
    """
    checks = {n: f for n, f in graph.functions.items() if n.startswith("check.")}
    modules = [import_functions(replace(graph, functions=checks), scratch).modules.linalg] if checks else []
    for name in (n for n in bundle.index.programs if n in graph.functions):
        inner = _to_linalg(bundle, name, scratch)
        outer = "\n".join(_wrapper(name, bundle))
        whole = _together([f"module {{\n{outer}\n}}".encode(), inner.encode()])
        modules.append(_inlined(whole, scratch / f"{name}.whole.mlir"))
    return ImportedStep(graph, Lowered(b"", _together(modules)))


def _to_linalg(bundle: Bundle, name: str, scratch: Path) -> str:
    """Lower the program `name` to linalg, as the private function `program`."""
    source = scratch / bundle.index.programs[name].file
    source.write_bytes(bundle.modules[name])
    result = run_tool("iree-opt", [_TO_LINALG, str(source)])
    if result.returncode != 0:
        error = toolchain_error("iree-opt", result, source)
        version = bundle.index.stablehlo
        raise ToolchainError(
            f"{error}\n  The {name} is StableHLO {version} of jax {bundle.index.versions.get('jax')}. If this IREE "
            "is older than that, export it with an older version, such as stablehlo_version='1.13.0'"
        )
    with ir.Context():
        module = ir.Module.parse(result.stdout)
        main, *others = list(module.body.operations)
        if others:
            raise InternalError(f"IREE did not inline {', '.join(o.name.value for o in others)} of the {name}")
        attributes = main.operation.attributes
        attributes["sym_name"] = ir.StringAttr.get("program")
        attributes["sym_visibility"] = ir.StringAttr.get("private")
        for of_values in ("arg_attrs", "res_attrs"):
            if of_values in attributes:
                del attributes[of_values]
        return str(module)


def _wrapper(name: str, bundle: Bundle) -> Iterator[str]:
    """MLIR of `graph.<name>`, which calls the program: it rounds hyperparameters to float32, and counts steps."""
    arguments, results = _arguments(name, bundle), _results(name, bundle)
    program = bundle.index.programs[name]
    parameters = ", ".join(f"%a{i}: {_type(p)}" for i, p in enumerate(arguments))
    yield f"func.func private @program({_types(program.arguments)}) -> ({_types(program.results)})"
    yield f'func.func @"graph.{name}"({parameters}) -> ({_types(results)}) {{'
    values = []
    for i, port in enumerate(program.arguments):
        values.append(f"%h{i}" if port.kind == "hyper" else f"%a{i}")
        if port.kind == "hyper":
            yield from _scalar(f"%h{i}", f"%a{i}", arguments[i], port, "arith.truncf %x : f64 to f32")
    count = len(program.results)
    signature = f"({_types(program.arguments)}) -> ({_types(program.results)})"
    yield f"%r:{count} = func.call @program({', '.join(values)}) : {signature}"
    outputs = [f"%r#{i}" for i in range(count)]
    if name == "step":
        yield "%one = arith.constant 1 : i64"
        yield from _scalar("%steps", f"%a{len(arguments) - 1}", _COUNT, _COUNT, "arith.addi %x, %one : i64")
        outputs.append("%steps")
    yield f"return {', '.join(outputs)} : {_types(results)}"
    yield "}"


def _scalar(result: str, value: str, taken: Port, made: Port, operation: str) -> Iterator[str]:
    """MLIR of a computation on a tensor of rank 0."""
    scalar = "affine_map<() -> ()>"
    source, kind = _type(taken), _type(made)
    element = kind.removeprefix("tensor<").removesuffix(">")
    yield f"{result}.empty = tensor.empty() : {kind}"
    yield f"{result} = linalg.generic {{indexing_maps = [{scalar}, {scalar}], iterator_types = []}}"
    yield f"    ins({value} : {source}) outs({result}.empty : {kind}) {{"
    yield f"^bb0(%x: {source.removeprefix('tensor<').removesuffix('>')}, %o: {element}):"
    yield f"  %y = {operation}"
    yield f"  linalg.yield %y : {element}"
    yield f"}} -> {kind}"


def _type(port: Port) -> str:
    return mlir_type(port.shape, torch_dtype(port.dtype))


def _types(ports: Sequence[Port]) -> str:
    return ", ".join(map(_type, ports))


def _together(modules: Sequence[bytes]) -> bytes:
    """Join the functions of several modules in one; a definition replaces a declaration of the same name."""
    with ir.Context():
        whole = ir.Module.parse("module {}")
        for module in modules:
            declared: Mapping[str, Any] = {op.name.value: op for op in whole.body.operations}
            part = ir.Module.parse(module)
            for function in list(part.body.operations):
                if function.name.value in declared:
                    declared[function.name.value].operation.erase()
                function.detach_from_parent()
                whole.body.append(function)
        return str(whole).encode()


def _inlined(module: bytes, source: Path) -> bytes:
    source.write_bytes(module)
    result = run_tool("iree-opt", [_INLINE, str(source)])
    if result.returncode != 0:
        raise toolchain_error("iree-opt", result, source)
    return result.stdout.encode()
