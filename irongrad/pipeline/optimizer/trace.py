"""Trace the real torch.optim update into a graph.

`optimizer.step()` itself runs once under make_fx. Its hyperparameters are symbolic floats, so they become inputs of the
graph. Every in-place update is functionalised. The optimizer's own `capturable` form avoids control flow that depends
on the step count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from irongrad.diagnostics.source_lines import is_user_class, user_frames
from irongrad.graph.cleanup import merge_common_subexpressions
from irongrad.graph.step_graph import StateTensor, Value
from irongrad.pipeline.capture.step_modules import StepModule, name_of
from irongrad.pipeline.differentiate.differentiate import JointStep
from irongrad.pipeline.optimizer.branches import TooManyWaysError
from irongrad.pipeline.optimizer.foreign import ForeignState, foreign_state, refuse_closures
from irongrad.pipeline.optimizer.foreign_step import ForeignStep
from irongrad.pipeline.optimizer.repeated_updates import first_alike
from irongrad.pipeline.optimizer.state import SCALAR_STATE, State, distinct, initial_state, steps_so_far
from irongrad.pipeline.optimizer.step_hooks import hooks_of, in_modules, step_with_hooks, without_side_effects
from irongrad.pipeline.optimizer.symbolic_numbers import symbolic_numbers
from irongrad.pipeline.optimizer.trace_errors import cannot_be_traced, reads_outside
from irongrad.pipeline.optimizer.traceable import traceable_optimizers
from irongrad.pipeline.optimizer.traced_calls import TracedCalls
from irongrad.runtime.errors import CaptureError, InternalError, UserError
from irongrad.runtime.manifest import Role
from irongrad.step.borrow import unchanged
from irongrad.step.hyperparameters import Hyper, groups_of, hyperparameters, with_values
from irongrad.step.optimizer_slots import Slot, is_foreign
from irongrad.step.train_step import TrainStep

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
    state = distinct({k: t for k, t in initial.items() if k[0] in firsts or k[0] not in alike})
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
    in_optimizer = set(map(id, step.trained))
    parameters = {n: p for n, p in _named_parameters(joint) if id(p) in in_optimizer and n in with_gradient}
    if not parameters:
        raise CaptureError(
            "no parameter that the optimizer holds gets a gradient from the loss; build it from the parameters of this "
            "model, model.parameters()"
        )
    for optimizer in step.optimizers:
        refuse_closures(optimizer)
    hypers = hyperparameters(step.optimizers)
    foreign = _foreign(step.optimizers, parameters, hypers)
    of_slots = {(s.optimizer, s.owner, s.path) for held in foreign.values() for s in held.slots}
    hypers = [h for h in hypers if _place_of(h, step.optimizers) not in of_slots]
    initial = {**initial_state(step.optimizers, parameters), **_state_of(foreign)}
    _check_starts(step.optimizers, foreign, initial)
    clips = {
        name: Hyper(name, name, None, -1, float(value))
        for name, value in (("clip_grad_norm", step.clip_grad_norm), ("clip_grad_value", step.clip_grad_value))
        if value is not None and value != math.inf  # which clips nothing
    }
    hypers = [*hypers, *clips.values()]
    keys = {key for held in foreign.values() for slot in held.slots for key in slot.path if isinstance(key, float)}
    fixed = [h for h in hypers if h.structural or h.default in keys]
    alike = first_alike(step.optimizers, parameters, initial)
    while True:  # each round fixes at least one more hyperparameter, parts the parameters, or ends
        free = [h for h in hypers if h not in fixed]
        try:
            graph, constant, unless_zero = _trace(step, parameters, names, initial, foreign, alike, free, clips)
        except TooManyWaysError:  # the decisions for one parameter need not multiply those for another
            if any(held.is_apart or not held.is_independent() for held in foreign.values()):
                raise
            foreign = {number: replace(held, is_apart=True) for number, held in foreign.items()}
            continue
        constant = constant or _discontinuous(unless_zero, step.optimizers, foreign)
        if not constant:
            owners = _owners(step.optimizers, parameters, initial, foreign)
            state = distinct(initial)
            return Update(graph, tuple(parameters), state, tuple(free), tuple(fixed), owners, alike, initial)
        fixed += constant


def _check_starts(
    optimizers: Sequence[torch.optim.Optimizer], foreign: Mapping[int, ForeignState], initial: State
) -> None:
    """Refuse a first step of one optimizer after steps of another: the compiled step counts them together."""
    fresh = [type(optimizers[number]).__name__ for number, held in foreign.items() if held.first is not None]
    if fresh and int(steps_so_far(distinct(initial))) > 0:
        raise CaptureError(
            f"{fresh[0]} has taken no step, and its first step does something else than later ones; another optimizer "
            "has taken steps. Take one eager step with each before compiling, or start with new ones"
        )


def _owners(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, torch.nn.Parameter],
    initial: State,
    foreign: Mapping[int, ForeignState],
) -> dict[str, int]:
    """The position of the optimizer that updates each parameter and state tensor, by name."""
    numbers = {id(p): i for i, o in enumerate(optimizers) for g in o.param_groups for p in g["params"]}
    owners = {name: numbers[id(p)] for name, p in parameters.items()}
    of_state = {t.name: owners.get(name, 0) for (name, _), t in initial.items()}
    return owners | of_state | {s.name: i for i, held in foreign.items() for s in held.slots}


def _foreign(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.nn.Parameter], hypers: Sequence[Hyper]
) -> dict[int, ForeignState]:
    places = frozenset(_place_of(h, optimizers)[1:] for h in hypers)
    found: dict[int, ForeignState] = {}
    for number, optimizer in enumerate(optimizers):
        if is_foreign(optimizer):
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            mine = {n: p for n, p in parameters.items() if id(p) in held}
            found[number] = foreign_state(number, optimizer, mine, places)
    return found


def _place_of(hyper: Hyper, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[int, str, tuple[Any, ...]]:
    """The optimizer, the owner and the path of a hyperparameter, as slots have them."""
    groups = [(number, group) for number, o in enumerate(optimizers) for group in range(len(o.param_groups))]
    number, group = groups[hyper.group]
    return number, f"group{group}", (hyper.key,) if hyper.index is None else (hyper.key, hyper.index)


def _state_of(foreign: Mapping[int, ForeignState]) -> dict[tuple[str, str], StateTensor]:
    """The slots as state tensors, by owner and key."""
    return {
        _key_of(slot): StateTensor(slot.name, Role.OPTIMIZER, value)
        for held in foreign.values()
        for slot, value in held.slots.items()
    }


def _key_of(slot: Slot) -> tuple[str, str]:
    _, key, owner = slot.name.split("/", 2)
    return owner, key


def _named_parameters(joint: JointStep) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name_of(n), p) for n, p in StepModule(joint.captured.step).named_parameters()]


def _trace(
    step: TrainStep,
    parameters: Mapping[str, torch.nn.Parameter],
    names: Mapping[int, str],
    initial: State,
    foreign: Mapping[int, ForeignState],
    alike: Mapping[str, str],
    hypers: Sequence[Hyper],
    clips: Mapping[str, Hyper],
) -> tuple[GraphModule, list[Hyper], list[Hyper]]:
    """Trace the update of the first of each set of alike parameters.

    Returns:
        The graph; the hyperparameters that the update branched on or does not read; those that it compared with zero.
    """
    env = ShapeEnv()
    fake = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, static_shapes=True)
    symbols = {h: _symbolic_float(env, h) for h in hypers}
    firsts = set(alike.values())
    optimizers = step.optimizers
    members = [[[names.get(id(p), "") for p in g["params"]] for g in o.param_groups] for o in optimizers]
    slots = {_key_of(slot): slot for held in foreign.values() for slot in held.slots}
    keys = [k for k in initial if k[0] in firsts or k[0] not in alike]
    counters = {k for k in slots if initial[k].initial.dtype is torch.int64 and int(initial[k].initial.min()) >= 0}
    unique = distinct(initial)
    results = traced_values(alike, initial)

    def update(*values: Any) -> list[torch.Tensor]:
        """Run one update; takes parameters, gradients, state, update counts and hyperparameters, in this order."""
        taken = iter(values)
        fresh = {n: next(taken).clone() for n in parameters}
        for parameter in fresh.values():
            parameter.grad = next(taken).clone()
        whole = {t.name: next(taken) for t in unique}
        state: dict[tuple[str, str], Any] = {}
        for owner, key in keys:
            tensor = whole[initial[owner, key].name]
            slot = slots.get((owner, key))
            if slot is not None:
                state[owner, key] = _number(tensor, (owner, key) in counters) if slot.is_number else tensor.clone()
            else:
                state[owner, key] = _working(key, tensor)
        update_counts: torch.Tensor = next(taken)
        traced = dict(zip(hypers, taken, strict=True))
        started = [(count > 0).to(torch.float64).item() for count in update_counts.unbind()]
        with torch.no_grad(), in_modules(step, names, fresh):
            _clip(list(fresh.values()), clips, traced)
            updated = {n: p for n, p in fresh.items() if n in firsts}
            for number, optimizer in enumerate(optimizers):
                if number in foreign:
                    run = ForeignStep(
                        foreign[number],
                        optimizer,
                        members[number],
                        {n: updated[n] for names in members[number] for n in names if n in updated},
                        {slot: state[k] for k, slot in slots.items() if slot.optimizer == number},
                        partial(_prepared, step, names, fresh, optimizer, hypers, traced),
                    )
                    found = run.results(update_counts[number] > 0)
                    state |= {k: found[slot] for k, slot in slots.items() if slot.optimizer == number}
                    continue
                own = {k: v for k, v in state.items() if k not in slots}
                mine = _with_traced(optimizer, members[number], updated, own, hypers, traced, groups_of(optimizers))
                _use_forms(optimizer, started[number])
                step_with_hooks(optimizer)
                for name, parameter in mine.items():
                    for key in [k for n, k in keys if n == name and parameter in optimizer.state]:
                        state[name, key] = optimizer.state[parameter][key]
        state = {k: _result(v) for k, v in state.items()}
        new = {Value("gradient", n): p.grad for n, p in fresh.items()}
        new |= {Value("state", n): p.detach() for n, p in updated.items()}
        new |= {Value("state", initial[k].name): state[k].to(initial[k].initial.dtype) for k in keys}
        return [new[r] for r in results]

    tensors = [p.detach() for p in parameters.values()]
    examples = [*tensors, *tensors, *(t.initial for t in unique), torch.zeros(len(optimizers), dtype=torch.int64)]
    with fake:
        fakes = [torch.empty(e.shape, dtype=e.dtype) for e in examples]
    own = any(is_user_class(type(o)) for o in optimizers)  # PyTorch's own lines tell the user nothing
    own_code = [o for o in optimizers if is_foreign(o)]
    runs_users_code = bool(own_code) or any(map(hooks_of, optimizers))
    try:
        with (
            unchanged([*optimizers, step.model]),
            without_side_effects(optimizers),
            fake,
            traceable_optimizers(),
            symbolic_numbers(own_code),
            TracedCalls(),
            user_frames(),
        ):
            trace = make_fx(torch.func.functionalize(update), tracing_mode="real", record_stack_traces=own)
            graph = trace(*fakes, *symbols.values())
    except UserError:
        raise
    except Exception as error:
        if not runs_users_code:
            raise
        raise cannot_be_traced(error, optimizers) from error
    # Every parameter recomputes its group's bias corrections. Merging these here halves the time of the next stage.
    merge_common_subexpressions(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    if lost := [n.target for n in graph.graph.nodes if n.op == "get_attr"]:
        if runs_users_code:
            raise reads_outside(optimizers)
        raise InternalError(f"tracing the optimizer's update turned values into constants: {lost}")
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    last = placeholders[len(placeholders) - len(hypers) :]
    unread = [h for h, node in zip(hypers, last, strict=True) if not node.users]
    branched, unless_zero = _branched(env, symbols)
    return graph, list(dict.fromkeys([*branched, *unread])), unless_zero


def _symbolic_float(env: ShapeEnv, hyper: Hyper) -> torch.SymFloat:
    source = ConstantSource(hyper.name)
    hint = hyper.default or _NONZERO_HINT
    symbol = env.create_unspecified_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=hint, source=source)


def _number(tensor: torch.Tensor, is_counter: bool) -> Any:
    """The symbolic number in a slot; a counter is not negative."""
    value = tensor.to(torch.float64).item()
    if is_counter:
        torch._check(value >= 0)
    return value


def _working(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """A copy to update; scalar state (step counts, running products) is in float64, like eager's Python floats."""
    wide = torch.float64 if key in SCALAR_STATE else tensor.dtype
    return tensor.to(wide, copy=True)


