"""Trace the real torch.optim update into a graph.

`optimizer.step()` itself runs once under make_fx. Its hyperparameters are symbolic floats, so they become inputs of the
graph. Every in-place update is functionalised. The optimizer's own `capturable` form avoids control flow that depends
on the step count.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn.utils import clip_grad, clip_grad_norm_, clip_grad_value_
from torch.overrides import TorchFunctionMode

from irongrad.diagnostics.source_lines import is_user_class, user_frames
from irongrad.graph.cleanup import merge_common_subexpressions
from irongrad.graph.step_graph import StateTensor, Value
from irongrad.pipeline.capture.capture import StepModule, name_of
from irongrad.pipeline.differentiate.differentiate import JointStep
from irongrad.pipeline.optimizer.hyperparameters import Hyper, groups_of, hyperparameters, with_values
from irongrad.pipeline.optimizer.repeated_updates import first_alike
from irongrad.pipeline.optimizer.state import SCALAR_STATE, State, distinct, initial_state
from irongrad.runtime.errors import CaptureError, InternalError

# The hint of a symbolic float whose default is zero: any value that takes the general branch.
_NONZERO_HINT = 0.01


# Optimizers that branch on their step count unless they are `capturable`. In that form Adam, AdamW and Adamax divide by
# the step size: at a learning rate of 0 they would give NaN for a gradient of 0, where eager's default form gives 0.
_BRANCHING = (torch.optim.ASGD, torch.optim.RAdam, torch.optim.Rprop)


@dataclass(frozen=True)
class Update:
    """A traced optimizer update.

    Attributes:
        graph: takes parameters, gradients, optimizer state, the number of updates that each optimizer made, and
            hyperparameters, which are still symbolic floats. It returns the new parameters and optimizer state of the
            first of each set of alike parameters, and all gradients after clipping.
        parameters: names of the updated parameters, in order.
        state: the optimizer's state tensors, in order.
        hypers: the hyperparameters that the graph reads, in order.
        fixed: the hyperparameters on whose values the graph is specialised.
        owners: the position of the optimizer that updates each parameter and state tensor, by name.
        alike: maps each parameter to the first that is updated like it.
        initial: the optimizer's state, by parameter name and key.
    """

    graph: GraphModule
    parameters: tuple[str, ...]
    state: tuple[StateTensor, ...]
    hypers: tuple[Hyper, ...]
    fixed: tuple[Hyper, ...]
    owners: Mapping[str, int]
    alike: Mapping[str, str]
    initial: State

    @property
    def traced(self) -> tuple[Value, ...]:
        """The values that the results of `graph` stand for."""
        return traced_values(self.alike, self.initial)


def traced_values(alike: Mapping[str, str], initial: State) -> tuple[Value, ...]:
    """Return the results of the traced graph: the first of each set of alike parameters, their state, all gradients."""
    firsts = dict.fromkeys(alike.values())
    state = distinct({k: t for k, t in initial.items() if k[0] in firsts})
    updated = (*firsts, *(t.name for t in state))
    return (*(Value("state", n) for n in updated), *(Value("gradient", n) for n in alike))


def trace_update(joint: JointStep) -> Update:
    """Trace the update of every parameter that is in an optimizer and gets a gradient.

    Raises:
        CaptureError: there is no such parameter, or an optimizer's state cannot be captured.
    """
    step = joint.captured.step
    names = {id(p): n for n, p in _named_parameters(joint)}
    with_gradient = {v.name for v in joint.joint.results if v.kind == "gradient"}
    in_optimizer = {id(p) for o in step.optimizers for g in o.param_groups for p in g["params"]}
    parameters = {n: p for n, p in _named_parameters(joint) if id(p) in in_optimizer and n in with_gradient}
    if not parameters:
        raise CaptureError(
            "no parameter that the optimizer holds gets a gradient from the loss; build it from the parameters of this "
            "model, model.parameters()"
        )
    initial = initial_state(step.optimizers, parameters)
    clips = {
        name: Hyper(name, name, None, -1, float(value))
        for name, value in (("clip_grad_norm", step.clip_grad_norm), ("clip_grad_value", step.clip_grad_value))
        if value is not None
    }
    hypers = [*hyperparameters(step.optimizers), *clips.values()]
    fixed = [h for h in hypers if h.structural]
    alike = first_alike(step.optimizers, parameters, initial)
    while True:  # each round fixes at least one more hyperparameter, or ends
        free = [h for h in hypers if h not in fixed]
        graph, constant = _trace(step.optimizers, parameters, names, initial, alike, free, clips)
        if not constant:
            owners = _owners(step.optimizers, parameters, initial)
            state = distinct(initial)
            return Update(graph, tuple(parameters), state, tuple(free), tuple(fixed), owners, alike, initial)
        fixed += constant


def _owners(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.nn.Parameter], initial: State
) -> dict[str, int]:
    """The position of the optimizer that updates each parameter and state tensor, by name."""
    numbers = {id(p): i for i, o in enumerate(optimizers) for g in o.param_groups for p in g["params"]}
    owners = {name: numbers[id(p)] for name, p in parameters.items()}
    return owners | {tensor.name: owners[name] for (name, _), tensor in initial.items()}


def _named_parameters(joint: JointStep) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name_of(n), p) for n, p in StepModule(joint.captured.step).named_parameters()]


class _NoOutOfPlaceAlias(TorchFunctionMode):
    """Replaces `Tensor.square_`: it has no functional ATen twin in torch 2.13, so functionalize refuses it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.square_:
            return args[0].mul_(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def _traceable_optimizers() -> Iterator[None]:
    """While open, torch.optim's Python code keeps symbolic values symbolic.

    `is_compiling` makes it keep step counts as tensors. The builtins `min`, `max` and `float` in Adafactor and in
    gradient clipping would force a decision or a constant, so they are replaced.
    """
    from torch.optim import _adafactor

    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch.compiler.is_compiling", return_value=True))
        stack.enter_context(mock.patch.object(_adafactor, "min", torch.sym_min, create=True))
        stack.enter_context(mock.patch.object(_adafactor, "max", torch.sym_max, create=True))
        stack.enter_context(mock.patch.object(clip_grad, "float", lambda x: x, create=True))
        yield


def _trace(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, torch.nn.Parameter],
    names: Mapping[int, str],
    initial: State,
    alike: Mapping[str, str],
    hypers: Sequence[Hyper],
    clips: Mapping[str, Hyper],
) -> tuple[GraphModule, list[Hyper]]:
    """Trace the update of the first of each set of alike parameters.

    Returns:
        The graph, and the hyperparameters that the update branched on or does not read.
    """
    env = ShapeEnv()
    fake = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, static_shapes=True)
    symbols = {h: _symbolic_float(env, h) for h in hypers}
    firsts = set(alike.values())
    keys = [k for k in initial if k[0] in firsts]
    unique = distinct(initial)
    results = traced_values(alike, initial)

    def update(*values: object) -> list[torch.Tensor]:
        """Run one update; takes parameters, gradients, state, update counts and hyperparameters, in this order."""
        taken = iter(values)
        fresh = {n: next(taken).clone() for n in parameters}  # type: ignore[attr-defined]
        for parameter in fresh.values():
            parameter.grad = next(taken).clone()  # type: ignore[attr-defined]
        whole = {t.name: next(taken) for t in unique}
        state = {(n, k): _working(k, whole[initial[n, k].name]) for n, k in keys}
        update_counts: torch.Tensor = next(taken)
        traced = dict(zip(hypers, taken, strict=True))
        started = [(count > 0).to(torch.float64).item() for count in update_counts.unbind()]
        with torch.no_grad():
            _clip(list(fresh.values()), clips, traced)
            updated = {n: p for n, p in fresh.items() if n in firsts}
            for optimizer in _rebuilt(optimizers, names, updated, state, hypers, traced, started):
                step = type(optimizer).step
                getattr(step, "__wrapped__", step)(optimizer)
                for name, parameter in updated.items():
                    for key in [k for n, k in keys if n == name and parameter in optimizer.state]:
                        state[name, key] = optimizer.state[parameter][key]
        new = {Value("gradient", n): p.grad for n, p in fresh.items()}
        new |= {Value("state", n): p.detach() for n, p in updated.items()}
        new |= {Value("state", initial[k].name): state[k].to(initial[k].initial.dtype) for k in keys}
        return [new[r] for r in results]

    tensors = [p.detach() for p in parameters.values()]
    examples = [*tensors, *tensors, *(t.initial for t in unique), torch.zeros(len(optimizers), dtype=torch.int64)]
    with fake:
        fakes = [torch.empty(e.shape, dtype=e.dtype) for e in examples]
    own = any(is_user_class(type(o)) for o in optimizers)  # PyTorch's own lines tell the user nothing
    with fake, _traceable_optimizers(), _NoOutOfPlaceAlias(), user_frames():
        trace = make_fx(torch.func.functionalize(update), tracing_mode="real", record_stack_traces=own)
        graph = trace(*fakes, *symbols.values())
    # Every parameter recomputes its group's bias corrections. Merging these here halves the time of the next stage.
    merge_common_subexpressions(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    if lost := [n.target for n in graph.graph.nodes if n.op == "get_attr"]:
        raise InternalError(f"tracing the optimizer's update turned values into constants: {lost}")
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    last = placeholders[len(placeholders) - len(hypers) :]
    unread = [h for h, node in zip(hypers, last, strict=True) if not node.users]
    return graph, list(dict.fromkeys([*_branched(env, symbols), *unread]))


def _symbolic_float(env: ShapeEnv, hyper: Hyper) -> torch.SymFloat:
    source = ConstantSource(hyper.name)
    hint = hyper.default or _NONZERO_HINT
    symbol = env.create_unspecified_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=hint, source=source)


