"""`train_steps`: a loop over inputs stacked along a first dimension, with one training step per slice."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.pipeline.assemble.bucket_dispatch import (
    Dispatch,
    checks_in_bucket,
    run_checked,
    run_step,
    sizes_of_call,
    value_limits,
)
from irongrad.pipeline.assemble.interface import chain_of
from irongrad.pipeline.assemble.ordering import after
from irongrad.pipeline.assemble.refusal_messages import (
    Lines,
    guards,
    indented,
    refuse_unless,
    refuse_unless_equal,
    results_of,
)
from irongrad.pipeline.assemble.shared_step_functions import Cores
from irongrad.pipeline.assemble.step_functions import call_loaded, returned_by, spec_type
from irongrad.runtime.manifest import EntryPoint, TensorSpec
from irongrad.runtime.refusals import NOT_RUN


@dataclass(frozen=True)
class _Step:
    """The code that the loops run on slice `%i` of the stacked inputs.

    Attributes:
        checked: the function that checks the values of the inputs; None if there is nothing to check.
        check: writes a call of `checked` and returns the SSA names of its results.
        run: writes one training step and returns the SSA names of its outputs. Told so, it checks the values before.
        limits: by input, the SSA names of upper limits of its values that depend on the sizes of the call.
    """

    checked: Function | None
    check: Callable[[], Generator[str, None, dict[str, str]]]
    run: Callable[[bool], Lines]
    limits: Mapping[str, Sequence[str]] = field(default_factory=dict)


def run_steps(entry: EntryPoint, graph: StepGraph, cores: Cores) -> Lines:
    """Write two loops over the stacked inputs: first all guards, so that a refusal has no effect, then the steps.

    A guard that reads what the steps change is known only when its own step begins. The second loop then has all
    guards, too: it stops at the first step that one refuses, and the state is that after the steps before it.

    Returns:
        The SSA names of the stacked losses, and of the values beside them.
    """
    yield "%c0 = arith.constant 0 : index"
    yield "%c1 = arith.constant 1 : index"
    yield from _measure_step_count(entry)
    step = (yield from _in_buckets(entry, graph)) if graph.forms else _at_fixed_sizes(entry, graph, cores)
    late = _known_late(step.checked, graph) if step.checked is not None else frozenset()
    steps = yield from _guards_of_all_steps(step, late, entry, graph)
    kinds = list(returned_by(chain_of(entry.name, graph), graph).values())
    elements = [kind.removeprefix("tensor<").removesuffix(">") for kind in kinds]
    stacks = [f"tensor<?x{element}>" for element in elements]
    for n, stack in enumerate(stacks):
        yield f"%none{n} = tensor.empty(%k) : {stack}"

    def body() -> Lines:
        rows = yield from step.run(bool(late))
        for n, (row, kind, element, stack) in enumerate(zip(rows, kinds, elements, stacks, strict=True)):
            one = f"tensor<1x{element}>"
            yield f"%row{n} = tensor.expand_shape {row} [] output_shape [1] : {kind} into {one}"
            yield f"%next{n} = tensor.insert_slice %row{n} into %acc{n}[%i][1][1] : {one} into {stack}"
        return [f"%next{n}" for n in range(len(kinds))]

    carried = [(f"%acc{n}", f"%none{n}", stack) for n, stack in enumerate(stacks)]
    return (yield from _loop("%ran", steps, carried, body()))


def _loop(result: str, steps: str, carried: Sequence[tuple[str, str, str]], body: Lines) -> Lines:
    """Run `body` for `%i` from 0 to `steps`; `carried` has the name, initial value and type of each loop-carried value.

    The loop is a scf.while, because IREE 3.13.0 fails on calls inside a scf.for. It adds tensor sizes to the arguments
    of functions, but not of such calls (ExpandTensorShapes: "'util.call' op function type mismatch").
    tests/pipeline/iree/test_toolchain_sizes.py tells when it is fixed.
    """
    names = ", ".join(["%i", *(name for name, _, _ in carried)])
    kinds = ", ".join(["index", *(kind for _, _, kind in carried)])
    begun = ", ".join(["%i = %c0", *(f"{name} = {start}" for name, start, _ in carried)])
    yield f"{result}:{len(carried) + 1} = scf.while ({begun}) : ({kinds}) -> ({kinds}) {{"
    yield f"  %more = arith.cmpi ult, %i, {steps} : index"
    yield f"  scf.condition(%more) {names} : {kinds}"
    yield "} do {"
    yield f"^bb0({', '.join(['%i: index', *(f'{name}: {kind}' for name, _, kind in carried)])}):"
    yielded = yield from indented(body)
    yield "  %after = arith.addi %i, %c1 : index"
    yield f"  scf.yield {', '.join(['%after', *yielded])} : {kinds}"
    yield "}"
    return [f"{result}#{i}" for i in range(1, len(carried) + 1)]


def _measure_step_count(entry: EntryPoint) -> Iterator[str]:
    """Define `%k`, the number of steps; refuse arguments that are stacked over another number."""
    kinds = [spec_type(s) for s in entry.inputs] + ["tensor<?xf64>"] * len(entry.hypers)
    names = [s.name for s in entry.inputs] + list(entry.hypers)
    yield f"%k = tensor.dim %arg0, %c0 : {kinds[0]}"
    for i in range(1, len(kinds)):
        yield f"%k{i} = tensor.dim %arg{i}, %c0 : {kinds[i]}"
        text = f"{names[i]} and {names[0]} are stacked over different numbers of steps (dimension 0); {NOT_RUN};"
        yield from refuse_unless_equal(entry, 0, [f"%k{i}"], ["%k"], text, f"%same{i}")


def _known_late(check: Function, graph: StepGraph) -> frozenset[str]:
    """The results of a check that are computed from state which a function of the step changes."""
    changed = {v for f in graph.functions.values() for v in f.results if v.kind == "state"}
    placeholders = [n for n in check.graph.graph.nodes if n.op == "placeholder"]
    reached = {n for n, argument in zip(placeholders, check.arguments, strict=True) if argument in changed}
    for node in check.graph.graph.nodes:
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
    results = zip(check.results, check.graph.graph.output_node().args[0], strict=True)
    return frozenset(value.name for value, node in results if node in reached)


def _guards_of_all_steps(
    step: _Step, late: Collection[str], entry: EntryPoint, graph: StepGraph
) -> Generator[str, None, str]:
    """Check every slice of the stacked inputs, and wait for the outcome once; return the SSA name of the step count.

    The results `late` are left out.
    """
    check = step.checked
    names = [value.name for value in check.results if value.name not in late] if check is not None else []
    if check is None or not names:
        return "%k"
    yield "%nothing = arith.constant dense<0> : tensor<i64>"

    def body() -> Lines:
        distances = yield from step.check()
        for i, name in enumerate(names):
            yield f"%far{i} = arith.maxui %so{i}, {distances[name]} : tensor<i64>"
        return [f"%far{i}" for i in range(len(names))]

    carried = [(f"%so{i}", "%nothing", "tensor<i64>") for i in range(len(names))]
    farthest = yield from _loop("%all", "%k", carried, body())
    distances = dict(zip(names, farthest, strict=True))
    passed = yield from refuse_unless(distances, check, entry, graph, "%passed", step.limits)
    yield from after(passed, "%steps", "%k", "index")
    return "%steps"


def _at_fixed_sizes(entry: EntryPoint, graph: StepGraph, cores: Cores) -> _Step:
    chain = chain_of(entry.name, graph)
    check = graph.functions.get(f"check.{chain[0]}")

    def checked() -> Generator[str, None, dict[str, str]]:
        assert check is not None
        values: dict[Value, str] = {}
        yield from _private_slices(entry, values)
        yield from call_loaded(f"check.{chain[0]}", check, graph, values, "%far")
        return results_of(check, "%far")

    def run(checks: bool) -> Lines:
        values: dict[Value, str] = {}
        yield from _private_slices(entry, values)
        if checks:
            yield from guards(entry, graph, values, name="%now")
        yield from _hypers(entry, values)
        yield from cores.call(chain, values, "%out")
        return cores.results(chain, "%out")

    return _Step(check, checked, run)


def _in_buckets(entry: EntryPoint, graph: StepGraph) -> Generator[str, None, _Step]:
    """All slices have the same sizes, so one bucket fits them all; conditions outside the loops choose it."""
    sizes = yield from sizes_of_call(entry, graph)
    limits = yield from value_limits(graph, sizes, "%largest")
    dispatch = Dispatch(_single_step(entry, graph), graph, sizes, "%slice", 1)

    def checked() -> Generator[str, None, dict[str, str]]:
        yield from _slices_of_own_size(entry, dispatch)
        return (yield from checks_in_bucket(dispatch))

    def run(checks: bool) -> Lines:
        values: dict[Value, str] = {}
        yield from _hypers(entry, values)
        yield from _slices_of_own_size(entry, dispatch)
        return (yield from run_step(dispatch, values, entry) if checks else run_checked(dispatch, values))

    return _Step(dispatch.check(0), checked, run, limits)


def _single_step(entry: EntryPoint, graph: StepGraph) -> EntryPoint:
    """An entry point over stacked inputs with the inputs and the outputs of one of its steps."""
    made = returned_by(chain_of(entry.name, graph), graph)
    stacks = entry.outputs[: len(made)]
    outputs = tuple(replace(_slice(spec), name=value.name) for value, spec in zip(made, stacks, strict=True))
    return replace(entry, inputs=tuple(map(_slice, entry.inputs)), outputs=outputs)


def _slice(spec: TensorSpec) -> TensorSpec:
    return replace(spec, shape=spec.shape[1:])


def _private_slices(entry: EntryPoint, values: dict[Value, str]) -> Iterator[str]:
    """Take slice `%i` of every stacked input, as a copy, so that the caller's buffer is never written.

    Each slice is behind a barrier. So the kernels are the same as those of `train_step`, and are compiled once.
    """
    for i, spec in enumerate(entry.inputs):
        yield from _sliced(f"%in{i}.s", i, spec, [str(size) for size in spec.shape[1:]])
        yield f"%in{i} = util.optimization_barrier %in{i}.s : {spec_type(_slice(spec))}"
        values[Value("input", spec.name)] = f"%in{i}"


def _slices_of_own_size(entry: EntryPoint, dispatch: Dispatch) -> Iterator[str]:
    for i, spec in enumerate(entry.inputs):
        own = dispatch.own_sizes(i)
        sizes = [own.get(d, str(size)) for d, size in enumerate(spec.shape[1:])]
        yield from _sliced(f"%slice{i}", i, spec, sizes)


def _sliced(result: str, number: int, stacked: TensorSpec, sizes: list[str]) -> Iterator[str]:
    """Take slice `%i` of argument `number`."""
    offsets = ", ".join(["%i", *("0" for _ in sizes)])
    ones = ", ".join(["1", *("1" for _ in sizes)])
    kinds = f"{spec_type(stacked)} to {spec_type(_slice(stacked))}"
    yield f"{result} = tensor.extract_slice %arg{number}[{offsets}][{', '.join(['1', *sizes])}][{ones}] : {kinds}"


def _hypers(entry: EntryPoint, values: dict[Value, str]) -> Iterator[str]:
    """Take element `%i` of every stacked hyperparameter."""
    for i, hyper in enumerate(entry.hypers, len(entry.inputs)):
        yield f"%h{i}.s = tensor.extract %arg{i}[%i] : tensor<?xf64>"
        yield f"%h{i} = tensor.from_elements %h{i}.s : tensor<f64>"
        values[Value("hyper", hyper)] = f"%h{i}"
