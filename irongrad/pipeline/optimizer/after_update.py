"""Trace what the user's `after_step` does to the state, as a function of the state and of its numbers.

The function runs under make_fx on the user's own modules. Wherever it reaches one of their tensors, through a module, a
list or a closure, the trace has another tensor in its place. Decisions on counters are traced both ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from irongrad.diagnostics.source_lines import place_of, user_frames, where
from irongrad.graph.cleanup import merge_common_subexpressions
from irongrad.graph.step_graph import Relied, Value
from irongrad.operators.random import is_random
from irongrad.pipeline.capture.hooks import untraceable
from irongrad.pipeline.capture.hyper_reads import hyper_reads_refused
from irongrad.pipeline.capture.step_modules import StepModule
from irongrad.pipeline.differentiate.state_names import StateNames
from irongrad.pipeline.guards.update_indices import prove_indices
from irongrad.pipeline.optimizer.branches import along_all_ways
from irongrad.pipeline.optimizer.changed_tensors import Changes, changes_of
from irongrad.pipeline.optimizer.hyper_symbols import branched, symbolic_float
from irongrad.pipeline.optimizer.traceable import traceable_optimizers
from irongrad.pipeline.optimizer.traced_calls import TracedCalls
from irongrad.runtime.errors import CaptureError, UserError
from irongrad.runtime.manifest import STEPS
from irongrad.step.after_step import AfterStep
from irongrad.step.borrow import roots_of, unchanged
from irongrad.step.hyperparameters import Hyper
from irongrad.step.train_step import TrainStep

aten = torch.ops.aten


@dataclass(frozen=True)
class AfterUpdate:
    """What happens to the state after an update.

    Attributes:
        graph: takes `arguments`, of which the hyperparameters are symbolic floats, and returns `results`.
        arguments: state, the number of updates so far (this one included), and hyperparameters.
        results: the state that changes.
        hypers: the numbers of the user's functions that are inputs of the step.
        fixed: those on whose values the functions decide, or that they do not read.
        relied: what proofs on its indices rely on of other state, by name.
    """

    graph: GraphModule
    arguments: tuple[Value, ...]
    results: tuple[Value, ...]
    hypers: tuple[Hyper, ...]
    fixed: tuple[Hyper, ...]
    relied: Mapping[str, Relied] = field(default_factory=dict)

    @property
    def changed(self) -> frozenset[str]:
        """The names of the state that changes."""
        return frozenset(value.name for value in self.results)


def trace_after(step: TrainStep) -> AfterUpdate | None:
    """Trace all of a step's `after_step`; None if it has none.

    Raises:
        CaptureError: a function cannot be traced, or changes something that is no state of the step.
    """
    if not step.after:
        return None
    tensors = _tensors(step)
    changes = [changes_of(step, after, tensors) for after in step.after]
    hypers = [Hyper(n, n, None, -1, default) for after in step.after for n, default in after.numbers.items()]
    fixed: list[Hyper] = []
    while True:  # each round fixes at least one more number, or ends
        free = [h for h in hypers if h not in fixed]
        traced = _Trace(step, tensors, free)
        graph, decided = traced.graph()
        if not decided:
            return _checked(traced, graph, changes, tuple(fixed))
        fixed += decided


def _tensors(step: TrainStep) -> dict[str, torch.Tensor]:
    """The tensors of the step's modules, by the names of the state."""
    module = StepModule(step)
    names = StateNames(module)
    found = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {names.of(path): tensor for path, tensor in reversed(found)}


@dataclass(frozen=True)
class _Trace:
    """One trace of all functions.

    Attributes:
        step: the step.
        tensors: the tensors of its modules, by name.
        hypers: the numbers that are symbolic.
    """

    step: TrainStep
    tensors: Mapping[str, torch.Tensor]
    hypers: Sequence[Hyper]

    @property
    def arguments(self) -> list[Value]:
        """What the placeholders of the graph stand for."""
        state = [Value("state", name) for name in (*self.tensors, STEPS)]
        return [*state, *(Value("hyper", h.name) for h in self.hypers)]

    def graph(self) -> tuple[GraphModule, list[Hyper]]:
        """The graph, with a result for every tensor, and the numbers that cannot stay inputs of it."""
        env = ShapeEnv()
        symbols = {h: symbolic_float(env, h) for h in self.hypers}
        mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, static_shapes=True)
        with mode:
            fakes = [torch.empty(t.shape, dtype=t.dtype) for t in self.tensors.values()]
            fakes.append(torch.zeros((), dtype=torch.int64))
        with (
            unchanged(roots_of(self.step)),
            hyper_reads_refused(self.step.optimizers),
            mode,
            traceable_optimizers(),
            TracedCalls(),
            user_frames(),
        ):
            trace = make_fx(torch.func.functionalize(self._run), tracing_mode="real", record_stack_traces=True)
            graph = trace(*fakes, *symbols.values())
        merge_common_subexpressions(graph)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        last = placeholders[len(placeholders) - len(symbols) :]
        unread = [h for h, node in zip(symbols, last, strict=True) if not node.users]
        decided, at_zero = branched(env, symbols)
        return graph, list(dict.fromkeys([*decided, *at_zero, *unread]))

    def _run(self, *values: Any) -> list[torch.Tensor]:
        count = values[len(self.tensors)]
        numbers = {h.name: v for h, v in zip(self.hypers, values[len(self.tensors) + 1 :], strict=True)}
        current = list(values[: len(self.tensors)])
        for after in self.step.after:
            new = along_all_ways(partial(self._changed, after, current, numbers))
            if after.every > 1:
                due = count.remainder(after.every) == 0
                new = [torch.where(due, n, old) for n, old in zip(new, current, strict=True)]
            current = new
        return current

    def _changed(self, after: AfterStep, values: Sequence[torch.Tensor], numbers: Mapping[str, Any]) -> list[Any]:
        """Run a function on copies of the values."""
        copies = [value.clone() for value in values]
        places = {id(tensor): copy for tensor, copy in zip(self.tensors.values(), copies, strict=True)}
        with _tensors_put_back(self.step), _refused(after), _InPlaceOf(places):
            after.run(self.step.model, numbers, self.step.modules.values(), traced=True)
        return copies


