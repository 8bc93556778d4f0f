"""Trace the real torch.optim update into a graph.

`optimizer.step()` itself runs once under make_fx. Its hyperparameters are symbolic floats, so they become inputs of the
graph. Every in-place update is functionalised. The optimizer's own `capturable` form avoids control flow that depends
on the step count.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from irongrad.diagnostics.source_lines import is_user_class, user_frames
from irongrad.graph.cleanup import merge_common_subexpressions
from irongrad.graph.step_graph import StateTensor, Value
from irongrad.pipeline.capture.step_modules import StepModule, name_of
from irongrad.pipeline.differentiate.differentiate import JointStep
from irongrad.pipeline.guards.update_indices import prove_indices
from irongrad.pipeline.optimizer.branches import TooManyWaysError
from irongrad.pipeline.optimizer.foreign import ForeignState, foreign_state
from irongrad.pipeline.optimizer.foreign_step import ChangedSlotsError
from irongrad.pipeline.optimizer.hyper_symbols import branched, symbolic_float
from irongrad.pipeline.optimizer.optimizer_step import OptimizerStep, key_of, traced_values
from irongrad.pipeline.optimizer.own_step import refuse_closures
from irongrad.pipeline.optimizer.repeated_updates import first_alike
from irongrad.pipeline.optimizer.state import State, distinct, initial_state, steps_so_far
from irongrad.pipeline.optimizer.step_hooks import hooks_of, without_side_effects
from irongrad.pipeline.optimizer.symbolic_numbers import symbolic_numbers
from irongrad.pipeline.optimizer.trace_errors import cannot_be_traced, reads_outside
from irongrad.pipeline.optimizer.traceable import traceable_optimizers
from irongrad.pipeline.optimizer.traced_calls import TracedCalls
from irongrad.runtime.errors import CaptureError, InternalError, UserError
from irongrad.runtime.manifest import Role
from irongrad.step.borrow import unchanged
from irongrad.step.hyperparameters import Hyper, hyperparameters
from irongrad.step.optimizer_slots import Slot, is_foreign


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


def trace_update(joint: JointStep) -> Update:
    """Trace the update of every parameter that is in an optimizer and gets a gradient.

    Raises:
        CaptureError: there is no such parameter, or an optimizer's state cannot be captured.
    """
    changing: frozenset[Slot] = frozenset()
    while True:  # each round finds more of the state, or ends
        try:
            return _traced_update(joint, changing)
        except ChangedSlotsError as error:
            if error.slots <= changing:
                raise
            changing |= error.slots


def _traced_update(joint: JointStep, changing: frozenset[Slot]) -> Update:
    """Trace the update; the numbers in the slots `changing` of optimizers from outside torch.optim are state."""
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
    foreign = _foreign(step.optimizers, parameters, hypers, changing)
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
        update = OptimizerStep(step, parameters, names, initial, foreign, alike, free, clips)
        try:
            graph, constant, unless_zero = _trace(update)
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
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, torch.nn.Parameter],
    hypers: Sequence[Hyper],
    changing: frozenset[Slot],
) -> dict[int, ForeignState]:
    places = frozenset(_place_of(h, optimizers)[1:] for h in hypers)
    found: dict[int, ForeignState] = {}
    for number, optimizer in enumerate(optimizers):
        if is_foreign(optimizer):
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            mine = {n: p for n, p in parameters.items() if id(p) in held}
            found[number] = foreign_state(number, optimizer, mine, places, changing)
    return found


def _place_of(hyper: Hyper, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[int, str, tuple[Any, ...]]:
    """The optimizer, the owner and the path of a hyperparameter, as slots have them."""
    groups = [(number, group) for number, o in enumerate(optimizers) for group in range(len(o.param_groups))]
    number, group = groups[hyper.group]
    return number, f"group{group}", (hyper.key,) if hyper.index is None else (hyper.key, hyper.index)


def _state_of(foreign: Mapping[int, ForeignState]) -> dict[tuple[str, str], StateTensor]:
    """The slots as state tensors, by owner and key."""
    return {
        key_of(slot): StateTensor(slot.name, Role.OPTIMIZER, value)
        for held in foreign.values()
        for slot, value in held.slots.items()
    }


def _named_parameters(joint: JointStep) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name_of(n), p) for n, p in StepModule(joint.captured.step).named_parameters()]


def _trace(update: OptimizerStep) -> tuple[GraphModule, list[Hyper], list[Hyper]]:
    """Trace the update of the first of each set of alike parameters.

    Returns:
        The graph; the hyperparameters that the update branched on or does not read; those that it compared with zero.
    """
    env = ShapeEnv()
    symbols = {h: symbolic_float(env, h) for h in update.hypers}
    graph = _graph_of(update, env, list(symbols.values()))
    # Every parameter recomputes its group's bias corrections. Merging these here halves the time of the next stage.
    merge_common_subexpressions(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    if lost := [n.target for n in graph.graph.nodes if n.op == "get_attr"]:
        if _runs_users_code(update.step.optimizers):
            raise reads_outside(update.step.optimizers)
        raise InternalError(f"tracing the optimizer's update turned values into constants: {lost}")
    prove_indices(graph)
    placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
    last = placeholders[len(placeholders) - len(symbols) :]
    unread = [h for h, node in zip(symbols, last, strict=True) if not node.users]
    decided, unless_zero = branched(env, symbols)
    return graph, list(dict.fromkeys([*decided, *unread])), unless_zero


def _graph_of(update: OptimizerStep, env: ShapeEnv, symbols: Sequence[torch.SymFloat]) -> GraphModule:
    """Run the update under make_fx, on fake tensors and on `symbols` for its hyperparameters."""
    optimizers = update.step.optimizers
    fake = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, static_shapes=True)
    examples = update.examples()
    with fake:
        fakes = [torch.empty(e.shape, dtype=e.dtype) for e in examples]
    own = any(is_user_class(type(o)) for o in optimizers)  # PyTorch's own lines tell the user nothing
    try:
        with (
            unchanged([*optimizers, update.step.model]),
            without_side_effects(optimizers),
            fake,
            traceable_optimizers(),
            symbolic_numbers([o for o in optimizers if is_foreign(o)]),
            TracedCalls(),
            user_frames(),
        ):
            trace = make_fx(torch.func.functionalize(update.run), tracing_mode="real", record_stack_traces=own)
            return trace(*fakes, *symbols)
    except UserError:
        raise
    except Exception as error:
        if not _runs_users_code(optimizers):
            raise
        raise cannot_be_traced(error, optimizers) from error


def _runs_users_code(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    return any(is_foreign(o) or hooks_of(o) for o in optimizers)


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
