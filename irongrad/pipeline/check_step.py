"""`irongrad check`: how every operator of a step is lowered, without compiling the step."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from irongrad.diagnostics.refusals import Refusal, gathered, refusal_of, refuse
from irongrad.diagnostics.source_lines import quiet_export
from irongrad.diagnostics.stage_errors import reported
from irongrad.graph.sources import phase_of
from irongrad.graph.step_graph import StepGraph
from irongrad.operators.decompositions.recurrent import loops_for
from irongrad.operators.decompositions.registry import family_of
from irongrad.operators.legalize.core_operators import CORE
from irongrad.operators.legalize.legality import called, float64_refusals, history_of, nodes_of, refusals
from irongrad.passes import DEFAULT_LEVEL, passes_at, run_passes
from irongrad.pipeline.assemble.interface import describe
from irongrad.pipeline.capture.capture import capture
from irongrad.pipeline.capture.first_call import called_once
from irongrad.pipeline.differentiate.differentiate import differentiate
from irongrad.pipeline.front import front
from irongrad.pipeline.gc_pause import few_collections
from irongrad.pipeline.optimizer.update import add_optimizer
from irongrad.pipeline.uncaptured_operators import probed
from irongrad.runtime.errors import IronGradError, UserError
from irongrad.step.borrow import roots_of, unchanged
from irongrad.step.train_step import TrainStep
from irongrad.targets import Ability, Target, common_abilities

CORE_OPERATOR = "core operator"
PYTORCH = "PyTorch's decomposition"
REFUSED = "refused"


@dataclass(frozen=True)
class Lowering:
    """The lowering of one operator in one phase of a step.

    Attributes:
        phase: `forward`, `backward`, `update` or `evaluation`.
        operator: its name in the captured graph, such as `aten.linear.default`.
        count: the number of its calls.
        how: `core operator`, `IronGrad: FAMILY`, `your decomposition`, `PyTorch's decomposition` or `refused`.
        into: the number of each core operator that it becomes, before any pass.
    """

    phase: str
    operator: str
    count: int
    how: str
    into: dict[str, int]


@dataclass(frozen=True)
class Report:
    """The result of a check.

    Attributes:
        lowerings: the lowering of every operator, in order of phases.
        refusals: everything that cannot be compiled.
        error: the error that `irongrad.compile` raises for the step; None if it compiles as far as is known.
    """

    lowerings: tuple[Lowering, ...]
    refusals: tuple[Refusal, ...]
    error: IronGradError | None = None


def check(step: TrainStep, targets: Sequence[Target] = ()) -> Report:
    """Run the stages of a compilation up to the step graph, and look up every operator.

    If a stage fails, the step is traced once more to find all that is refused. If it cannot be captured, it is run with
    its example inputs instead. The report then has more than the refusal at which capture stops.

    Args:
        step: the step.
        targets: the targets that it would be compiled for.
    """
    has_kernels = bool(targets) and Ability.LOOPS in common_abilities(targets)
    # As in the driver, which says why.
    with few_collections(), _use_lazy_graph_module(True), loops_for(has_kernels=has_kernels):
        try:
            return Report(tuple(lowerings(_step_graph(step, targets))), ())
        except IronGradError as error:
            with unchanged(roots_of(step)):  # a refused forward leaves behind what it has set
                graph, found = _refused(step, targets)
            if not found and isinstance(error, UserError):
                found = [refusal_of(error)]
            return Report(tuple(lowerings(graph)) if graph is not None else (), tuple(_distinct(found)), error)


def _step_graph(step: TrainStep, targets: Sequence[Target]) -> StepGraph:
    """Run the stages of a compilation up to the step graph.

    Raises:
        IronGradError: what the compilation raises.
    """
    current = ["capture"]

    def stage(name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        current[:] = [name]
        return function(*arguments)

    with called_once(step), reported(lambda: f"the stage {current[0]!r}", step.made_at):
        graph = front(stage("capture", capture, step), stage)
        describe(graph, None)
        refuse(_float64(graph, targets))
    return graph


def _refused(step: TrainStep, targets: Sequence[Target]) -> tuple[StepGraph | None, list[Refusal]]:
    """The step graph, as far as there is one, and everything that is refused of a step."""
    graph: StepGraph | None = None
    with quiet_export(), called_once(step), gathered() as found, _unexpected_suppressed():
        graph = add_optimizer(differentiate(capture(step)))
        found += refusals(graph)
        found += _float64(graph, targets)
    if graph is None:
        with quiet_export(), _unexpected_suppressed():
            graph, more = probed(step)
            lines = {r.line for r in found}
            found += [r for r in more if r.operator or r.line not in lines]
    return graph, found


@contextmanager
def _unexpected_suppressed() -> Iterator[None]:
    """End the block at an error that is not the user's: the compilation raises the same one, which is reported."""
    try:
        yield
    except UserError:
        raise
    except Exception:
        return


