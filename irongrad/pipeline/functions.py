"""`compile_function`: the pipeline for a plain function of tensors, without state, loss or optimizer."""

from __future__ import annotations

import inspect
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta

from irongrad.pipeline import usercode
from irongrad.pipeline.assemble import assemble
from irongrad.pipeline.capture import plain_operators
from irongrad.pipeline.compile import compile_module
from irongrad.pipeline.dtypes import to_numpy
from irongrad.pipeline.eager_control_flow import eager_control_flow
from irongrad.pipeline.graphs import Function, StepGraph, Value
from irongrad.pipeline.importer import import_functions
from irongrad.pipeline.interface import describe_function
from irongrad.pipeline.oracle import NOISY_RUNS, RoundingNoise, Spread, Values
from irongrad.pipeline.package import package
from irongrad.pipeline.recurrent_layers import recurrent_layers
from irongrad.pipeline.retrace import interpret_eager, retrace
from irongrad.runtime.errors import CaptureError, UserError
from irongrad.runtime.function import CompiledFunction
from irongrad.runtime.golden import Golden, key_of
from irongrad.runtime.manifest import FunctionSpec
from irongrad.runtime.structure import Structure, flatten, unflatten
from irongrad.targets import parse_target


@dataclass(frozen=True)
class FlatFunction:
    """A user's function over flat lists of tensors.

    Attributes:
        run: flat tensors -> flat tensors; with gradients, the outputs and then the gradients.
        examples: example tensors by name.
        arguments: the structure of the user's positional arguments.
        result: the structure of what the compiled function returns.
    """

    run: Callable[..., list[torch.Tensor]]
    examples: dict[str, torch.Tensor]
    arguments: Structure
    result: Structure


def compile_function(
    fn: Callable[..., Any], example_args: Sequence[Any], *, gradients: bool = False, target: str = "llvm-cpu"
) -> CompiledFunction:
    """Compile a function of tensors, and verify it on the example arguments against eager float64.

    Functions that call `torch.func.grad`, `vjp`, `jvp`, `vmap` or `hessian` inside are functions like any other.

    Args:
        fn: takes and returns tensors, or tuples, lists and dictionaries of them. It may change its own
            intermediate tensors in place, and nothing else.
        example_args: its positional arguments. Shapes, dtypes and everything that is no tensor are compiled in; the
            values are used to verify the result.
        gradients: compile `(value, gradients)` in place of the value alone, as `jax.value_and_grad` does: `value`
            is what `fn` returns, a floating-point scalar or a tuple that begins with one; `gradients` has that
            scalar's gradient for every tensor in `example_args`, in their structure, and None for integers.
        target: what to compile for, such as `llvm-cpu` or `llvm-cpu:cpu=x86-64-v3`.

    Returns:
        A callable on numpy arrays, which `save` writes to an artifact directory.

    Raises:
        CaptureError: `fn` cannot be traced; with the user's line.
        UnsupportedOpError: it uses an operator that cannot be compiled.
        ToolchainError: torch-mlir or IREE failed.
        VerificationError: the compiled function disagrees with eager float64.
    """
    flat = flat_function(fn, tuple(example_args), gradients=gradients)
    graph = trace_function(flat, fn)
    interface = describe_function(graph)
    scratch = Path(tempfile.mkdtemp(prefix="irongrad-function-"))
    module = assemble(import_functions(graph, scratch), interface)
    compiled = compile_module(module, parse_target(target), scratch)
    golden = golden_of_function(flat, graph)
    function = FunctionSpec(flat.arguments, flat.result)
    artifact = package(module, [compiled], golden, scratch / "artifact", function)
    compiled_function = CompiledFunction(artifact.load())
    weakref.finalize(compiled_function, shutil.rmtree, scratch, ignore_errors=True)
    return compiled_function


def flat_function(fn: Callable[..., Any], arguments: tuple[Any, ...], *, gradients: bool) -> FlatFunction:
    """Name the tensors in `arguments` and find the structure of the result by running `fn` once.

    Raises:
        CaptureError: arguments or results that are neither tensors, constants nor containers of them; with
            `gradients`, a function whose first result is no floating-point scalar.
    """
    tensors, structure = _flatten(arguments, f"{usercode.where(fn)}: an argument")
    found: list[Structure] = []

    def value(*leaves: torch.Tensor) -> list[torch.Tensor]:
        outputs, result = _flatten(fn(*unflatten(structure, leaves)), f"{usercode.where(fn)}: the result")
        found[:] = [result]
        return outputs

    def value_and_gradients(*leaves: torch.Tensor) -> list[torch.Tensor]:
        inputs = [t.detach().requires_grad_(_is_differentiable(t)) for t in leaves]
        with torch.enable_grad():
            outputs = value(*inputs)
            _check_scalar(outputs, fn)
            setup_stacktrace_preservation_hooks([o.grad_fn for o in outputs[:1] if o.grad_fn is not None])
            wanted = [t for t in inputs if t.requires_grad]
            made = torch.autograd.grad(outputs[0], wanted, allow_unused=True, materialize_grads=True)
        return [o.detach() for o in outputs] + [g.detach() for g in made]

    with torch.no_grad(), plain_operators(), eager_control_flow():
        outputs = value(*(t.clone() for t in tensors))
    result = found[0]
    if gradients:
        _check_scalar(outputs, fn)
        differentiable = iter(Structure("leaf") if _is_differentiable(t) else Structure("constant") for t in tensors)
        result = Structure("tuple", (result, _replaced(structure, differentiable)))
    names = _names(fn, structure)
    run = value_and_gradients if gradients else value
    return FlatFunction(run, dict(zip(names, tensors, strict=True)), structure, result)


