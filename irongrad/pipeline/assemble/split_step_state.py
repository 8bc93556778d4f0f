"""The border between the two pieces of a step: the values that the first saves, and whose turn it is.

`@border` counts. It is odd while a forward waits for its second piece, and is then that forward's ticket; another
forward, the second piece itself, and whatever replaces the state take it further, so that a ticket is good once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from irongrad.graph.step_graph import StepGraph
from irongrad.pipeline.assemble.storage import stored_type, symbol, tensor_type


def border_globals(graph: StepGraph) -> Iterator[str]:
    """The globals of a step in pieces; none of another's."""
    forward = graph.functions.get("forward")
    if forward is None:
        return
    for value, made in zip(forward.results, forward.results_like(), strict=True):
        if value.kind == "saved":
            kind = stored_type(tensor_type(made))
            element = kind.removesuffix(">").rpartition("x")[2].removeprefix("tensor<")
            zero = "0" if element.startswith("i") else "0.0"
            yield f"util.global private mutable {symbol('saved', value.name)} = dense<{zero}> : {kind}"
    yield "util.global private mutable @border = 0 : i64"


def opened() -> Generator[str, None, str]:
    """Open the border; returns the SSA name of the ticket."""
    yield "%border = util.global.load @border : i64"
    yield "%border.1 = arith.constant 1 : i64"
    yield "%border.next = arith.addi %border, %border.1 : i64"
    yield "%border.odd = arith.ori %border.next, %border.1 : i64"
    yield "util.global.store %border.odd, @border : i64"
    yield "%ticket = tensor.from_elements %border.odd : tensor<i64>"
    return "%ticket"


def is_open(ticket: str) -> Generator[str, None, list[str]]:
    """Refuse another `ticket` than that of the forward that is open; returns the conditions."""
    yield f"%border.given = tensor.extract {ticket}[] : tensor<i64>"
    yield "%border.now = util.global.load @border : i64"
    yield "%border.open = arith.trunci %border.now : i64 to i1"
    yield 'cf.assert %border.open, "no forward is open: call forward first, once for each step; the step was not run"'
    yield "%border.same = arith.cmpi eq, %border.given, %border.now : i64"
    text = "ticket: it is that of an earlier forward, and a later one has taken its place; the step was not run"
    yield f'cf.assert %border.same, "{text}"'
    return ["%border.open", "%border.same"]


def closed() -> Iterator[str]:
    """Close the border: what was saved is of no use any more."""
    yield "%closed.was = util.global.load @border : i64"
    yield "%closed.1 = arith.constant 1 : i64"
    yield "%closed.odd = arith.ori %closed.was, %closed.1 : i64"
    yield "%closed.even = arith.addi %closed.odd, %closed.1 : i64"
    yield "util.global.store %closed.even, @border : i64"


def closed_if_any(graph: StepGraph) -> Iterator[str]:
    """`closed`, of a step in pieces."""
    if "forward" in graph.functions:
        yield from closed()
