"""Trace the real torch.optim update into a graph.

`optimizer.step()` itself runs once under make_fx. Its hyperparameters are symbolic floats, so they become inputs of the
graph. Every in-place update is functionalised. The optimizer's own `capturable` form avoids control flow that depends
on the step count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from inspect import unwrap
from typing import Any
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

from irongrad.diagnostics.source_lines import is_user_class, place_of, user_frames
from irongrad.graph.cleanup import merge_common_subexpressions
from irongrad.graph.step_graph import StateTensor, Value
from irongrad.pipeline.capture.capture import StepModule, name_of
from irongrad.pipeline.capture.hooks import spelled, untraceable
from irongrad.pipeline.capture.side_effects import plain_values_outside
from irongrad.pipeline.differentiate.differentiate import JointStep
from irongrad.pipeline.optimizer.branches import along_all_ways
from irongrad.pipeline.optimizer.foreign import Layout, foreign_state, refuse_closures, symbolic_numbers
from irongrad.pipeline.optimizer.repeated_updates import first_alike
from irongrad.pipeline.optimizer.state import SCALAR_STATE, State, distinct, initial_state
from irongrad.runtime.errors import CaptureError, InternalError, UserError
from irongrad.runtime.manifest import Role
from irongrad.step.borrow import Record, unchanged
from irongrad.step.hyperparameters import Hyper, groups_of, hyperparameters, with_values
from irongrad.step.optimizer_slots import Slot, is_foreign, slots_of
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
    clips = {
        name: Hyper(name, name, None, -1, float(value))
        for name, value in (("clip_grad_norm", step.clip_grad_norm), ("clip_grad_value", step.clip_grad_value))
        if value is not None and value != math.inf  # which clips nothing
    }
    hypers = [*hypers, *clips.values()]
    fixed = [h for h in hypers if h.structural]
    alike = first_alike(step.optimizers, parameters, initial)
    while True:  # each round fixes at least one more hyperparameter, or ends
        free = [h for h in hypers if h not in fixed]
        graph, constant = _trace(step, parameters, names, initial, foreign, alike, free, clips)
        if not constant:
            owners = _owners(step.optimizers, parameters, initial, foreign)
            state = distinct(initial)
            return Update(graph, tuple(parameters), state, tuple(free), tuple(fixed), owners, alike, initial)
        fixed += constant


def _owners(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, torch.nn.Parameter],
    initial: State,
    foreign: Mapping[int, _Foreign],
) -> dict[str, int]:
    """The position of the optimizer that updates each parameter and state tensor, by name."""
    numbers = {id(p): i for i, o in enumerate(optimizers) for g in o.param_groups for p in g["params"]}
    owners = {name: numbers[id(p)] for name, p in parameters.items()}
    of_state = {t.name: owners.get(name, 0) for (name, _), t in initial.items()}
    return owners | of_state | {s.name: i for i, held in foreign.items() for s in held.slots}


@dataclass(frozen=True)
class _Foreign:
    """The state of an optimizer from outside torch.optim.

    Attributes:
        slots: its state, with the values before the next step.
        layout: the containers around it.
    """

    slots: Mapping[Slot, torch.Tensor]
    layout: Layout


def _foreign(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.nn.Parameter], hypers: Sequence[Hyper]
) -> dict[int, _Foreign]:
    places = frozenset(_place_of(h, optimizers)[1:] for h in hypers)
    found: dict[int, _Foreign] = {}
    for number, optimizer in enumerate(optimizers):
        if is_foreign(optimizer):
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            mine = {n: p for n, p in parameters.items() if id(p) in held}
            found[number] = _Foreign(*foreign_state(number, optimizer, mine, places))
    return found


def _place_of(hyper: Hyper, optimizers: Sequence[torch.optim.Optimizer]) -> tuple[int, str, tuple[Any, ...]]:
    """The optimizer, the owner and the path of a hyperparameter, as slots have them."""
    groups = [(number, group) for number, o in enumerate(optimizers) for group in range(len(o.param_groups))]
    number, group = groups[hyper.group]
    return number, f"group{group}", (hyper.key,) if hyper.index is None else (hyper.key, hyper.index)


def _state_of(foreign: Mapping[int, _Foreign]) -> dict[tuple[str, str], StateTensor]:
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


# In-place functions that have no functional ATen twin in torch 2.13, and those that do the same and have one.
_TWINS = {
    "absolute_": "abs_",
    "clip_": "clamp_",
    "divide_": "div_",
    "multiply_": "mul_",
    "negative_": "neg_",
    "subtract_": "sub_",
    "true_divide_": "div_",
}


def _for_each(name: str, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
    """A `torch._foreach` function, tensor by tensor: its operators take no symbolic number."""

    def of(value: Any, position: int) -> Any:
        is_list = isinstance(value, (list, tuple)) and len(value) == len(tensors)
        return value[position] if is_list else value

    results = []
    for i, tensor in enumerate(tensors):
        own, named = [of(a, i) for a in args], {k: of(v, i) for k, v in kwargs.items()}
        if name == "norm":
            results.append(torch.linalg.vector_norm(tensor, *own))
        elif hasattr(torch.Tensor, name):
            results.append(getattr(tensor, name)(*own, **named))
        else:
            others = [torch.full((), o) if isinstance(o, float | torch.SymFloat) else o for o in own]
            results.append(tensor.copy_(getattr(torch, name.removesuffix("_"))(tensor, *others, **named)))
    return None if name.endswith("_") else results


class _TracedUpdates(TorchFunctionMode):
    """Replaces functions that functionalize refuses.

    `Tensor.square_` has no functional ATen twin in torch 2.13, and the result of `Tensor.data` is not traced.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.square_:
            return args[0].mul_(args[0])
        if func is torch.Tensor.data.__get__:
            return args[0].detach()
        name = getattr(func, "__name__", "")
        if name.startswith("_foreach_"):
            return _for_each(name.removeprefix("_foreach_"), *args, **(kwargs or {}))
        if name in _TWINS and args and isinstance(args[0], torch.Tensor):
            func = getattr(torch.Tensor, _TWINS[name])
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
        # A subclass that calls super().step() enters it, for the profiler.
        stack.enter_context(mock.patch("torch.autograd.profiler.record_function", nullcontext))
        stack.enter_context(mock.patch.object(_adafactor, "min", torch.sym_min, create=True))
        stack.enter_context(mock.patch.object(_adafactor, "max", torch.sym_max, create=True))
        stack.enter_context(mock.patch.object(clip_grad, "float", lambda x: x, create=True))
        yield


