"""The exported functions of the module: guards, copies of the caller's tensors, and a call of a core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from irongrad.graph.step_graph import StepGraph, Value
from irongrad.pipeline.assemble.bucket_dispatch import run_in_bucket
from irongrad.pipeline.assemble.function_calls import return_line
from irongrad.pipeline.assemble.interface import chain_of
from irongrad.pipeline.assemble.refusal_messages import Lines, guards, indented
from irongrad.pipeline.assemble.relied_values import refuse_other_values
from irongrad.pipeline.assemble.shard_functions import refuse_parts
from irongrad.pipeline.assemble.shared_step_functions import VIEW, Cores
from irongrad.pipeline.assemble.split_step_state import closed, closed_if_any, is_open, opened
from irongrad.pipeline.assemble.stacked_steps import run_steps
from irongrad.pipeline.assemble.step_functions import spec_type
from irongrad.pipeline.assemble.storage import Storage, accumulated, accumulator, quoted, symbol, tensor_type
from irongrad.runtime.manifest import STEPS_DIM, TRAIN_AND_EXPORT, EntryPoint, Role, TensorSpec


def _arguments(entry: EntryPoint) -> str:
    hyper = "tensor<?xf64>" if entry.is_stacked else "f64"
    named = [(s.name, spec_type(s)) for s in entry.inputs] + [(h, hyper) for h in entry.hypers]
    return ", ".join(f'%arg{i}: {kind} {{iree.abi.name = "{quoted(n)}"}}' for i, (n, kind) in enumerate(named))


def entry_point(entry: EntryPoint, graph: StepGraph, cores: Cores) -> Iterator[str]:
    """Write the exported function of an entry point as lines of MLIR."""
    if entry.name == TRAIN_AND_EXPORT:
        yield from _state_function(entry, graph)
    results = ", ".join(f'{spec_type(s)} {{iree.abi.name = "{quoted(s.name)}"}}' for s in entry.outputs)
    yield f"  func.func @{_symbol(entry)}({_arguments(entry)}) -> ({results}) {{"
    body = {
        "train_steps": _train_steps,
        TRAIN_AND_EXPORT: _train_and_export,
        "apply_step": _apply_step,
        "forward": _forward,
        "finish_step": _finish_step,
        "export_state": _export_state,
        "import_state": _import_state,
        "export_gradients": _export_gradients,
        "import_gradients": _import_gradients,
        "reset": _reset,
        "reset_carry": _reset_carry,
    }.get(entry.name, _run_once)
    yield from (f"    {line}" for line in body(entry, graph, cores))
    yield "  }"


def _symbol(entry: EntryPoint) -> str:
    return f'"{entry.symbol}"' if entry.step else entry.symbol


def _private(value: str, kind: str, name: str) -> Iterator[str]:
    """Copy a tensor, as `name`, in a way that IREE cannot see through, so that it never reuses the tensor's buffer."""
    yield f"{name}.c = flow.tensor.clone {value} : {kind}"
    yield f"{name} = util.optimization_barrier {name}.c : {kind}"


def _copied(value: str, kind: str, name: str) -> Iterator[str]:
    """Copy a tensor, as `name`, between the state and a caller's buffer."""
    yield f"{name} = flow.tensor.clone {value} : {kind}"


def _run_once(entry: EntryPoint, graph: StepGraph, cores: Cores) -> Iterator[str]:
    """The body of `train_step`, `grad_step`, `eval_step`, `predict`, `call` and the user's own entry points."""
    values: dict[Value, str] = {}
    yield from _hypers(entry, values)
    if graph.is_sized(chain_of(entry.name, graph)[0]):
        names = yield from run_in_bucket(entry, graph, values)
    else:
        names = yield from _run_at_fixed_sizes(entry, graph, cores, values)
    if entry.name == "grad_step":
        yield f"%n0 = util.global.load {accumulated(graph)} : i64"
        yield "%one = arith.constant 1 : i64"
        yield "%n1 = arith.addi %n0, %one : i64"
        yield f"util.global.store %n1, {accumulated(graph)} : i64"
    if not names:  # a segment of a placed step that only stores
        yield from _return_steps(graph)
        return
    kinds = [spec_type(s) for s in entry.outputs]
    for i in _stored(entry, graph):  # IREE cannot return a buffer that a global owns
        yield from _private(names[i], kinds[i], f"%given{i}")
        names[i] = f"%given{i}"
    yield return_line(names, kinds)


def _stored(entry: EntryPoint, graph: StepGraph) -> list[int]:
    """The positions of the outputs of a segment of a placed step that it also stores, or that a global holds."""
    if entry.name not in graph.entries:
        return []
    function = graph.functions[entry.name]
    nodes = function.graph.graph.output_node().args[0]
    pairs = [*zip(function.results, nodes, strict=True)]
    held = {node for value, node in pairs if value.kind != "output"}
    given = [node for value, node in pairs if value.kind == "output"]
    return [i for i, node in enumerate(given) if node in held or node.op == "placeholder"]


