"""The first runs of the float64 oracle, in parallel with the stages that they do not depend on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event

from irongrad.diagnostics.capture_errors import eager_error
from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline.capture.capture import CapturedStep
from irongrad.pipeline.oracle.alternating_steps import Alternation
from irongrad.pipeline.oracle.bucket_examples import at_other_sizes
from irongrad.pipeline.oracle.chosen_steps import own_and_chosen
from irongrad.pipeline.oracle.eager_run import is_huge
from irongrad.pipeline.oracle.expected_values import Expected, ExpectedAtSizes
from irongrad.pipeline.oracle.oracle import golden_runs
from irongrad.runtime.errors import IronGradError

# By the name of the step; the alternation of several steps is under the name `ALTERNATION`.
AllExpected = Mapping[str, ExpectedAtSizes]

# What no step is called.
ALTERNATION = "in turn"


class _AbandonedError(Exception):
    """The runs are no longer needed."""


@dataclass(frozen=True)
class Runs:
    """Runs in the background.

    Attributes:
        result: waits for the first runs, or makes them if a step is huge, and returns the expected values.
        alone: called when no compiler runs beside them any more; `result` waits for this if a step is huge.
    """

    result: Callable[[], AllExpected]
    alone: Callable[[], None]


@contextmanager
def _located(captured: CapturedStep) -> Iterator[None]:
    """Begin the message of an error in the user's own step with its line, such as one about an index out of range."""
    try:
        yield
    except (IndexError, RuntimeError) as error:
        if isinstance(error, IronGradError):
            raise
        raise eager_error(error, captured.step.model) from error


@contextmanager
def first_runs(
    parts: Mapping[str, tuple[CapturedStep, StepGraph]], steps: int, alternation: Alternation | None = None
) -> Iterator[Runs]:
    """Start the first runs of each step in a thread of its own: at its own sizes, and at those of each other bucket.

    The stages that run meanwhile leave a core idle. None of them may trace, because `make_fx` patches the modules that
    an eager run calls.

    If a step is huge, its runs wait for the compiler to end, and then take all cores, in the thread of the caller. In
    another thread, glibc maps every large tensor anew and clears its pages (`irongrad.runtime.memory`): GPT-2 124M
    takes a fifth longer to compile.

    Args:
        parts: each captured step, with the graph that has the names of its values, by name.
        alternation: the steps in turn, if there are several.
        steps: the most training steps in a run; at the sizes of other buckets, a run has one.

    Yields:
        The runs. If the caller raises an error or `StoppedEarly` before their end, they end at their next value.
    """
    abandoned, alone = Event(), Event()

    def check() -> None:
        if abandoned.is_set():
            raise _AbandonedError

    def make() -> AllExpected:
        found = {name: _of_step(*part, steps, check) for name, part in parts.items()}
        if alternation is not None:
            found[ALTERNATION] = ExpectedAtSizes(Expected(alternation.runs(check)))
        return found

    def make_alone() -> AllExpected:
        alone.wait()
        return make()

    if any(is_huge(graph) for _, graph in parts.values()):
        yield Runs(make_alone, alone.set)
        return
    with ThreadPoolExecutor(1, "oracle") as beside:
        future = beside.submit(make)
        try:
            yield Runs(future.result, alone.set)
        except BaseException:
            abandoned.set()
            raise
        finally:
            alone.set()


def _of_step(captured: CapturedStep, graph: StepGraph, steps: int, check: Callable[[], None]) -> ExpectedAtSizes:
    with _located(captured):
        own, chosen = own_and_chosen(captured, graph, steps, check)
        others = [Expected(golden_runs(c, graph, 1, check)) for c in at_other_sizes(captured, graph)]
        return ExpectedAtSizes(own, (*others, *chosen.expected), chosen.skipped)
