"""Several step graphs over one state: each tensor gets one name, and every graph has the state of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from irongrad.graph.relied_state import refuse_changed
from irongrad.graph.step_graph import Function, StateTensor, StepGraph, Value, relied_by_both
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.oracle.expected_values import ExpectedAtSizes
from irongrad.runtime.errors import CaptureError
from irongrad.runtime.golden import Golden
from irongrad.runtime.manifest import DRAWS, SEED, STEPS, Role, steps_of
from irongrad.step.steps import Steps
from irongrad.step.tensor_names import joined_names, named_tensors
from irongrad.step.train_step import TrainStep

_NAMED = frozenset({"state", "gradient", "accumulator"})


@dataclass(frozen=True)
class JoinedSteps:
    """Step graphs over one state.

    Attributes:
        graphs: the graph of each step, with the state of all, by the step's name.
        names: for each step, the names of its state in the joined one, by its own names.
    """

    graphs: Mapping[str, StepGraph]
    names: Mapping[str, Mapping[str, str]]

    def golden(self, step: str, golden: Golden) -> Golden:
        """Golden values of one step with the names of the joined state."""
        names = self.names[step]
        resting = golden.resting
        if resting is not None:
            moving, unbounded = (tuple(names.get(n, n) for n in held) for held in (resting.moving, resting.unbounded))
            resting = replace(resting, moving=moving, unbounded=unbounded)
        expected = {_renamed(key, names): value for key, value in golden.expected.items()}
        allowed, moves = ({_renamed(k, names): v for k, v in of.items()} for of in (golden.allowed, golden.moves))
        return replace(golden, expected=expected, allowed=allowed, moves=moves, resting=resting)


def joined(
    step: TrainStep | Steps, captured: Mapping[str, CapturedStep], graphs: Mapping[str, StepGraph]
) -> JoinedSteps:
    """Give the graphs of several steps one state; that of a single step stays as it is.

    Args:
        step: the user's step or steps.
        captured: the captured steps by name.
        graphs: their graphs.

    Raises:
        CaptureError: two steps update different parameters of one group of an optimizer, or one changes state on whose
            values another relies.
    """
    if not isinstance(step, Steps):
        return JoinedSteps(graphs, {"": {t.name: t.name for t in graphs[""].state}})
    named = joined_names(step.steps)
    names = {
        name: {t.name: _joined_name(t, name, named_tensors(captured[name].step), named) for t in graph.state}
        for name, graph in graphs.items()
    }
    state: dict[str, StateTensor] = {}
    for name, graph in graphs.items():
        for tensor in graph.state:
            _add(state, tensor, names[name], frozenset(graphs))
    whole = tuple(state.values())
    renamed = {name: _renamed_graph(graph, name, names[name], whole) for name, graph in graphs.items()}
    refuse_changed(renamed.values())
    return JoinedSteps(renamed, names)


def renamed_values(expected: Mapping[str, ExpectedAtSizes], steps: JoinedSteps) -> dict[str, ExpectedAtSizes]:
    """The expected values of each step, with the names of the joined state."""
    return {
        name: values.renamed(partial(steps.golden, name)) if name and name in steps.names else values
        for name, values in expected.items()
    }


def _joined_name(tensor: StateTensor, step: str, own: Mapping[str, torch.Tensor], names: Mapping[int, str]) -> str:
    if tensor.name in (SEED, DRAWS):
        return tensor.name  # all steps draw from one stream
    if tensor.name == STEPS:
        return steps_of(step)
    if tensor.name in own:
        return names[id(own[tensor.name])]
    if tensor.role is Role.OPTIMIZER:
        return _in_optimizer(tensor.name, step, own, names)
    return f"{tensor.name}/{step}"


def _in_optimizer(name: str, step: str, own: Mapping[str, torch.Tensor], names: Mapping[int, str]) -> str:
    _, key, owner = name.split("/", 2)
    return f"optimizer/{key}/{names[id(own[owner])] if owner in own else f'{step}.{owner}'}"


def _add(state: dict[str, StateTensor], tensor: StateTensor, names: Mapping[str, str], steps: frozenset[str]) -> None:
    """Add a tensor of a step to the joined state."""
    name = names[tensor.name]
    prefix = name.removesuffix(tensor.name)
    found = (_alias(a, names, prefix, steps) for a in tensor.aliases)
    aliases = tuple(dict.fromkeys(a for a in found if a != name))
    known = state.get(name)
    if known is None:
        state[name] = replace(tensor, name=name, aliases=aliases)
        return
    if tensor.role is Role.OPTIMIZER and set(known.aliases) != set(aliases):
        raise CaptureError(
            f"two steps share an optimizer and update different parameters of one of its groups, and {name} counts the "
            "updates of them all. Put the parameters that only one step updates into a group of their own"
        )
    aliases = tuple(dict.fromkeys((*known.aliases, *aliases)))
    state[name] = replace(known, aliases=aliases, relied=relied_by_both(known.relied, tensor.relied))


def _alias(alias: str, names: Mapping[str, str], prefix: str, steps: frozenset[str]) -> str:
    """The joined name of an alias: that of the tensor, or of the parameter whose optimizer state it is."""
    if alias.startswith("optimizer/"):
        _, key, owner = alias.split("/", 2)
        return f"optimizer/{key}/{names.get(owner, owner)}"
    return alias if alias.partition(".")[0] in steps else names.get(alias, prefix + alias)


def _renamed_graph(graph: StepGraph, step: str, names: Mapping[str, str], state: tuple[StateTensor, ...]) -> StepGraph:
    functions = {
        name: Function(f.graph, tuple(_renamed_values(f.arguments, names)), tuple(_renamed_values(f.results, names)))
        for name, f in graph.functions.items()
    }
    gradients = tuple(names[n] for n in graph.gradients)
    return replace(graph, name=step, state=state, gradients=gradients, functions=functions)


def _renamed_values(values: tuple[Value, ...], names: Mapping[str, str]) -> Iterator[Value]:
    return (Value(v.kind, names.get(v.name, v.name)) if v.kind in _NAMED else v for v in values)


def _renamed(key: str, names: Mapping[str, str]) -> str:
    kind, step, name = key.split("/", 2)
    return f"{kind}/{step}/{names.get(name, name)}" if kind in ("state", "gradient") else key