def _run_at_fixed_sizes(entry: EntryPoint, graph: StepGraph, cores: Cores, values: dict[Value, str]) -> Lines:
    chain = chain_of(entry.name, graph)
    for i, spec in enumerate(entry.inputs):
        yield from _private(f"%arg{i}", spec_type(spec), f"%in{i}")
        values[Value("input", entry.key(spec.name))] = f"%in{i}"
    yield from guards(entry, graph, values)
    yield from cores.call(chain, values, "%out")
    return cores.results(chain, "%out")


def _train_steps(entry: EntryPoint, graph: StepGraph, cores: Cores) -> Iterator[str]:
    losses = yield from run_steps(entry, graph, cores)
    yield return_line(losses, [spec_type(s) for s in entry.outputs])


def _train_and_export(entry: EntryPoint, graph: StepGraph, cores: Cores) -> Iterator[str]:
    losses = yield from run_steps(entry, graph, cores)
    state = entry.outputs[len(losses) :]
    yield f"%state:{len(state)} = func.call {_of_state(graph)}() : () -> ({', '.join([VIEW] * len(state))})"
    for i, spec in enumerate(state):
        yield f"%new{i} = hal.tensor.import %state#{i} : {VIEW} -> {spec_type(spec)}"
    yield return_line([*losses, *(f"%new{i}" for i in range(len(state)))], [spec_type(s) for s in entry.outputs])


def _of_state(graph: StepGraph) -> str:
    return f'@"trained.{graph.prefix}state"'


def _state_function(entry: EntryPoint, graph: StepGraph) -> Iterator[str]:
    """Write the function that returns the state after a loop.

    IREE 3.13.0 does not see that a loop stores globals: behind it, in the same function, a load gives the value before
    the loop. tests/pipeline/iree/test_toolchain.py tells when it is fixed.
    """
    state = [s for s in entry.outputs if s.shape[:1] != (STEPS_DIM,)]
    kinds = [spec_type(s) for s in state]
    yield f"  func.func private {_of_state(graph)}() -> ({', '.join([VIEW] * len(state))}) attributes {{noinline}} {{"
    names = yield from indented(indented(_copies([("state", s) for s in state], graph)))
    for i, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        yield f"    %view{i} = hal.tensor.export {name} : {kind} -> {VIEW}"
    yield return_line([f"%view{i}" for i in range(len(state))], [VIEW] * len(state), indent="    ")
    yield "  }"


def _forward(entry: EntryPoint, graph: StepGraph, cores: Cores) -> Iterator[str]:
    names = yield from _run_at_fixed_sizes(entry, graph, cores, {})
    kinds = [spec_type(s) for s in entry.outputs]
    for i, name in enumerate(names):
        yield from _private(name, kinds[i], f"%given{i}")  # IREE cannot return a buffer that a global owns
    ticket = yield from opened()
    yield return_line([*(f"%given{i}" for i in range(len(names))), ticket], kinds)


def _finish_step(entry: EntryPoint, graph: StepGraph, cores: Cores) -> Iterator[str]:
    chain = chain_of(entry.name, graph)
    passed = yield from is_open("%arg0")
    values: dict[Value, str] = {}
    yield from _hypers(entry, values)
    for i, spec in enumerate(entry.inputs[1:], 1):
        yield from _private(f"%arg{i}", spec_type(spec), f"%in{i}")
        values[Value("input", spec.name)] = f"%in{i}"
    yield from guards(entry, graph, values, passed)
    yield from cores.call(chain, values, "%out")
    yield from closed()
    yield return_line(cores.results(chain, "%out"), [spec_type(s) for s in entry.outputs])


def _hypers(entry: EntryPoint, values: dict[Value, str]) -> Iterator[str]:
    """Convert scalar hyperparameters to rank-0 tensors, and add these to `values`."""
    for i, hyper in enumerate(entry.hypers, len(entry.inputs)):
        yield f"%h{i} = tensor.from_elements %arg{i} : tensor<f64>"
        values[Value("hyper", hyper)] = f"%h{i}"


def _apply_step(entry: EntryPoint, graph: StepGraph, cores: Cores) -> Iterator[str]:
    yield f"%n = util.global.load {accumulated(graph)} : i64"
    yield "%zero = arith.constant 0 : i64"
    yield "%some = arith.cmpi sgt, %n, %zero : i64"
    yield 'cf.assert %some, "no gradients are accumulated; call grad_step first"'
    yield "%nf = arith.sitofp %n : i64 to f64"
    yield "%count = tensor.from_elements %nf : tensor<f64>"
    values = {Value("count", "accumulated"): "%count"}
    yield from _hypers(entry, values)
    yield from cores.call(chain_of("apply_step", graph), values, "%out")
    yield from _clear(graph)
    yield from _return_steps(graph)


