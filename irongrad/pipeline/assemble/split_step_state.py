"""State that a split step keeps between its two pieces: the values that the first saves, and a counter, `@border`.

The counter is odd while a forward waits for its second piece; its value is then the ticket of that forward. Another
forward, the second piece, and everything that replaces the state advance the counter. So a ticket is valid once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline.assemble.storage import stored_type, symbol, tensor_type


def border_globals(graph: StepGraph) -> Iterator[str]:
    """The globals of a split step: saved values and the counter; none for other steps."""
    forward = graph.functions.get("forward")
    if forward is None:
        return
    for value, example in zip(forward.results, forward.results_like(), strict=True):
        if value.kind == "saved":
            kind = stored_type(tensor_type(example))
            element = kind.removesuffix(">").rpartition("x")[2].removeprefix("tensor<")
            zero = "0" if element.startswith("i") else "0.0"
            yield f"util.global private mutable {symbol('saved', value.name)} = dense<{zero}> : {kind}"
    yield "util.global private mutable @border = 0 : i64"


def opened() -> Generator[str, None, str]:
    """Advance the counter to the next odd number; return the SSA name of the ticket."""
    yield "%border = util.global.load @border : i64"
    yield "%border.1 = arith.constant 1 : i64"
    yield "%border.next = arith.addi %border, %border.1 : i64"
    yield "%border.odd = arith.ori %border.next, %border.1 : i64"
    yield "util.global.store %border.odd, @border : i64"
    yield "%ticket = tensor.from_elements %border.odd : tensor<i64>"
    return "%ticket"


def is_open(ticket: str) -> Generator[str, None, list[str]]:
    """Refuse a `ticket` that is not that of the waiting forward; return the SSA names of the conditions."""
    yield f"%border.given = tensor.extract {ticket}[] : tensor<i64>"
    yield "%border.now = util.global.load @border : i64"
    yield "%border.open = arith.trunci %border.now : i64 to i1"
    yield 'cf.assert %border.open, "no forward is open: call forward first, once for each step; the step was not run"'
    yield "%border.same = arith.cmpi eq, %border.given, %border.now : i64"
    text = "ticket: it is that of an earlier forward, and a later one has taken its place; the step was not run"
    yield f'cf.assert %border.same, "{text}"'
    return ["%border.open", "%border.same"]


def closed() -> Iterator[str]:
    """Advance the counter to the next even number, which invalidates the saved values and the ticket."""
    yield "%closed.was = util.global.load @border : i64"
    yield "%closed.1 = arith.constant 1 : i64"
    yield "%closed.odd = arith.ori %closed.was, %closed.1 : i64"
    yield "%closed.even = arith.addi %closed.odd, %closed.1 : i64"
    yield "util.global.store %closed.even, @border : i64"


def closed_if_any(graph: StepGraph) -> Iterator[str]:
    """`closed`, if the step is a split step."""
    if "forward" in graph.functions:
        yield from closed()