def _float64(graph: StepGraph, targets: Sequence[Target]) -> list[Refusal]:
    """The refusals of float64 tensors after the passes, which remove some of the tensors."""
    if not float64_refusals(graph, targets):
        return []
    optimised = run_passes(graph, passes_at(DEFAULT_LEVEL), [t.backend for t in targets])
    return float64_refusals(optimised, targets)


def _distinct(found: Sequence[Refusal]) -> list[Refusal]:
    """`found` without repeated refusals of one operator at one line."""
    return list({(r.operator.partition(",")[0], r.line): r for r in reversed(found)}.values())[::-1]


def lowerings(graph: StepGraph) -> list[Lowering]:
    """The lowerings of all operators in `graph` that the user's code, autograd or the optimizer called."""
    calls: dict[tuple[str, str], dict[tuple[int, str], list[Node]]] = {}
    for name in ("joint", "update", "eval", "predict"):
        if name not in graph.functions:
            continue
        for node in nodes_of(graph.functions[name].graph):
            if not (history := history_of(node)):
                continue
            origin = history[-1]
            phase = phase_of(name, node)
            nodes = calls.setdefault((phase, _display_name(origin.target)), {})
            nodes.setdefault((origin.graph_id, origin.name), []).append(node)
    return [_lowering(phase, operator, list(found.values())) for (phase, operator), found in calls.items()]


def _lowering(phase: str, operator: str, calls: list[list[Node]]) -> Lowering:
    nodes = [n for call in calls for n in call if isinstance(n.target, torch._ops.OpOverload)]
    into = Counter(str(n.target) for n in nodes)
    return Lowering(phase, operator, len(calls), _how(operator, nodes), dict(into.most_common()))


def _how(operator: str, nodes: list[Node]) -> str:
    if any(str(n.target) not in CORE for n in nodes):
        return REFUSED
    if all(str(n.target) == operator for n in nodes):
        return CORE_OPERATOR
    families = {family_of(found) for n in nodes for name in _decomposed(n) if (found := _overload(name))} - {None}
    if "user" in families:
        return "your decomposition"
    return f"IronGrad: {', '.join(sorted(map(str, families)))}" if families else PYTORCH


def _decomposed(node: Node) -> set[str]:
    """The operators in the history of `node` that were decomposed into others."""
    names = [str(node.target), *(h.target for h in history_of(node))]
    return {before for after, before in itertools.pairwise(names) if after != before}


def _display_name(target: str) -> str:
    """The name of an operator, or of the Python function that computes on a hyperparameter."""
    return called(target.removeprefix("<built-in function ").removesuffix(">"))


def _overload(name: str) -> torch._ops.OpOverload | None:
    parts = name.split(".")
    if len(parts) != 3 or not hasattr(torch.ops, parts[0]):
        return None
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    return getattr(packet, parts[2], None)