def _clear(graph: StepGraph) -> Iterator[str]:
    """Reset the gradient accumulators of a step to zero, if the module has any."""
    if not graph.gradients:
        return
    for i, name in enumerate(graph.gradients):
        kind = tensor_type(graph.tensor(name).initial)
        yield f"%clear.{graph.prefix}{i} = arith.constant dense<0.0> : {kind}"
        yield f"util.global.store %clear.{graph.prefix}{i}, {accumulator(graph, name)} : {kind}"
    yield f"%clear.{graph.prefix}n = arith.constant 0 : i64"
    yield f"util.global.store %clear.{graph.prefix}n, {accumulated(graph)} : i64"


def _export_state(entry: EntryPoint, graph: StepGraph, cores: Cores) -> Iterator[str]:
    yield from _export([("state", s) for s in entry.outputs], (), graph)


def _export_gradients(entry: EntryPoint, graph: StepGraph, cores: Cores) -> Iterator[str]:
    tail = (f"%n = util.global.load {accumulated(graph)} : i64", "%count = tensor.from_elements %n : tensor<i64>")
    yield from _export([("accumulator", s) for s in entry.outputs[:-1]], tail, graph)


def _export(specs: Sequence[tuple[str, TensorSpec]], tail: Sequence[str], graph: StepGraph) -> Iterator[str]:
    names = yield from _copies(specs, graph)
    yield from tail
    kinds = [spec_type(s) for _, s in specs]
    names += ["%count"] if tail else []
    yield f"return {', '.join(names)} : {', '.join(kinds + (['tensor<i64>'] if tail else []))}"


def _copies(specs: Sequence[tuple[str, TensorSpec]], graph: StepGraph) -> Lines:
    """Copy stored values, each of a kind of `Value`; return the SSA names of the copies."""
    storage = Storage(graph)
    kinds = [spec_type(spec) for _, spec in specs]
    for i, (kind, spec) in enumerate(specs):
        yield from storage.load(f"%g{i}", Value(kind, spec.name), kinds[i])
    names = [f"%g{i}" for i in range(len(specs))]
    if any(kind == "state" for kind, _ in specs):
        names = yield from refuse_parts(graph, names, kinds)
    for i, name in enumerate(names):
        yield from _copied(name, kinds[i], f"%o{i}")
    return [f"%o{i}" for i in range(len(specs))]


def _import_state(entry: EntryPoint, graph: StepGraph, cores: Cores) -> Iterator[str]:
    names = yield from refuse_other_values(entry, graph)
    yield from _import([("state", s) for s in entry.inputs], graph, names)
    yield from closed_if_any(graph)
    yield from _return_steps(graph)


def _return_steps(graph: StepGraph) -> Iterator[str]:
    # The no-op maximum makes IREE copy the counter: IREE 3.13.0 cannot return a buffer that a global still owns. If the
    # count went through the host, it would be overwritten before the update has used the old count.
    yield f"%steps = util.global.load {symbol('state', graph.counter)} : tensor<i64>"
    yield "%least = arith.constant dense<0> : tensor<i64>"
    yield "%result = arith.maxsi %steps, %least : tensor<i64>"
    yield "return %result : tensor<i64>"


def _import_gradients(entry: EntryPoint, graph: StepGraph, cores: Cores) -> Iterator[str]:
    last = len(entry.inputs) - 1
    yield f"%n = tensor.extract %arg{last}[] : tensor<i64>"
    yield from _import([("accumulator", s) for s in entry.inputs[:-1]], graph, [f"%arg{i}" for i in range(last)])
    yield f"util.global.store %n, {accumulated(graph)} : i64"
    yield "%count = tensor.from_elements %n : tensor<i64>"
    yield "return %count : tensor<i64>"


def _import(specs: Sequence[tuple[str, TensorSpec]], graph: StepGraph, names: Sequence[str]) -> Iterator[str]:
    """Copy arguments, by their SSA names, into the storage of the values `specs`, each of a kind of `Value`."""
    storage = Storage(graph)
    for i, (name, (kind, spec)) in enumerate(zip(names, specs, strict=True)):
        yield from _copied(name, spec_type(spec), f"%i{i}")
        yield from storage.replace(f"%i{i}", Value(kind, spec.name), spec_type(spec))


def _reset(entry: EntryPoint, graph: StepGraph, cores: Cores) -> Iterator[str]:
    yield from Storage(graph).reset()
    for one in cores.accumulating:
        yield from _clear(one)
    yield from closed_if_any(graph)
    yield from _return_steps(graph)


def _reset_carry(entry: EntryPoint, graph: StepGraph, cores: Cores) -> Iterator[str]:
    yield from Storage(graph).reset({Role.CARRIED})
    yield from _return_steps(graph)