def _clip(parameters: list[torch.Tensor], clips: Mapping[str, Hyper], traced: Mapping[Hyper, object]) -> None:
    if hyper := clips.get("clip_grad_value"):
        clip_grad_value_(parameters, traced.get(hyper, hyper.default), foreach=False)
    if hyper := clips.get("clip_grad_norm"):
        clip_grad_norm_(parameters, traced.get(hyper, hyper.default), foreach=False)


def _with_traced(
    optimizer: torch.optim.Optimizer,
    members: Sequence[Sequence[str]],
    fresh: Mapping[str, torch.Tensor],
    state: Mapping[tuple[str, str], torch.Tensor],
    hypers: Sequence[Hyper],
    traced: Mapping[Hyper, object],
    groups: Sequence[tuple[torch.optim.Optimizer, dict[str, Any]]],
) -> dict[str, torch.Tensor]:
    """Give the optimizer the traced parameters, state and hyperparameters; returns its parameters by name."""
    optimizer.state = defaultdict(dict)
    mine: dict[str, torch.Tensor] = {}
    for group, held in zip(optimizer.param_groups, members, strict=True):
        group["params"] = [fresh[n] for n in held if n in fresh]
        mine |= {n: fresh[n] for n in held if n in fresh}
    for name in mine:
        optimizer.state[fresh[name]] = {k: v for (n, k), v in state.items() if n == name}
    _set_hypers(optimizer, hypers, traced, groups)
    return mine