@contextmanager
def _tensors_put_back(step: TrainStep) -> Iterator[None]:
    """On exit, the step's modules hold their own tensors again: `self.count += 1` assigns the traced one."""
    held = [(tensors, dict(tensors)) for m in StepModule(step).modules() for tensors in (m._parameters, m._buffers)]
    try:
        yield
    finally:
        for tensors, before in held:
            tensors.clear()
            tensors.update(before)


@contextmanager
def _refused(after: AfterStep) -> Iterator[None]:
    """Raise an error of the function as a CaptureError with the user's line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise CaptureError(
            f"{place_of(error, after.function)}\n  after_step cannot be compiled: {untraceable(error)}. It may change "
            "tensors of the model, and of TrainStep.modules, by operations on tensors"
        ) from error


class _InPlaceOf(TorchFunctionMode):
    """Gives functions other tensors in place of a module's own ones.

    Attributes:
        places: the tensor in place of each, by its id.
    """

    def __init__(self, places: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.places = places
        self._compared: dict[Any, tuple[torch.Tensor, Any]] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        args, kwargs = tree_map(self._placed, (args, kwargs or {}))
        if func is torch.Tensor.data.__set__:
            return args[0].copy_(args[1])
        name = getattr(func, "__name__", "")
        if name.strip("_") in _COMPARISONS and len(args) == 2 and _is_counter(args[0]):
            # Each comparison of a counter would be a decision of its own, of which a loop makes many.
            key = (name.strip("_"), id(args[0]), str(args[1]))
            if key not in self._compared:
                self._compared[key] = (args[0], func(*args, **kwargs))
            return self._compared[key][1]
        result = func(*args, **kwargs)
        if args and _is_counter(args[0]) and (name.endswith("_") or name.startswith("__i")):
            self._compared.clear()
        return result

    def _placed(self, value: Any) -> Any:
        return self.places.get(id(value), value) if isinstance(value, torch.Tensor) else value


_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})


def _is_counter(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_floating_point()


def _checked(traced: _Trace, graph: GraphModule, changes: Sequence[Changes], fixed: tuple[Hyper, ...]) -> AfterUpdate:
    """Leave only what changes in the graph, and refuse one that loses or adds something."""
    function = traced.step.after[0].function
    for node in graph.graph.nodes:
        if node.op == "call_function" and is_random(node.target):
            raise CaptureError(
                f"{where(function)}: after_step draws random numbers. Draw them in the model or the loss"
            )
        if node.op == "get_attr":
            raise CaptureError(
                f"{where(function)}: after_step reads a tensor that is neither in the model nor in TrainStep.modules, "
                "and a compiled step would keep its present value. Hand its module over: modules={'target': target}"
            )
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    output = graph.graph.output_node()
    named = zip(traced.tensors, placeholders, output.args[0], strict=False)
    new = {name: result for name, old, result in named if _source(result) is not old}
    _refuse_lost(traced.step, changes, new)
    for name, result in new.items():
        value, old = result.meta["val"], traced.tensors[name]
        if value.shape != old.shape or value.dtype != old.dtype:
            raise CaptureError(
                f"{where(function)}: after_step makes {name} {value.dtype} of shape {tuple(value.shape)}; it is "
                f"{old.dtype} of shape {tuple(old.shape)}, and a compiled step's state keeps both"
            )
    output.args = ([*new.values()],)
    graph.graph.eliminate_dead_code()
    kept = {n: v for n, v in zip(placeholders, traced.arguments, strict=True) if n.users}
    for node in placeholders:
        if node not in kept:
            graph.graph.erase_node(node)
    graph.recompile()
    results = tuple(Value("state", name) for name in new)
    names = {node: v.name for node, v in kept.items() if v.kind == "state" and v.name != STEPS}
    values = {node: traced.tensors[name].detach() for node, name in names.items()}
    known = {node: value for node, value in values.items() if names[node] not in new}
    changed = [(node, value, new[names[node]]) for node, value in values.items() if names[node] in new]
    relied = prove_indices(graph, known, changed)
    of_state = {names[node]: what for node, what in relied.items()}
    return AfterUpdate(graph, tuple(kept.values()), results, tuple(traced.hypers), fixed, of_state)


def _refuse_lost(step: TrainStep, changes: Sequence[Changes], new: Mapping[str, Node]) -> None:
    """Refuse a change that eager makes and the trace has not."""
    for after, made in zip(step.after, changes, strict=True):
        if lost := [name for name in made.names if name not in new]:
            raise CaptureError(
                f"{where(after.function)}: after_step changes {lost[0]} in a way that a trace does not see. Change it "
                "in place, by an operation on the tensor, such as copy_"
            )


def _source(node: Node) -> Node:
    """The value that a node copies, or that it selects whatever the condition is."""
    while node.op == "call_function":
        if node.target in (aten.clone.default, aten.alias.default, aten.detach.default):
            node = node.all_input_nodes[0]
        elif node.target is aten.where.self and _source(node.args[1]) is _source(node.args[2]):
            node = _source(node.args[1])
        else:
            return node
    return node
