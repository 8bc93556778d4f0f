"""The first runs of the float64 oracle, beside the stages that they do not wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from threading import Event

from torch._ops import HigherOrderOperator

from irongrad.pipeline.bucket_examples import at_other_sizes
from irongrad.pipeline.capture import CapturedStep
from irongrad.pipeline.expected import Expected, ExpectedAtSizes
from irongrad.pipeline.graphs import Function, StepGraph
from irongrad.pipeline.options import STAGES, Options
from irongrad.pipeline.oracle import LARGE, elements_of, golden_runs

Runs = Callable[[], ExpectedAtSizes]


class _AbandonedError(Exception):
    """Nobody asks for the runs any more."""


@contextmanager
def first_runs(captured: CapturedStep, graph: StepGraph, options: Options, steps: int) -> Iterator[Runs]:
    """What the step has to give, at its own sizes and at those of each other bucket, after the first run.

    Args:
        captured: the step.
        graph: names the values.
        options: how the step is compiled.
        steps: how many training steps a run is, at most; one at the sizes of other buckets.

    Yields:
        Waits for it; it is made once. Where it can be, it is made in a thread of its own, from now on: what comes
        before iree-compile keeps one core busy.
    """
    abandoned = Event()

    def check() -> None:
        if abandoned.is_set():
            raise _AbandonedError

    def make() -> ExpectedAtSizes:
        own = Expected(golden_runs(captured, graph, steps, check))
        return ExpectedAtSizes(own, tuple(Expected(golden_runs(c, graph, 1)) for c in at_other_sizes(captured, graph)))

    if not _may_begin_early(graph, options):
        yield cache(make)
        return
    with ThreadPoolExecutor(1) as beside:
        early = beside.submit(make)
        try:
            yield early.result
        except BaseException:
            abandoned.set()
            raise


def _may_begin_early(graph: StepGraph, options: Options) -> bool:
    """Whether runs are long, and they and the passes leave each other alone.

    Those of a small step are over before iree-compile needs a second core; early, they would only take the interpreter
    from the passes, a twentieth of their time. Passes that measure need a machine that does nothing else, and those
    that trace functions of any size, or control flow, patch PyTorch (`irongrad.pipeline.patches`).
    """
    ends_before = options.stop_after in STAGES[: STAGES.index("oracle")]
    in_the_way = options.tune or any(map(_is_patched_for, graph.functions.values()))
    return elements_of(graph) > LARGE and not (ends_before or in_the_way)


def _is_patched_for(function: Function) -> bool:
    nodes = function.graph.graph.nodes
    return function.of_any_size or any(isinstance(n.target, HigherOrderOperator) for n in nodes)