def _set_hypers(
    optimizer: torch.optim.Optimizer,
    hypers: Sequence[Hyper],
    traced: Mapping[Hyper, object],
    groups: Sequence[tuple[torch.optim.Optimizer, dict[str, Any]]],
) -> None:
    for number, (owner, group) in enumerate(groups):
        if owner is optimizer:
            changed = with_values(group, [h for h in hypers if h.group == number], lambda h: traced[h])
            group.update(changed)


def _use_forms(optimizer: torch.optim.Optimizer, has_started: Any) -> None:
    """Choose the forms of a torch.optim optimizer that can be traced."""
    forms = {"foreach": False, "fused": False, "capturable": isinstance(optimizer, _BRANCHING)}
    for group in optimizer.param_groups:
        group.update({key: value for key, value in forms.items() if key in group})
        if isinstance(optimizer, torch.optim.SGD) and group["momentum"] != 0:
            # Eager dampens nothing in the first step, nor at a momentum of 0.
            group["dampening"] = group["dampening"] * has_started * _is_nonzero(group["momentum"])


def _is_nonzero(value: Any) -> Any:
    """1.0 for a number that is not zero, as a symbolic number if `value` is one."""
    if not isinstance(value, torch.SymFloat):
        return float(value != 0)
    return (torch.full((), value, dtype=torch.float64) != 0).to(torch.float64).item()


