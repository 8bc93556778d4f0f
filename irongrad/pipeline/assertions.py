"""Refusals of values in the module, and what has to come after them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from irongrad.pipeline.graphs import Function
from irongrad.pipeline.storage import quoted

# A generator of lines that returns the SSA names of what they compute.
Lines = Generator[str, None, list[str]]


def results_of(check: Function, result: str) -> list[str]:
    """The SSA names of the results of a call of `check`."""
    return [f"{result}#{i}" for i in range(len(check.results))]


def messages_of(check: Function) -> list[str]:
    """What is said for each result of `check` that is false."""
    return [limit.name for limit in check.results]


def refuse_unless(outcomes: Sequence[str], messages: Sequence[str], name: str) -> Lines:
    """Refuse with the message of the first of `outcomes` that is false; returns them as scalars."""
    for i, (outcome, message) in enumerate(zip(outcomes, messages, strict=True)):
        yield f"{name}.{i} = tensor.extract {outcome}[] : tensor<i1>"
        yield f'cf.assert {name}.{i}, "{quoted(message)}"'
    return [f"{name}.{i}" for i in range(len(outcomes))]


def after(passed: Sequence[str], result: str, value: str, kind: str) -> Iterator[str]:
    """`value`, but nothing that is computed from it comes before the outcome of a check.

    IREE 3.13.0 sorts the operations of a block by what they use alone (ScheduleExecutionPass), so a call that changes
    the state could come before the refusal.
    """
    names = [result, *(f"{result}.{i}" for i in range(len(passed)))]
    kinds = ", ".join([kind, *("i1" for _ in passed)])
    yield f"{', '.join(names)} = util.optimization_barrier {', '.join([value, *passed])} : {kinds}"


def indented(lines: Lines) -> Lines:
    """`lines` as the body of a region."""
    try:
        while True:
            yield f"  {next(lines)}"
    except StopIteration as stop:
        names: list[str] = stop.value
        return names
