"""The first runs of the float64 oracle, beside the stages that they do not wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event

from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.oracle.bucket_examples import at_other_sizes
from irongrad.pipeline.oracle.expected_values import Expected, ExpectedAtSizes
from irongrad.pipeline.oracle.oracle import golden_runs

Runs = Callable[[], ExpectedAtSizes]


class _AbandonedError(Exception):
    """Nobody asks for the runs any more."""


@contextmanager
def first_runs(captured: CapturedStep, graph: StepGraph, steps: int) -> Iterator[Runs]:
    """What the step has to give, at its own sizes and at those of each other bucket, after the first run.

    It is made in a thread of its own, from now on. The stages beside it leave a core idle; none of them may trace, for
    `make_fx` patches the modules that an eager run calls.

    Args:
        captured: the step.
        graph: names the values.
        steps: how many training steps a run is, at most; one at the sizes of other buckets.

    Yields:
        Waits for it. Where an error or `StoppedEarly` comes first, the runs end with the next value.
    """
    abandoned = Event()

    def check() -> None:
        if abandoned.is_set():
            raise _AbandonedError

    def make() -> ExpectedAtSizes:
        own = Expected(golden_runs(captured, graph, steps, check))
        others = [Expected(golden_runs(c, graph, 1, check)) for c in at_other_sizes(captured, graph)]
        return ExpectedAtSizes(own, tuple(others))

    with ThreadPoolExecutor(1) as beside:
        made = beside.submit(make)
        try:
            yield made.result
        except BaseException:
            abandoned.set()
            raise
