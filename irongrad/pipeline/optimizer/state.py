"""The state that an optimizer holds for each parameter before its next step."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import ModuleType
from unittest import mock

import torch

from irongrad.graph.step_graph import StateTensor
from irongrad.runtime.manifest import Role
from irongrad.step.borrow import unchanged
from irongrad.step.hyperparameters import groups_of
from irongrad.step.optimizer_slots import is_foreign

# State that is one number whatever the parameter's shape, and changes in lockstep within a parameter group.
SCALAR_STATE = frozenset({"step", "mu_product", "mu", "eta"})

# By the parameter's name and the optimizer's key for the state; parameters may share a tensor.
State = Mapping[tuple[str, str], StateTensor]


def initial_state(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, torch.nn.Parameter]
) -> dict[tuple[str, str], StateTensor]:
    """Return the state that each torch.optim optimizer holds before its next step, by parameter name and key."""
    result: dict[tuple[str, str], StateTensor] = {}
    own = [o for o in optimizers if not is_foreign(o)]
    known = {id(v) for o in own for held in o.state.values() for v in held.values()}
    # If nothing writes to parameters and gradients, they need no memory of their own.
    shared = _all_read_only(optimizers)
    with unchanged(optimizers) as record:
        if not shared:
            record.lend_memory(None)
        for _, group in groups_of(optimizers):
            for parameter in group["params"]:
                parameter.grad = None
        for parameter in parameters.values():
            zeros = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            parameter.grad = zeros if shared else zeros.clone()
        for optimizer in optimizers:
            if is_foreign(optimizer):
                continue
            _initialise(optimizer)
            for name, parameter in parameters.items():
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        full = f"optimizer/{key}/{name}"
                        result[name, key] = StateTensor(full, Role.OPTIMIZER, _own(value, known))
    return _shared_scalars(result, _group_of(optimizers, parameters, parameters.values()))


def _own(value: torch.Tensor, known: Collection[int]) -> torch.Tensor:
    """`value` in memory that is not the user's; one made here has its own."""
    whole = value.detach().contiguous()
    return whole.clone() if id(value) in known else whole


def _group_of(
    optimizers: Sequence[torch.optim.Optimizer], names: Iterable[str], tensors: Iterable[torch.Tensor]
) -> dict[str, int]:
    """The number of the parameter group that holds each parameter."""
    numbers = {id(p): i for i, (_, group) in enumerate(groups_of(optimizers)) for p in group["params"]}
    return {n: numbers[id(t)] for n, t in zip(names, tensors, strict=True)}


def _shared_scalars(
    state: dict[tuple[str, str], StateTensor], group_of: Mapping[str, int]
) -> dict[tuple[str, str], StateTensor]:
    """Let parameters of one group share their step counts and other scalar state, which change in lockstep.

    One counter takes one kernel, but hundreds of counters take hundreds. The names of the others become aliases.
    """
    owners: dict[tuple[str, int, float], list[tuple[str, str]]] = {}
    for (name, key), tensor in state.items():
        if key in SCALAR_STATE:
            owners.setdefault((key, group_of[name], float(tensor.initial)), []).append((name, key))
    shared = dict(state)
    for keys in owners.values():
        first = state[keys[0]]
        merged = replace(first, aliases=tuple(state[k].name for k in keys[1:]))
        shared |= dict.fromkeys(keys, merged)
    return shared


def _all_read_only(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Whether no optimizer writes to a parameter or a gradient while `_initialise` lets it create its state."""
    return all(_updates(o) for o in optimizers if not is_foreign(o))


def _updates(optimizer: torch.optim.Optimizer) -> list[tuple[ModuleType, str]]:
    """The torch.optim functions that compute the optimizer's update, each as its module and its name there."""
    found = []
    for cls in type(optimizer).__mro__:
        # Some classes of torch.optim have the name of the package in cls.__module__.
        path = getattr(vars(cls).get("__init__"), "__globals__", {}).get("__name__", "")
        functional = path.rpartition(".")[2].lstrip("_")
        if path.startswith("torch.optim.") and hasattr(sys.modules[path], functional):
            found.append((sys.modules[path], functional))
    return found


def _initialise(optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer create its state, with the update function mocked and without the user's hooks."""
    updates = _updates(optimizer)
    if updates:
        with ExitStack() as stack:
            for module, name in updates:
                stack.enter_context(mock.patch.object(module, name))
            step = type(optimizer).step
            getattr(step, "__wrapped__", step)(optimizer)
    if isinstance(optimizer, torch.optim.SGD):
        _zero_momentum(optimizer)


def _zero_momentum(optimizer: torch.optim.SGD) -> None:
    """Start SGD's momentum buffer with zeros.

    SGD's first step sets the buffer to the gradient. From zeros and without dampening, the general rule gives the same.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "momentum_buffer" in state and state["momentum_buffer"] is None:
                state["momentum_buffer"] = torch.zeros_like(parameter)


def distinct(state: State) -> tuple[StateTensor, ...]:
    """Return the tensors of `state`, each once."""
    return tuple({t.name: t for t in state.values()}.values())


def steps_so_far(state: Sequence[StateTensor]) -> torch.Tensor:
    """Return the step count that an optimizer's state implies: its `step`, or 1 if a momentum buffer is not zero."""
    counts = [int(t.initial.max()) for t in state if t.name.startswith("optimizer/step/")]
    started = any(t.name.startswith("optimizer/momentum_buffer/") and bool(t.initial.any()) for t in state)
    return torch.tensor(max([*counts, int(started)]), dtype=torch.int64)
