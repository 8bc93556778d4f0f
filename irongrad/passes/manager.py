"""Run passes over a step graph: the manager times them, verifies their graphs, and keeps their records."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule

from irongrad.analysis.timeline import noted
from irongrad.graph.nodes import bodies
from irongrad.graph.step_graph import Function, StepGraph
from irongrad.passes.base import Choice, Context, OfAnySize, Pass, PassResult, Timer
from irongrad.passes.registry import lowerings_left_out
from irongrad.passes.verifier import InvalidGraphError, Snapshot, snapshot, verify
from irongrad.runtime.errors import InternalError, UserError
from irongrad.targets import Ability


@dataclass(frozen=True)
class PassRecord:
    """The record of one pass on one function.

    Attributes:
        name: the pass's name.
        function: the function's name.
        seconds: the run time of the pass, without the verification.
        nodes: the number of nodes before and after, including bodies of control flow.
        changed: whether the pass changed anything.
        stats: the pass's own counts.
        choices: the choices that the pass made by measurement.
    """

    name: str
    function: str
    seconds: float
    nodes: tuple[int, int]
    changed: bool
    stats: Mapping[str, int]
    choices: tuple[Choice, ...] = ()


# Called with a pass's position, its record, and the function after the pass.
Observer = Callable[[int, PassRecord, Function], None]


def run_passes(
    graph: StepGraph,
    passes: Sequence[Pass],
    targets: Sequence[str] = ("llvm-cpu",),
    on_pass: Observer = lambda number, record, function: None,
    timer: Timer | None = None,
    *,
    abilities: frozenset[Ability] = frozenset(),
) -> StepGraph:
    """Run `passes` in order on every function of a copy of `graph`.

    Args:
        graph: the step graph.
        passes: the passes to run.
        targets: the backends that the graph will be compiled for.
        on_pass: called after each pass on each function.
        timer: measures on the targets, so that passes choose by measurement; None if they choose by cost tables.
        abilities: what code for all of the targets does faster than elsewhere.

    Returns:
        The rewritten step graph.

    Raises:
        InternalError: a pass failed, or left a graph that is not well formed. The message names the pass and those
            before it.
    """
    functions = {n: replace(f, graph=copy.deepcopy(f.graph)) for n, f in graph.functions.items()}
    unknown = {name for name, function in functions.items() if function.of_any_size}
    for name, function in functions.items():
        for lowering in lowerings_left_out(() if name in unknown else passes):
            for module in _all_graphs(function.graph):
                lowering.lower_plainly(module)
    verified: dict[GraphModule, Snapshot] = {}
    for number, item in enumerate(passes):
        for name, function in functions.items():
            if name in unknown and not isinstance(item, OfAnySize):
                continue
            whole = function.arguments, function.results, tuple(targets), timer, graph, abilities
            context = Context(name, *whole)
            with noted(item.name, function=name):
                record = _run(item, function.graph, context, verified, [p.name for p in passes[:number]])
            on_pass(number, record, function)
    for function in functions.values():
        for module in _all_graphs(function.graph):
            module.recompile()
    return replace(graph, functions=functions)


def _run(
    item: Pass, graph: GraphModule, context: Context, verified: dict[GraphModule, Snapshot], before: Sequence[str]
) -> PassRecord:
    nodes = _count(graph)
    seconds = 0.0
    results: list[PassResult] = []
    has_changed = False  # whether a graph changed, whatever the pass reports
    for module in _all_graphs(graph):
        here = context if module is graph else replace(context, arguments=(), results=(), step=None)
        previous = verified.get(module) or snapshot(module)
        start = time.perf_counter()
        try:
            results.append(_checked(item.run(module, here)))
            seconds += time.perf_counter() - start
            verified[module] = verify(module, previous)
            has_changed = has_changed or verified[module].is_another
        except UserError:
            raise  # the pass cannot do what the user asked for
        except Exception as error:
            raise _failure(item, context, before, error) from error
    stats: dict[str, int] = {}
    for result in results:
        stats |= {k: stats.get(k, 0) + v for k, v in result.stats.items()}
    changed = has_changed or any(r.changed for r in results)
    choices = tuple(choice for result in results for choice in result.choices)
    return PassRecord(item.name, context.function, seconds, (nodes, _count(graph)), changed, stats, choices)


def _checked(result: object) -> PassResult:
    if not isinstance(result, PassResult):
        raise TypeError(f"it returned {result!r}, and no PassResult")
    if wrong := {name: count for name, count in result.stats.items() if not isinstance(count, int)}:
        raise TypeError(f"its stats are no counts: {wrong}")
    return result


def _failure(item: Pass, context: Context, before: Sequence[str], error: Exception) -> InternalError:
    what = "left a graph that is not well formed" if isinstance(error, InvalidGraphError) else "failed"
    after = f" after {', '.join(before)}" if before else ""
    return InternalError(
        f"the pass {item.name!r} {what} on the function {context.function!r}{after}: {error}\n"
        f"Leave it out with --disable-pass {item.name}, and report it."
    )


def _all_graphs(graph: GraphModule) -> Iterator[GraphModule]:
    """`graph`, then all bodies of control flow in it."""
    yield graph
    for _, body in bodies(graph):
        yield from _all_graphs(body)


def _count(graph: GraphModule) -> int:
    return sum(len(module.graph.nodes) for module in _all_graphs(graph))