def trace_function(flat: FlatFunction, fn: Callable[..., Any]) -> StepGraph:
    """Trace to a step graph with the one function `call`.

    Raises:
        CaptureError: a decision on a tensor's value; with the user's line.
    """
    examples = list(flat.examples.values())
    try:
        with usercode.quiet_export(), usercode.user_frames(), plain_operators(), recurrent_layers():
            graph = _trace(flat.run, examples)
    except UserError:
        raise
    except Exception as error:
        raise usercode.capture_error(error, fn) from error
    graph = retrace(functionalize(lambda *v: list(interpret_eager(graph, v))), examples)
    arguments = tuple(Value("input", n) for n in flat.examples)
    output = next(n for n in reversed(graph.graph.nodes) if n.op == "output")
    results = tuple(Value("output", f"result{i}") for i in range(len(output.args[0])))
    return StepGraph((), (), flat.examples, {}, functions={"call": Function(graph, arguments, results)})


def _trace(run: Callable[..., list[torch.Tensor]], examples: Sequence[torch.Tensor]) -> GraphModule:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    with mode:
        fakes = [torch.empty(e.shape, dtype=e.dtype) for e in examples]
    # Under anomaly detection autograd's nodes keep the stack traces of the forward operators that made them.
    with mode, preserve_node_meta(), torch.autograd.detect_anomaly(check_nan=False):
        return make_fx(run, tracing_mode="real", record_stack_traces=True)(*fakes)


def golden_of_function(flat: FlatFunction, graph: StepGraph) -> Golden:
    """The function's exact values on its examples, and how far from them a compiled value may be."""
    names = [key_of("call", 0, r.name) for r in graph.functions["call"].results]
    exact, oracle = Values(), "float64"
    try:
        _run(flat, torch.float64, names, exact.record)
    except RuntimeError:
        oracle = "float32"  # a function with float32 constants in its code; its own run stands in
        _run(flat, None, names, exact.record)
    spread = Spread(exact)
    for seed in (None, *range(NOISY_RUNS)):
        with RoundingNoise(seed) if seed is not None else nullcontext():
            _run(flat, None, names, spread.record)
    inputs = {n: to_numpy(t) for n, t in flat.examples.items()}
    return Golden(0, oracle, inputs, exact.arrays, {n: spread.allowed(n) for n in names})


@eager_control_flow()
def _run(
    flat: FlatFunction, dtype: torch.dtype | None, names: Sequence[str], record: Callable[[str, torch.Tensor], None]
) -> None:
    values = flat.examples.values()
    with plain_operators(), torch.no_grad():
        outputs = flat.run(*(t.to(dtype) if dtype and t.is_floating_point() else t.clone() for t in values))
    for name, output in zip(names, outputs, strict=True):
        record(name, output)


def _flatten(value: Any, what: str) -> tuple[list[torch.Tensor], Structure]:
    try:
        return flatten(value, lambda part: isinstance(part, torch.Tensor))
    except TypeError as error:
        raise CaptureError(f"{what}: {error}") from None


def _is_differentiable(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _check_scalar(outputs: Sequence[torch.Tensor], fn: Callable[..., Any]) -> None:
    if not outputs or outputs[0].shape != () or not outputs[0].is_floating_point():
        shape = tuple(outputs[0].shape) if outputs else "none"
        raise CaptureError(
            f"{usercode.where(fn)}: gradients=True needs a floating-point scalar as the first result, it has shape "
            f"{shape}. Reduce it, or call torch.func.vjp inside the function"
        )


def _replaced(structure: Structure, leaves: Iterator[Structure]) -> Structure:
    if structure.kind == "leaf":
        return next(leaves)
    if structure.kind == "constant":
        return Structure("constant")
    return Structure(structure.kind, tuple(_replaced(i, leaves) for i in structure.items), structure.keys)


def _names(fn: Callable[..., Any], structure: Structure) -> list[str]:
    """A name for every tensor argument: the parameter's, with the path into it."""
    try:
        parameters = [p.name for p in inspect.signature(fn).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    except (TypeError, ValueError):  # a function written in C has no signature
        parameters = []
    names: list[str] = []

    def walk(part: Structure, name: str) -> None:
        if part.kind == "leaf":
            names.append(name)
        keys = part.keys or range(len(part.items))
        for key, item in zip(keys, part.items, strict=True):
            walk(item, f"{name}.{key}")

    for number, item in enumerate(structure.items):
        walk(item, parameters[number] if number < len(parameters) else f"arg{number}")
    return names