def _trace(
    step: TrainStep,
    parameters: Mapping[str, torch.nn.Parameter],
    names: Mapping[int, str],
    initial: State,
    foreign: Mapping[int, _Foreign],
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
        with torch.no_grad(), _in_modules(step, names, fresh):
            _clip(list(fresh.values()), clips, traced)
            updated = {n: p for n, p in fresh.items() if n in firsts}
            for number, optimizer in enumerate(optimizers):
                own = {k: v for k, v in state.items() if (k in slots) == (number in foreign)}
                mine = _with_traced(optimizer, members[number], updated, own, hypers, traced, groups_of(optimizers))
                if number in foreign:
                    held = {slot: state[k] for k, slot in slots.items() if slot.optimizer == number}
                    new_names = foreign[number].layout.fill(optimizer, mine, held)
                    _set_hypers(optimizer, hypers, traced, groups_of(optimizers))
                else:
                    _use_forms(optimizer, started[number])
                _step_with_hooks(optimizer)
                if number in foreign:
                    found = slots_of(number, optimizer, new_names)
                    state |= {k: found[slot] for k, slot in slots.items() if slot.optimizer == number}
                    continue
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
    runs_users_code = bool(own_code) or any(map(_hooks_of, optimizers))
    try:
        with (
            unchanged([*optimizers, step.model]),
            _without_side_effects(optimizers),
            fake,
            _traceable_optimizers(),
            symbolic_numbers(own_code),
            _TracedUpdates(),
            user_frames(),
        ):
            whole = (lambda *values: along_all_ways(lambda: update(*values))) if own_code else update
            trace = make_fx(torch.func.functionalize(whole), tracing_mode="real", record_stack_traces=own)
            graph = trace(*fakes, *symbols.values())
    except UserError:
        raise
    except Exception as error:
        if not runs_users_code:
            raise
        raise _cannot_be_traced(error, optimizers) from error
    # Every parameter recomputes its group's bias corrections. Merging these here halves the time of the next stage.
    merge_common_subexpressions(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    if lost := [n.target for n in graph.graph.nodes if n.op == "get_attr"]:
        if runs_users_code:
            raise _reads_outside(optimizers)
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


@contextmanager
def _in_modules(step: TrainStep, names: Mapping[int, str], fresh: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """While open, the model's modules have the traced parameters: a hook may reach them there."""
    if not any(map(_hooks_of, step.optimizers)):
        yield
        return
    for module in step.model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and names.get(id(parameter), "") in fresh:
                module._parameters[name] = fresh[names[id(parameter)]]
    yield


def _hooks_of(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def _step_with_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Call the optimizer's step between its hooks, as the wrapper of torch.optim does."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        if _called(hook, optimizer) is not None:
            raise CaptureError(f"{spelled(hook)}\n  a pre-hook of {type(optimizer).__name__} changes step's arguments")
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)
    for hook in optimizer._optimizer_step_post_hooks.values():
        _called(hook, optimizer)


def _called(hook: Callable[..., Any], optimizer: torch.optim.Optimizer) -> Any:
    """Call a hook of an optimizer.

    Raises:
        CaptureError: it changes a hyperparameter or another Python value.
    """
    before, record = [dict(group) for group in optimizer.param_groups], Record([hook])
    result = hook(optimizer, (), {})
    what = type(optimizer).__name__
    for number, (held, group) in enumerate(zip(before, optimizer.param_groups, strict=True)):
        if changed := [k for k in group if k != "params" and group[k] is not held.get(k)]:
            raise CaptureError(
                f"{spelled(hook)}\n  a hook of {what} changes {changed[0]!r} of parameter group {number}, a Python "
                "value, which would happen once, at capture. Hyperparameters are arguments of the compiled step: "
                "compute them between steps, and pass them to train_step"
            )
    if changed_value := record.changed():
        raise CaptureError(
            f"{spelled(hook)}\n  a hook of {what} changes {changed_value}, a Python value, which would happen once, at "
            "capture. Compute with tensors alone"
        )
    return result


@contextmanager
def _without_side_effects(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """While open, a hook that changes a Python value, which would happen once at capture, raises CaptureError."""
    hooks = [(o, hook) for o in optimizers for hook in _hooks_of(o)]
    before = [plain_values_outside(hook) for _, hook in hooks]
    yield
    for (optimizer, hook), values in zip(hooks, before, strict=True):
        if changed := [n for n, v in plain_values_outside(hook).items() if values.get(n) != v]:
            raise CaptureError(
                f"{spelled(hook)}\n  a hook of {type(optimizer).__name__} changes {changed[0]}, a Python value, which "
                "would happen once, at capture. Compute with tensors alone"
            )


def _cannot_be_traced(error: Exception, optimizers: Sequence[torch.optim.Optimizer]) -> CaptureError:
    reason, what = untraceable(error), type(optimizers[0]).__name__
    if hooks := [h for o in optimizers for h in _hooks_of(o)]:
        place = place_of(error, hooks[0])
        return CaptureError(f"{place}\n  the hook {spelled(hooks[0])} of {what} cannot be compiled: {reason}")
    place = place_of(error, unwrap(type(optimizers[0]).step))
    return CaptureError(
        f"{place}\n  {what}.step cannot be compiled: {reason}. Compute with tensors, such as torch.where"
    )


def _reads_outside(optimizers: Sequence[torch.optim.Optimizer]) -> CaptureError:
    hooks = [h for o in optimizers for h in _hooks_of(o)]
    what = f"the hook {spelled(hooks[0])}" if hooks else f"{type(optimizers[0]).__name__}.step"
    return CaptureError(
        f"{what} reads a tensor that is neither a parameter in the optimizer nor in its state, and a compiled step "
        "would keep the value that it has now. Reach parameters through the optimizer's groups or the model's modules, "
        "and keep tensors in the optimizer's state"
    )


def _result(value: Any) -> torch.Tensor:
    """A new value of the state as a tensor; a number may be symbolic."""
    return value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=torch.float64)


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
