"""JointStep -> StepGraph: the real torch.optim update, traced, and joined to the joint graph.

`optimizer.step()` itself is run once under make_fx. Its hyperparameters are symbolic floats, so they end up as
inputs of the graph; every in-place update is functionalised. Control flow in the optimizer that depends on
the step count is avoided by its own `capturable` form.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
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

from irongrad.pipeline.capture import StepModule
from irongrad.pipeline.differentiate import JointStep, name_of
from irongrad.pipeline.graphs import Function, StateTensor, StepGraph, Value
from irongrad.pipeline.hyper import Hyper, groups_of, hyperparameters, with_values
from irongrad.pipeline.retrace import interpret, retrace
from irongrad.pipeline.scalars import ScalarsToTensors
from irongrad.runtime.errors import CaptureError, InternalError
from irongrad.runtime.manifest import STEPS, Role

# State that is one number for a parameter of any shape, and rises in lockstep within a parameter group.
_SCALAR_STATE = frozenset({"step", "mu_product", "mu", "eta"})

# The hint that a symbolic float is traced with when its default is zero: any value that takes the general branch.
_NONZERO_HINT = 0.01

COUNT = Value("count", "accumulated")


@dataclass(frozen=True)
class Update:
    """A traced optimizer update.

    Attributes:
        graph: parameters, gradients, optimizer state, the step count and hyperparameters -> new parameters
            and new optimizer state; hyperparameters are still symbolic floats.
        parameters: names of the updated parameters, in order.
        state: the optimizer's state tensors, in order.
        hypers: the hyperparameters that the graph reads, in order.
        fixed: those it was specialised on.
    """

    graph: GraphModule
    parameters: tuple[str, ...]
    state: tuple[StateTensor, ...]
    hypers: tuple[Hyper, ...]
    fixed: tuple[Hyper, ...]


def add_optimizer(joint: JointStep) -> StepGraph:
    """Trace the update and build the functions of the step graph.

    Raises:
        CaptureError: an optimizer whose state or update cannot be captured, or a hyperparameter that has the
            name of an input.
    """
    update = trace_update(joint)
    steps = StateTensor(STEPS, Role.COUNTER, _steps_so_far(update.state))
    state = (*joint.state, *update.state, steps)
    inputs = joint.captured.step.inputs
    hypers = {h.name: h.default for h in update.hypers}
    if clash := sorted(set(hypers) & set(inputs)):
        raise CaptureError(f"inputs {clash} have the names of the optimizer's hyperparameters; rename the inputs")
    functions = {
        "joint": _joint_function(joint, update),
        "update": _update_function(joint, update),
        "accumulate": _accumulate_function(joint, update),
        "mean": _mean_function(joint, update),
        "eval": joint.eval,
    }
    if joint.predict is not None:
        functions["predict"] = joint.predict
    fixed = {h.name: h.default for h in update.fixed}
    return StepGraph(state, update.parameters, inputs, hypers, fixed, functions)


def trace_update(joint: JointStep) -> Update:
    """Trace the update of every parameter that is in an optimizer and gets a gradient."""
    step = joint.captured.step
    names = {id(p): n for n, p in _named_parameters(joint)}
    with_gradient = {v.name for v in joint.joint.results if v.kind == "gradient"}
    held = {id(p) for o in step.optimizers for g in o.param_groups for p in g["params"]}
    parameters = {n: p for n, p in _named_parameters(joint) if id(p) in held and n in with_gradient}
    if not parameters:
        raise CaptureError("no parameter that the optimizer holds gets a gradient from the loss")
    initial = _initial_state(step.optimizers, parameters)
    clips = {
        name: Hyper(name, name, None, -1, float(value))
        for name, value in (("clip_grad_norm", step.clip_grad_norm), ("clip_grad_value", step.clip_grad_value))
        if value is not None
    }
    hypers = [*hyperparameters(step.optimizers), *clips.values()]
    fixed = [h for h in hypers if h.structural]
    while True:  # each round fixes at least one more hyperparameter, or ends
        free = [h for h in hypers if h not in fixed]
        graph, constant = _trace(step.optimizers, parameters, names, initial, free, clips)
        if not constant:
            return Update(graph, tuple(parameters), _unique(initial), tuple(free), tuple(fixed))
        fixed += constant


def _unique(state: Mapping[tuple[str, str], StateTensor]) -> tuple[StateTensor, ...]:
    return tuple({t.name: t for t in state.values()}.values())


def _named_parameters(joint: JointStep) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name_of(n), p) for n, p in StepModule(joint.captured.step).named_parameters()]


def _steps_so_far(state: Sequence[StateTensor]) -> torch.Tensor:
    """The step count that an optimizer's own state implies: its `step`, or 1 where momentum is not zero."""
    counts = [int(t.initial.max()) for t in state if t.name.startswith("optimizer/step/")]
    started = any(t.name.startswith("optimizer/momentum_buffer/") and bool(t.initial.any()) for t in state)
    return torch.tensor(max([*counts, int(started)]), dtype=torch.int64)


