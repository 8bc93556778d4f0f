"""The exchange of statistics within a step's forward and backward: those of BatchNorm over all ranks' batches.

The import `comm` provides it, as it does the exchange of gradients (`exchange.py`):

* `comm.moments(view, wait, signal)` returns at once. After the fence `wait` it fills its result with the moments of all
  ranks' elements, and then signals `signal`.
* `comm.gradient(view, wait, signal)` is the same for the gradients of moments.

A step makes its exchanges in the order of its graph. That is the same in all forms of a step, so ranks may run
different ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from iree.compiler import ir
from torch.fx import GraphModule

from irongrad.diagnostics.source_lines import line_of
from irongrad.graph.over_ranks import exchanges_in, kinds_of
from irongrad.graph.step_graph import StepGraph, base_name
from irongrad.mlir.walk import inside
from irongrad.pipeline.assemble.exchange import VIEW, import_of
from irongrad.pipeline.assemble.storage import tensor_type
from irongrad.pipeline.lower.over_ranks import MARK
from irongrad.runtime.errors import InternalError, UserError

_LOCAL = "let each rank normalise by its own statistics: leave out sync_batch_norm, and take nn.BatchNorm"


def check_statistics(graph: StepGraph, route: str, *, budget: bool) -> None:
    """Refuse a step that cannot exchange statistics as it is to be compiled.

    Args:
        graph: the step graph.
        route: its route to linalg.
        budget: whether its memory has a budget.

    Raises:
        UserError: it would exchange in a branch or a loop, on another route than `linalg`, or within a budget.
    """
    wholes = [f.graph for f in graph.functions.values()]
    bodies = [m for whole in wholes for m in whole.modules() if isinstance(m, GraphModule) and m not in wholes]
    for node in (n for body in bodies for n in exchanges_in(body.graph)):
        raise UserError(
            f"{line_of(node)}\n  a BatchNorm whose statistics ranks exchange is in a branch or a loop (torch.cond, "
            f"while_loop, scan), which may run differently on each rank: take it out of there, or {_LOCAL}"
        )
    if not exchanges_statistics(graph):
        return
    if route != "linalg":
        raise UserError(
            f"the route {route} has no exchange of BatchNorm's statistics: take the route linalg, or {_LOCAL}"
        )
    if budget:
        raise UserError(
            "max_memory plans a step that runs in one piece, and this one waits for the statistics of other ranks: "
            f"leave out max_memory, or {_LOCAL}"
        )


def exchanges_statistics(graph: StepGraph) -> bool:
    """Whether ranks exchange statistics within the forward of a step."""
    return any(exchanges_in(function.graph.graph) for function in graph.functions.values())


def is_collective(chain: Sequence[str], graph: StepGraph) -> bool:
    """Whether all ranks have to run a chain of functions together: it updates, or its forward exchanges statistics."""
    if not graph.bucket_bytes or not chain:
        return False
    return "update" in chain or (base_name(chain[0]) == "joint" and exchanges_statistics(graph))


def statistics_bytes(graph: StepGraph) -> tuple[int, ...]:
    """The bytes of each exchange of statistics in forward and backward, in order.

    Raises:
        InternalError: forms of the step make other exchanges, or make them in another order.
    """
    if "joint" not in graph.functions:
        return ()
    forms = [f.graph.graph for name, f in graph.functions.items() if base_name(name) == "joint"]
    if len({tuple(kinds_of(exchanges_in(form))) for form in forms}) > 1:
        raise InternalError("the forms of a step exchange statistics in different orders")
    return tuple(node.meta["val"].nbytes for node in exchanges_in(forms[0]))


def statistics_functions(graphs: Sequence[StepGraph]) -> Iterator[str]:
    """Write the imports and, for each kind and size of vectors, the function that exchanges one."""
    nodes = [n for g in graphs for f in g.functions.values() for n in exchanges_in(f.graph.graph)]
    found = dict.fromkeys((str(node.args[1]), tensor_type(node.meta["val"])) for node in nodes)
    for kind in dict.fromkeys(kind for kind, _ in found):
        yield from import_of(f"comm.{kind}", waits=True)
    for kind, vector in found:
        yield f"func.func private {_symbol(kind, vector)}(%own: {vector}) -> {vector} {{"
        yield "  %c0 = arith.constant 0 : index"
        yield "  %device = hal.devices.get %c0 : !hal.device"
        for fence in ("wait", "signal"):
            yield f'  %{fence} = hal.fence.create device(%device : !hal.device) flags("None") : !hal.fence'
        yield f"  %ready = hal.tensor.barrier join(%own : {vector}) => %wait : !hal.fence"
        yield f'  %given = hal.tensor.export %ready "{kind}" : {vector} -> {VIEW}'
        types = f"({VIEW}, !hal.fence, !hal.fence) -> {VIEW}"
        yield f"  %view = util.call @comm.{kind}(%given, %wait, %signal) : {types}"
        yield f'  %all = hal.tensor.import wait(%signal) => %view "{kind}" : {VIEW} -> {vector}'
        yield f"  return %all : {vector}"
        yield "}"


def _symbol(kind: str, vector: str) -> str:
    return f'@"over_ranks.{kind}.{vector.removeprefix("tensor<").removesuffix(">")}"'


def write_exchanges(function: ir.Operation, expected: int) -> None:
    """Call the functions of `statistics_functions` in place of the marked copies in an imported function.

    Raises:
        InternalError: the function has another number of marks.
    """
    marked = [op for op in inside(function) if MARK in op.attributes]
    if len(marked) != expected:
        raise InternalError(f"the lowering kept {len(marked)} of {expected} exchanges of statistics")
    for copy in marked:
        kind, vector = ir.StringAttr(copy.attributes[MARK]).value, copy.results[0].type
        name = _symbol(kind, str(vector)).removeprefix('@"').removesuffix('"')
        callee = ir.FlatSymbolRefAttr.get(name, copy.context)
        with ir.Location.unknown(copy.context), ir.InsertionPoint(copy):
            call = ir.Operation.create("func.call", [vector], [copy.operands[0]], {"callee": callee})
        copy.results[0].replace_all_uses_with(call.results[0])
        copy.erase()