def _working(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy to update; scalar state (step counts, running products) is in float64, like eager's Python floats."""
    wide = torch.float64 if key in SCALAR_STATE else tensor.dtype
    return tensor.to(wide, copy=True)


def _clip(parameters: list[torch.Tensor], clips: Mapping[str, Hyper], traced: Mapping[Hyper, object]) -> None:
    if hyper := clips.get("clip_grad_value"):
        clip_grad_value_(parameters, traced.get(hyper, hyper.default), foreach=False)
    if hyper := clips.get("clip_grad_norm"):
        clip_grad_norm_(parameters, traced.get(hyper, hyper.default), foreach=False)


def _rebuilt(
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[int, str],
    fresh: Mapping[str, torch.nn.Parameter],
    state: Mapping[tuple[str, str], torch.Tensor],
    hypers: Sequence[Hyper],
    traced: Mapping[Hyper, object],
    started: Sequence[object],
) -> Iterator[torch.optim.Optimizer]:
    """Yield copies of the optimizers over the traced parameters, with traced state and hyperparameters."""
    group_number = {id(g): i for i, (_, g) in enumerate(groups_of(optimizers))}
    for optimizer, has_started in zip(optimizers, started, strict=True):
        twin = copy.copy(optimizer)
        twin.state = defaultdict(dict)
        twin.param_groups = []
        for group in optimizer.param_groups:
            mine = [h for h in hypers if h.group == group_number[id(group)]]
            changed = with_values(group, mine, lambda h: traced[h])
            changed["params"] = [fresh[names[id(p)]] for p in group["params"] if names.get(id(p), "") in fresh]
            if type(optimizer).__module__.startswith("torch.optim."):
                forms = {"foreach": False, "fused": False, "capturable": isinstance(optimizer, _BRANCHING)}
                changed |= {key: value for key, value in forms.items() if key in changed}
            if isinstance(optimizer, torch.optim.SGD) and changed["momentum"] != 0:
                changed["dampening"] = changed["dampening"] * has_started  # type: ignore[operator]
            twin.param_groups.append(changed)
            for original in group["params"]:
                name = names.get(id(original), "")
                if name in fresh:
                    twin.state[fresh[name]] = {k: v for (n, k), v in state.items() if n == name}
        yield twin


def _branched(env: ShapeEnv, symbols: Mapping[Hyper, torch.SymFloat]) -> list[Hyper]:
    """Hyperparameters that the traced Python branched on.

    The conditions `!= 0` and `> 0` do not count, because their general branch also holds at zero.
    """
    hyper_of = {s.node.expr: h for h, s in symbols.items()}
    found: list[Hyper] = []
    for guard in env.guards:
        free = [s for s in guard.expr.free_symbols if s in hyper_of]
        benign = isinstance(guard.expr, (sympy.Ne, sympy.Gt)) and guard.expr.rhs.is_zero
        if free and not benign:
            found += [hyper_of[s] for s in free if hyper_of[s] not in found]
    return found