# --- the optimizer's state before its first step ------------------------------------------------------------------


def _initial_state(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.nn.Parameter]
) -> dict[tuple[str, str], StateTensor]:
    """What each optimizer holds for each parameter before its next step, by parameter name and key."""
    originals = list(parameters.values())
    copies, twins = copy.deepcopy((list(optimizers), originals))
    for optimizer in copies:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
    for twin in twins:
        twin.grad = torch.zeros_like(twin)
    result: dict[tuple[str, str], StateTensor] = {}
    for optimizer in copies:
        _initialise(optimizer)
        for name, twin in zip(parameters, twins, strict=True):
            for key, value in optimizer.state.get(twin, {}).items():
                if isinstance(value, torch.Tensor):
                    full = f"optimizer/{key}/{name}"
                    result[name, key] = StateTensor(full, Role.OPTIMIZER, value.detach().clone().contiguous())
    return _shared_scalars(result, _group_of(copies, parameters, twins))


def _group_of(
    optimizers: Sequence[torch.optim.Optimizer], names: Iterable[str], tensors: Iterable[torch.Tensor]
) -> dict[str, int]:
    """The number of the parameter group that holds each parameter."""
    numbers = {id(p): i for i, (_, g) in enumerate(groups_of(optimizers)) for p in g["params"]}  # type: ignore[union-attr]
    return {n: numbers[id(t)] for n, t in zip(names, tensors, strict=True)}


def _shared_scalars(
    state: dict[tuple[str, str], StateTensor], group_of: Mapping[str, int]
) -> dict[tuple[str, str], StateTensor]:
    """Let parameters of one group share their step counts and other scalar state, which change in lockstep.

    One counter in place of hundreds is one kernel in place of hundreds. The other names become aliases.
    """
    owners: dict[tuple[str, int, float], list[tuple[str, str]]] = {}
    for (name, key), tensor in state.items():
        if key in _SCALAR_STATE:
            owners.setdefault((key, group_of[name], float(tensor.initial)), []).append((name, key))
    shared = dict(state)
    for keys in owners.values():
        first = state[keys[0]]
        merged = replace(first, aliases=tuple(state[k].name for k in keys[1:]))
        shared |= dict.fromkeys(keys, merged)
    return shared