def _prepared(
    step: TrainStep,
    names: Mapping[int, str],
    fresh: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    hypers: Sequence[Hyper],
    traced: Mapping[Hyper, object],
    mine: Mapping[str, torch.Tensor],
) -> AbstractContextManager[object]:
    """Give an optimizer the traced hyperparameters; while open, the model's modules have the parameters `mine`."""
    _set_hypers(optimizer, hypers, traced, groups_of(step.optimizers))
    return in_modules(step, names, {**fresh, **mine})


def _result(value: Any) -> torch.Tensor:
    """A new value of the state as a tensor; a number may be symbolic."""
    return value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=torch.float64)


def _branched(env: ShapeEnv, symbols: Mapping[Hyper, torch.SymFloat]) -> tuple[list[Hyper], list[Hyper]]:
    """Hyperparameters that the traced Python branched on, and those that it compared with zero alone.

    The conditions `!= 0` and `> 0` have a general branch, which mostly holds at zero, too.
    """
    hyper_of = {s.node.expr: h for h, s in symbols.items()}
    found: tuple[dict[Hyper, None], dict[Hyper, None]] = {}, {}
    for guard in env.guards:
        with_zero = isinstance(guard.expr, (sympy.Ne, sympy.Gt)) and guard.expr.rhs.is_zero
        found[with_zero].update({hyper_of[s]: None for s in guard.expr.free_symbols if s in hyper_of})
    return list(found[False]), [h for h in found[True] if h not in found[False]]


def _discontinuous(
    hypers: Sequence[Hyper], optimizers: Sequence[torch.optim.Optimizer], foreign: Mapping[int, ForeignState]
) -> list[Hyper]:
    """Those of the hyperparameters of other packages' optimizers whose general branch does not hold at zero."""
    found = []
    for hyper in (h for h in hypers if h.group >= 0):
        number, owner, path = _place_of(hyper, optimizers)
        place = int(owner.removeprefix("group"))
        if number in foreign and not foreign[number].is_continuous_at_zero(place, path):
            found.append(hyper)
    return found
