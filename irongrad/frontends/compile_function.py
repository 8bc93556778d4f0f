"""`compile_function`: the pipeline for a plain function of tensors, without state, loss or optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._functorch._aot_autograd.logging_utils import setup_stacktrace_preservation_hooks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.traceback import preserve_node_meta

from irongrad.cache import default_store
from irongrad.diagnostics import capture_errors, source_lines
from irongrad.diagnostics.refusals import refused_together
from irongrad.diagnostics.stage_errors import reported_as
from irongrad.frontends.function_arguments import (
    argument_names,
    check_dense,
    check_differentiable,
    check_scalar,
    check_unwritten,
    flatten_tensors,
    is_differentiable,
    replaced,
)
from irongrad.graph.dtypes import to_numpy
from irongrad.graph.eager_control_flow import eager_control_flow
from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.graph.subgraphs import check_control_flow
from irongrad.operators.decompositions.recurrent import loops_for
from irongrad.operators.decompositions.registry import BeforeAutograd
from irongrad.operators.legalize.complex_numbers import in_reals, refuse_complex
from irongrad.operators.legalize.legality import check_operators, check_values
from irongrad.operators.legalize.retrace import interpret_eager, retrace
from irongrad.operators.random import Draws
from irongrad.pipeline.assemble.interface import describe_function
from irongrad.pipeline.backend import optimised_function, portable_function
from irongrad.pipeline.capture.modes import inference_as_no_grad
from irongrad.pipeline.capture.plain_operators import plain_operators
from irongrad.pipeline.capture.recurrent_layers import recurrent_layers
from irongrad.pipeline.capture.repeatable import Kind, Program, Recorder, refuse_unrepeatable
from irongrad.pipeline.capture.selected_rows import refuse_selected
from irongrad.pipeline.capture.without_value_reads import ValueFree
from irongrad.pipeline.guards.function_indices import function_indices, guarded
from irongrad.pipeline.iree.compile_cached import compile_once
from irongrad.pipeline.memory_report import usages_of
from irongrad.pipeline.oracle.eager_float64 import eager_float64
from irongrad.pipeline.oracle.expected_values import Expected, ExpectedAtSizes
from irongrad.pipeline.oracle.oracle import Spread, Values
from irongrad.pipeline.oracle.rounding_noise import RoundingNoise
from irongrad.pipeline.oracle.substitutes import Substitutes
from irongrad.pipeline.package import Origin, package, write_state
from irongrad.pipeline.step_record import step_record
from irongrad.runtime.errors import CaptureError, UnsupportedOpError
from irongrad.runtime.function import CompiledFunction
from irongrad.runtime.golden import Golden, key_of
from irongrad.runtime.manifest import SEED, FunctionSpec
from irongrad.runtime.scratch import scratch_directory
from irongrad.runtime.structure import Structure, unflatten
from irongrad.step.borrow import Record, unchanged
from irongrad.targets import Ability, parse_target

# A function of flat tensors.
Run: TypeAlias = Callable[..., list[torch.Tensor]]


@dataclass(frozen=True)
class FlatFunction:
    """A user's function over flat lists of tensors.

    Attributes:
        run: maps flat tensors to flat tensors; with gradients, the outputs are first, the gradients last.
        examples: example tensors by name; the seed is the last one, if the function draws random numbers.
        arguments: the structure of the user's positional arguments.
        result: the structure of what the compiled function returns.
    """

    run: Run
    examples: dict[str, torch.Tensor]
    arguments: Structure
    result: Structure


@reported_as("the compilation of a function")
def compile_function(
    fn: Callable[..., Any],
    example_args: Sequence[Any],
    *,
    gradients: bool = False,
    target: str = "llvm-cpu",
    cache: bool = True,
) -> CompiledFunction:
    """Compile a function of tensors, and verify it on the example arguments against eager float64.

    The function runs as it would in eager where `compile_function` is called: under `torch.no_grad` or
    `torch.inference_mode` if they are set there, and with arguments that require a gradient if the examples do. It may
    call `torch.autograd.grad`, and `torch.func.grad`, `vjp`, `jvp`, `vmap` or `hessian`. A function that draws random
    numbers becomes a function of a seed: `compiled(x, seed=3)`, 0 by default.

    Args:
        fn: takes and returns tensors, or tuples, lists and dictionaries of them. It may change its own
            intermediate tensors in place, and nothing else.
        example_args: its positional arguments. Shapes, dtypes and arguments that are not tensors are compiled in. The
            values of tensors are used to verify the result.
        gradients: compile `(value, gradients)` instead of the value alone, like `jax.value_and_grad`. `value` is the
            result of `fn`: a floating-point scalar, or a tuple that begins with one. `gradients` has the structure of
            `example_args`: the scalar's gradient for every tensor, and None for integers.
        target: the target to compile for, such as `llvm-cpu` or `llvm-cpu:cpu=x86-64-v3`.
        cache: whether to use the cache on disk, to find IREE's earlier results and to keep new ones.

    Returns:
        A callable on numpy arrays, which `save` writes to an artifact directory.

    Raises:
        CaptureError: `fn` cannot be traced; the message has the user's line.
        UnsupportedOpError: `fn` uses an operator that cannot be compiled.
        ToolchainError: torch-mlir or IREE failed.
        VerificationError: the compiled function disagrees with eager float64.
    """
    mode = Mode.of_caller()
    with torch.inference_mode(False):  # tensors made in it have no versions
        flat = flat_function(fn, tuple(example_args), gradients=gradients, mode=mode)
        return _compiled(flat, fn, example_args, target, cache=cache)


def _compiled(
    flat: FlatFunction, fn: Callable[..., Any], example_args: Sequence[Any], target: str, *, cache: bool
) -> CompiledFunction:
    refuse_unrepeatable(Program("the function", fn, partial(_lent, fn, example_args), partial(_recorded, flat)))
    chosen = parse_target(target)
    with refused_together(), loops_for(has_kernels=Ability.LOOPS in chosen.abilities):
        graph = trace_function(flat, fn)
        check_operators(graph)
    traced = graph
    graph, passes = optimised_function(traced, chosen)
    interface = describe_function(graph)
    expected = {"": ExpectedAtSizes(Expected(golden_runs_of_function(flat, graph)))}
    with ExitStack() as stack:
        directory = stack.enter_context(scratch_directory())
        with scratch_directory() as scratch:
            module = portable_function(graph, interface, scratch)
            compiled = compile_once(default_store() if cache else None, module, chosen, scratch)
            record = step_record(
                {"": traced}, {"": graph}, {"": interface}, (), {"": usages_of(graph, [chosen.backend])}
            )
            origin = Origin([target], passes, function=FunctionSpec(flat.arguments, flat.result), record=record)
            initial = write_state(module, scratch)
            artifact = package(module, [compiled], origin, expected, initial, directory / "artifact")
        result = CompiledFunction(artifact.load())
        weakref.finalize(result, stack.pop_all().close)
    return result


@contextmanager
def _lent(*roots: object) -> Iterator[Record]:
    """While open, the function may run; on exit, it and its arguments are as before."""
    with unchanged(roots) as record:
        record.lend_memory(None)
        yield record


def _recorded(flat: FlatFunction, record: Recorder) -> None:
    with plain_operators(), eager_control_flow(), BeforeAutograd(eager=True):
        for output in flat.run(*(t.clone() for t in flat.examples.values())):
            record(output, Kind.RESULT)


@dataclass(frozen=True)
class Mode:
    """Autograd's mode at the start of a run.

    Attributes:
        recording: whether autograd records operators.
        inference: whether it is `torch.inference_mode`, which a trace replaces by `torch.no_grad`.
    """

    recording: bool = True
    inference: bool = False

    @classmethod
    def of_caller(cls) -> Mode:
        """The mode that is set now."""
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    def around(self, run: Run, followed: Sequence[bool]) -> Run:
        """`run` in this mode, on tensors that require a gradient where `followed` says so."""

        def in_mode(*tensors: torch.Tensor) -> list[torch.Tensor]:
            leaves = [t.detach().requires_grad_() if f else t for t, f in zip(tensors, followed, strict=True)]
            with torch.inference_mode() if self.inference else torch.set_grad_enabled(self.recording):
                return run(*leaves)

        return in_mode


def flat_function(
    fn: Callable[..., Any], arguments: tuple[Any, ...], *, gradients: bool, mode: Mode | None = None
) -> FlatFunction:
    """Name the tensors in `arguments` and find the structure of the result by running `fn` once.

    `mode` is that of each run, by default the caller's. With `gradients` autograd records each run.

    Raises:
        CaptureError: an argument or result is neither a tensor, a constant nor a container of them; or, with
            `gradients`, the first result is not a floating-point scalar.
    """
    tensors, structure = flatten_tensors(arguments, f"{source_lines.where(fn)}: an argument")
    found: list[Structure] = []

    def value(*leaves: torch.Tensor) -> list[torch.Tensor]:
        outputs, result = flatten_tensors(fn(*unflatten(structure, leaves)), f"{source_lines.where(fn)}: the result")
        refuse_selected(outputs)
        found[:] = [result]
        return outputs

    def detached(*leaves: torch.Tensor) -> list[torch.Tensor]:
        return [o.detach() if o.requires_grad else o for o in value(*leaves)]

    def value_and_gradients(*leaves: torch.Tensor) -> list[torch.Tensor]:
        """The results of `fn`, and the gradients of its first result for all floating-point and complex inputs."""
        outputs = value(*leaves)
        check_scalar(outputs, fn)
        setup_stacktrace_preservation_hooks([o.grad_fn for o in outputs[:1] if o.grad_fn is not None])
        wanted = [t for t in leaves if t.requires_grad]
        grads = torch.autograd.grad(outputs[0], wanted, allow_unused=True, materialize_grads=True)
        return [o.detach() for o in outputs] + [g.detach() for g in grads]

    names = argument_names(fn, structure)
    check_dense(fn, dict(zip(names, tensors, strict=True)))
    followed = [is_differentiable(t) if gradients else t.requires_grad for t in tensors]
    mode = Mode() if gradients else mode or Mode.of_caller()
    tensors = [t.clone() if t.is_inference() else t.detach() for t in tensors]
    copies: list[torch.Tensor] = []
    with _located(fn), plain_operators(), eager_control_flow(), Draws(0, 0) as drawn:
        copies += (t.clone() for t in tensors)
        outputs = mode.around(value, followed)(*copies)
    check_unwritten(fn, dict(zip(names, copies, strict=True)))
    if not outputs:
        raise CaptureError(f"{source_lines.where(fn)}: the function returns no tensor, so there is nothing to compile")
    result = found[0]
    if gradients:
        check_scalar(outputs, fn)
        check_differentiable(tensors, fn)
        differentiable = iter(Structure("leaf") if is_differentiable(t) else Structure("constant") for t in tensors)
        result = Structure("tuple", (result, replaced(structure, differentiable)))
    run = mode.around(value_and_gradients if gradients else detached, followed)
    examples = dict(zip(names, tensors, strict=True))
    if drawn.used:
        run, examples[SEED] = _seeded(run), torch.tensor(0)
    return FlatFunction(run, examples, structure, result)


def _seeded(run: Run) -> Run:
    """`run` with the seed of its random numbers as the last argument."""

    def seeded(*tensors: torch.Tensor) -> list[torch.Tensor]:
        *leaves, seed = tensors
        with Draws(seed, 0):
            return run(*leaves)

    return seeded


@contextmanager
def _located(fn: Callable[..., Any]) -> Iterator[None]:
    """Begin the message of an error in a run of `fn` with the line of `fn` that raised it."""
    try:
        yield
    except UnsupportedOpError as error:
        raise UnsupportedOpError(f"{source_lines.place_of(error, fn)}: {error}") from error
    except Exception as error:
        raise capture_errors.capture_error(error, fn) from error


def trace_function(flat: FlatFunction, fn: Callable[..., Any]) -> StepGraph:
    """Trace to a step graph with the function `call`, and with range checks of its arguments that are indices.

    Raises:
        CaptureError: the function branches on a tensor's value; the message has the user's line.
    """
    refuse_complex(flat.examples)
    examples = list(flat.examples.values())
    try:
        with (
            source_lines.quiet_export(),
            plain_operators(),
            recurrent_layers(),
            BeforeAutograd(),
            inference_as_no_grad(),
        ):
            traced = _trace(flat.run, examples)
            check_control_flow(traced)  # the gradient of a while_loop takes values too
            check_values(traced)
            traced = in_reals(traced)
        indices, early = function_indices(traced, list(flat.examples), lambda: _functional(traced, examples))
        graph = _functional(traced, examples, decompose=True)
    except Exception as error:
        raise capture_errors.capture_error(error, fn) from error
    arguments = tuple(Value("input", n) for n in flat.examples)
    count = len(graph.graph.output_node().args[0])
    results = tuple(Value("output", f"result{i}") for i in range(count))
    step = StepGraph((), (), flat.examples, {}, functions={"call": Function(graph, arguments, results)})
    return guarded(step, indices, early)


def _functional(traced: GraphModule, examples: Sequence[torch.Tensor], *, decompose: bool = False) -> GraphModule:
    """The same function in a graph in which nothing writes into memory."""
    return retrace(functionalize(lambda *v: list(interpret_eager(traced, v))), examples, decompose=decompose)


def _trace(run: Run, examples: Sequence[torch.Tensor]) -> GraphModule:
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(allow_dynamic_output_shape_ops=False))
    with mode:
        fakes = [torch.empty(e.shape, dtype=e.dtype) for e in examples]
    # Under anomaly detection autograd's nodes keep the stack traces of the forward operators that made them.
    anomaly = torch.autograd.detect_anomaly(check_nan=False)
    frames = source_lines.user_frames(), source_lines.forward_frames()
    with ValueFree(), mode, frames[0], frames[1], preserve_node_meta(), anomaly:
        return make_fx(run, tracing_mode="real", record_stack_traces=True)(*fakes)


def golden_runs_of_function(flat: FlatFunction, graph: StepGraph) -> Iterator[Golden]:
    """Yield the exact values on the examples, after each run with the tolerances for compiled values so far."""
    names = [key_of("call", 0, r.name) for r in graph.functions["call"].results]
    exact, oracle = Values(), "float64"
    try:
        with eager_float64():
            _run(flat, torch.float64, names, exact.record)
    except (RuntimeError, TypeError, ValueError):
        oracle = "float32"  # the function's code needs float32; its own run stands in
        _run(flat, None, names, exact.record)
    inputs = {n: to_numpy(t) for n, t in flat.examples.items()}
    spread = Spread(exact, rounded=oracle != "float64")

    def run(seed: int | None) -> None:
        with RoundingNoise(seed) if seed is not None else nullcontext():
            _run(flat, None, names, spread.record)

    for allowed in spread.widened_by(run):
        yield Golden(0, oracle, inputs, exact.arrays, allowed)


@eager_control_flow()
def _run(
    flat: FlatFunction, dtype: torch.dtype | None, names: Sequence[str], record: Callable[[str, torch.Tensor], None]
) -> None:
    values = flat.examples.values()
    with plain_operators(), BeforeAutograd(eager=True), Substitutes():
        given = [t.to(dtype) if dtype and t.is_floating_point() else t for t in values]
        outputs = flat.run(*(t.clone() for t in given))
    for name, output in zip(names, outputs, strict=True):
        record(name, output)