def _initialise(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its state, with the update itself replaced by nothing."""
    patches = []
    for cls in type(optimizer).__mro__:
        path = getattr(cls.__init__, "__globals__", {}).get("__name__", "")
        functional = path.rpartition(".")[2].lstrip("_")
        if path.startswith("torch.optim.") and hasattr(sys.modules[path], functional):
            patches.append(mock.patch.object(sys.modules[path], functional, lambda *args, **kwargs: None))
    had_state = bool(optimizer.state)
    if not patches and not had_state:
        _probe_foreign(optimizer)
        return
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        if patches:
            optimizer.step()
    if isinstance(optimizer, torch.optim.SGD):
        _zero_momentum(optimizer)


def _probe_foreign(optimizer: torch.optim.Optimizer) -> None:
    """An optimizer from elsewhere: it may be used if it keeps no state, or has taken a step already."""
    optimizer.step()
    if optimizer.state:
        raise CaptureError(
            f"{type(optimizer).__name__} keeps state, and what that is before its first step cannot be known. Take one "
            "eager step (or load a state dict) before compiling, so that its state exists"
        )


def _zero_momentum(optimizer: torch.optim.SGD) -> None:
    """SGD's momentum buffer is the gradient itself at the first step: zeros, with no dampening then."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "momentum_buffer" in state and state["momentum_buffer"] is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


# --- tracing ------------------------------------------------------------------------------------------------------


class _NoOutOfPlaceAlias(TorchFunctionMode):
    """`Tensor.square_` is no ATen operator with a functional twin in torch 2.13, so functionalize refuses it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.Tensor.square_:
            return args[0].mul_(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def _traceable_optimizers() -> Iterator[None]:
    """Make torch.optim's Python code keep symbolic values symbolic.

    `is_compiling` makes it keep step counts as tensors; the builtins `min`, `max` and `float` in Adafactor and
    in gradient clipping would force a decision or a constant.
    """
    from torch.optim import _adafactor

    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch.compiler.is_compiling", lambda: True))
        stack.enter_context(mock.patch.object(_adafactor, "min", torch.sym_min, create=True))
        stack.enter_context(mock.patch.object(_adafactor, "max", torch.sym_max, create=True))
        stack.enter_context(mock.patch.object(clip_grad, "float", lambda x: x, create=True))
        yield


def _trace(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, torch.nn.Parameter],
    names: Mapping[int, str],
    initial: Mapping[tuple[str, str], StateTensor],
    hypers: Sequence[Hyper],
    clips: Mapping[str, Hyper],
) -> tuple[GraphModule, list[Hyper]]:
    """Trace one update; also return the hyperparameters that it branched on, or does not read."""
    env = ShapeEnv()
    fake = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, static_shapes=True)
    symbols = {h: _symbolic_float(env, h) for h in hypers}
    keys = list(initial)
    unique = _unique(initial)

    def update(*values: object) -> list[torch.Tensor]:
        taken = iter(values)
        fresh = {n: next(taken).clone() for n in parameters}  # type: ignore[attr-defined]
        for parameter in fresh.values():
            parameter.grad = next(taken).clone()  # type: ignore[attr-defined]
        whole = {t.name: next(taken) for t in unique}
        state = {(n, k): _working(k, whole[initial[n, k].name]) for n, k in keys}  # type: ignore[arg-type]
        steps: torch.Tensor = next(taken)  # type: ignore[assignment]
        traced = dict(zip(hypers, taken, strict=True))
        started = (steps > 0).to(torch.float64).item()
        with torch.no_grad():
            _clip(list(fresh.values()), clips, traced)
            for optimizer in _rebuilt(optimizers, names, fresh, state, hypers, traced, started):
                step = type(optimizer).step
                getattr(step, "__wrapped__", step)(optimizer)
                for name, parameter in fresh.items():
                    for key in [k for n, k in keys if n == name and parameter in optimizer.state]:
                        state[name, key] = optimizer.state[parameter][key]
        new = [fresh[n].detach() for n in parameters]
        updated = {initial[k].name: state[k].to(initial[k].initial.dtype) for k in keys}
        return new + [updated[t.name] for t in unique]

    tensors = [p.detach() for p in parameters.values()]
    examples = [*tensors, *tensors, *(t.initial for t in unique), torch.zeros((), dtype=torch.int64)]
    with fake:
        fakes = [torch.empty(e.shape, dtype=e.dtype) for e in examples]
    with fake, _traceable_optimizers(), _NoOutOfPlaceAlias():
        graph = make_fx(torch.func.functionalize(update), tracing_mode="real")(*fakes, *symbols.values())
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
    return env.create_symfloatnode(symbol, hint=hint, source=source)  # type: ignore[return-value]


def _working(key: str, tensor: torch.Tensor) -> torch.Tensor:
    """Scalar state (step counts, running products) is worked on in float64, as eager's Python floats are."""
    wide = torch.float64 if key in _SCALAR_STATE else tensor.dtype
    return tensor.to(wide, copy=True)


def _clip(parameters: list[torch.Tensor], clips: Mapping[str, Hyper], traced: Mapping[Hyper, object]) -> None:
    if hyper := clips.get("clip_grad_value"):
        clip_grad_value_(parameters, traced.get(hyper, hyper.default), foreach=False)  # type: ignore[arg-type]
    if hyper := clips.get("clip_grad_norm"):
        clip_grad_norm_(parameters, traced.get(hyper, hyper.default), foreach=False)  # type: ignore[arg-type]


def _rebuilt(
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[int, str],
    fresh: Mapping[str, torch.nn.Parameter],
    state: Mapping[tuple[str, str], torch.Tensor],
    hypers: Sequence[Hyper],
    traced: Mapping[Hyper, object],
    started: object,
) -> Iterator[torch.optim.Optimizer]:
    """Copies of the optimizers over the traced parameters, with traced state and hyperparameters."""
    group_number = {id(g): i for i, (_, g) in enumerate(groups_of(optimizers))}
    for optimizer in optimizers:
        twin = copy.copy(optimizer)
        twin.state = defaultdict(dict)
        twin.param_groups = []
        for group in optimizer.param_groups:
            mine = [h for h in hypers if h.group == group_number[id(group)]]
            changed = with_values(group, mine, lambda h: traced[h])
            changed["params"] = [fresh[names[id(p)]] for p in group["params"] if names.get(id(p)) in fresh]
            for key, value in (("foreach", False), ("fused", False), ("capturable", True)):
                if key in changed:
                    changed[key] = value
            if isinstance(optimizer, torch.optim.SGD) and changed["momentum"] != 0:
                changed["dampening"] = changed["dampening"] * started  # type: ignore[operator]
            twin.param_groups.append(changed)
            for original in group["params"]:
                name = names.get(id(original))
                if name in fresh:
                    twin.state[fresh[name]] = {k: v for (n, k), v in state.items() if n == name}
        yield twin


def _branched(env: ShapeEnv, symbols: Mapping[Hyper, torch.SymFloat]) -> list[Hyper]:
    """Hyperparameters that the traced Python branched on, other than `!= 0` and `> 0`, whose general branch also
    holds at zero."""
    hyper_of = {s.node.expr: h for h, s in symbols.items()}
    found: list[Hyper] = []
    for guard in env.guards:
        free = [s for s in guard.expr.free_symbols if s in hyper_of]
        benign = isinstance(guard.expr, (sympy.Ne, sympy.Gt)) and guard.expr.rhs.is_zero
        if free and not benign:
            found += [hyper_of[s] for s in free if hyper_of[s] not in found]
    return found


# --- functions ----------------------------------------------------------------------------------------------------


def _update_arguments(update: Update) -> list[Value]:
    return [
        *(Value("state", n) for n in update.parameters),
        *(Value("gradient", n) for n in update.parameters),
        *(Value("state", t.name) for t in update.state),
        Value("state", STEPS),
        *(Value("hyper", h.name) for h in update.hypers),
    ]


def _update_results(update: Update) -> list[Value]:
    return [*(Value("state", n) for n in update.parameters), *(Value("state", t.name) for t in update.state)]


def _run_update(update: Update, values: Mapping[Value, torch.Tensor]) -> dict[Value, torch.Tensor]:
    """Run the update graph on tensors; the step count rises by one."""
    outputs = ScalarsToTensors(update.graph).run(
        *(values[a] for a in _update_arguments(update)), enable_io_processing=False
    )
    steps = Value("state", STEPS)
    results = dict(zip(_update_results(update), outputs, strict=True))
    like = {v: values[v] for v in results}
    return {v: t.to(like[v].dtype).reshape(like[v].shape) for v, t in results.items()} | {steps: values[steps] + 1}


def _examples(joint: JointStep, update: Update) -> dict[Value, torch.Tensor]:
    examples = {Value("state", t.name): t.initial for t in (*joint.state, *update.state)}
    examples[Value("state", STEPS)] = torch.zeros((), dtype=torch.int64)
    examples |= {Value("hyper", h.name): torch.zeros((), dtype=torch.float64) for h in update.hypers}
    for kind in ("gradient", "accumulator"):
        examples |= {Value(kind, n): examples[Value("state", n)] for n in update.parameters}
    examples[COUNT] = torch.ones((), dtype=torch.float64)
    examples |= {Value("input", n): t for n, t in joint.captured.step.inputs.items()}
    return examples


def _update_function(joint: JointStep, update: Update) -> Function:
    arguments = _update_arguments(update)
    results = [*_update_results(update), Value("state", STEPS)]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        new = _run_update(update, dict(zip(arguments, tensors, strict=True)))
        return [new[r] for r in results]

    examples = _examples(joint, update)
    return Function(retrace(run, [examples[a] for a in arguments]), tuple(arguments), tuple(results))


def _joint_function(joint: JointStep, update: Update) -> Function:
    """The joint graph without gradients of parameters that no optimizer holds."""
    kept = [r for r in joint.joint.results if r.kind != "gradient" or r.name in update.parameters]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values = dict(zip(joint.joint.results, interpret(joint.joint.graph, tensors), strict=True))
        return [values[r] for r in kept]

    examples = _examples(joint, update)
    graph = retrace(run, [examples[a] for a in joint.joint.arguments])
    return Function(graph, joint.joint.arguments, tuple(kept))


def _accumulate_function(joint: JointStep, update: Update) -> Function:
    """Gradients added to the accumulators."""
    gradients = [Value("gradient", n) for n in update.parameters]
    accumulators = [Value("accumulator", n) for n in update.parameters]

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        half = len(gradients)
        return [total + gradient for gradient, total in zip(tensors[:half], tensors[half:], strict=True)]

    examples = _examples(joint, update)
    arguments = (*gradients, *accumulators)
    return Function(retrace(run, [examples[a] for a in arguments]), arguments, tuple(accumulators))


def _mean_function(joint: JointStep, update: Update) -> Function:
    """Accumulated sums divided by their number."""
    arguments = (*(Value("accumulator", n) for n in update.parameters), COUNT)

    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        *sums, count = tensors
        return [total / count for total in sums]

    examples = _examples(joint, update)
    results = tuple(Value("gradient", n) for n in update.parameters)
    return Function(retrace(run, [examples[a] for a in arguments]), arguments, results)
