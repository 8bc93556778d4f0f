"""Range checks as functions of the step graph: `check.<name>` for every function that takes or computes indices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch.fx import Graph, GraphModule, Node

from irongrad.graph.step_graph import Function, Range, StepGraph, Value, sizes_like
from irongrad.operators.legalize.retrace import retrace
from irongrad.pipeline.guards.decisions import Indices
from irongrad.pipeline.guards.intervals import at_most
from irongrad.runtime.errors import CaptureError
from irongrad.sizes.symbols import Dims


def add_guards(graph: StepGraph, indices: Indices, early: Mapping[str, Function] | None = None) -> StepGraph:
    """Add a function `check.<name>` that measures the values of each input whose range `<name>` relies on.

    Its results have the inputs' names. It also has the results of the function that computes indices early.
    `irongrad.pipeline.assemble.refusal_messages` refuses a result out of range.

    Args:
        graph: the step graph.
        indices: what keeps the indices of the step within their tensors.
        early: the functions that compute indices early, by the function of the step graph that relies on them.
    """
    computing, ranges = early or {}, indices.ranges
    checks: dict[str, Function] = {}
    for name, function in graph.functions.items():
        taken = {a.name for a in function.arguments if a.kind == "input"}
        made = []
        if mine := [r for r in ranges if r.input in taken]:
            examples = [_example(graph, function, r.input) for r in mine]
            dims = [graph.dynamic.get(r.input, {}) for r in mine]
            made.append(_check(mine, examples, dims, function, graph.buckets[0] if graph.buckets else {}))
        if name in computing:
            _refuse_unless_given(computing[name], taken, indices)
            made.append(computing[name])
        if made:
            checks[f"check.{name}"] = made[0] if len(made) == 1 else _joined(*made)
    functions = {**graph.functions, **checks}
    return replace(graph, functions=functions, ranges=indices.ranges, computed=indices.computed, indices=indices.specs)


def _refuse_unless_given(check: Function, taken: set[str], indices: Indices) -> None:
    """Refuse a check of inputs that its entry point does not take."""
    if missing := sorted({a.name for a in check.arguments if a.kind == "input"} - taken):
        places = {r.input: r.place for r in indices.computed}
        listed = "; ".join(places[r.name] for r in check.results)
        raise CaptureError(
            f"{listed} needs {', '.join(map(repr, missing))} before a step begins, and an entry point that runs it "
            "does not take that input. Clamp the index: index.clamp(0, size - 1)"
        )


def _example(graph: StepGraph, function: Function, name: str) -> torch.Tensor:
    """An input as an entry point passes it on: a whole batch, at the sizes of the function's bucket."""
    if not graph.buckets or not any(a.kind == "size" for a in function.arguments):
        return graph.inputs[name]
    example, like = graph.inputs[name], function.example(function.arguments.index(Value("input", name)))
    return example.new_empty(sizes_like(example, like))


def _check(
    ranges: Sequence[Range],
    examples: Sequence[torch.Tensor],
    dims: Sequence[Dims],
    function: Function,
    bucketed: Collection[str],
) -> Function:
    """The check of inputs; in a bucket, padding is left out where zero is not in the range.

    Args:
        ranges: the ranges of the inputs.
        examples: an example of each input.
        dims: the names of the dimensions of each input.
        function: the function that relies on the ranges.
        bucketed: the dimensions that are padded, if the function has a bucket.
    """
    sizes = [a for a in function.arguments if a.kind == "size" and a.name in bucketed]
    padded = [bool(sizes) and not _holds_zero(limit) for limit in ranges]
    masked = [_only(names, bucketed) if mask else {} for mask, names in zip(padded, dims, strict=True)]
    needed = [a for a in sizes if any(a.name in names.values() for names in masked)]

    def check(*tensors: torch.Tensor) -> list[torch.Tensor]:
        inputs, true = tensors[: len(ranges)], {a.name: t for a, t in zip(needed, tensors[len(ranges) :], strict=True)}
        return [
            most_out_of_range(t, r, _elements(t, {d: true[n] for d, n in names.items()}))
            for t, r, names in zip(inputs, ranges, masked, strict=True)
        ]

    arguments = (*(Value("input", r.input) for r in ranges), *needed)
    results = tuple(Value("output", r.input) for r in ranges)
    scalars = [torch.zeros((), dtype=torch.int64)] * len(needed)
    symbolic = [{d: n for d, n in names.items() if not sizes or n not in bucketed} for names in dims]
    symbols = [*symbolic, *({} for _ in needed)] if function.of_any_size else []
    return Function(retrace(check, [*examples, *scalars], dims=symbols), arguments, results)


def _only(dims: Dims, names: Collection[str]) -> Dims:
    return {d: name for d, name in dims.items() if name in names}


def _holds_zero(limit: Range) -> bool:
    within = limit.minimum <= 0 <= limit.maximum and all(at_most(0, further) for further in limit.limits)
    return within or limit.exempt == 0


def _elements(tensor: torch.Tensor, sizes: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
    """A mask of the elements of a tensor that are not padding; None if there is no padding."""
    mask: torch.Tensor | None = None
    for d, size in sizes.items():
        shape = [-1 if i == d else 1 for i in range(tensor.ndim)]
        along = (torch.arange(tensor.shape[d]) < size).reshape(shape)
        mask = along if mask is None else mask & along
    return mask


def most_out_of_range(tensor: torch.Tensor, limit: Range, elements: torch.Tensor | None = None) -> torch.Tensor:
    """Return the distance of the index furthest from the lower bound; if any index is out of range, this one is.

    torch-mlir reduces one dimension after the other, each in its own kernel, so the tensor is flattened.

    Args:
        tensor: the indices, of any integer dtype and shape.
        limit: the range of the indices.
        elements: a mask of the elements that count, of a shape that broadcasts; None if all do.

    Returns:
        The distance, int64 of rank 0; zero if there are no indices.
    """
    if any(isinstance(size, int) and size == 0 for size in tensor.shape):
        return torch.zeros((), dtype=torch.int64)
    values = tensor.reshape(-1)  # before the arithmetic, because IREE does not fuse across a reshape in between
    distance = values.to(torch.int64) - limit.minimum
    if limit.exempt is not None:
        distance = torch.where(values == limit.exempt, 0, distance)
    if elements is not None:
        distance = torch.where(elements.expand(tensor.shape).reshape(-1), distance, 0)
    return farthest(distance)


def farthest(distances: torch.Tensor) -> torch.Tensor:
    """Return the largest of some distances, taken as unsigned numbers.

    As an unsigned number, the distance of an index below the bound is larger than all others. So one maximum finds an
    index that is too small or too large. With the sign bit flipped, signed numbers have the order of unsigned ones.
    """
    sign = torch.full((), torch.iinfo(torch.int64).min)
    return (distances ^ sign).amax() ^ sign


def _joined(first: Function, second: Function) -> Function:
    """One function with the results of two functions."""
    graph, arguments = Graph(), dict[Value, Node]()
    parts = [first, second]
    placeholders = [[n for n in f.graph.graph.nodes if n.op == "placeholder"] for f in parts]
    for function, nodes in zip(parts, placeholders, strict=True):
        for value, node in zip(function.arguments, nodes, strict=True):
            if value not in arguments:
                arguments[value] = graph.placeholder(f"argument{len(arguments)}")
                arguments[value].meta = dict(node.meta)
    results: list[Node] = []
    attributes: dict[str, torch.Tensor] = {}
    for number, (function, nodes) in enumerate(zip(parts, placeholders, strict=True)):
        new = {node: arguments[value] for value, node in zip(function.arguments, nodes, strict=True)}
        for node in function.graph.graph.nodes:
            if node.op not in ("placeholder", "output"):
                new[node] = graph.node_copy(node, new.__getitem__)
            if node.op == "get_attr":
                new[node].target = f"_part{number}_{node.target}"
                attributes[str(new[node].target)] = getattr(function.graph, str(node.target))
        results += [new[node] for node in function.graph.graph.output_node().args[0]]
    graph.output(results)
    return Function(GraphModule(attributes, graph), tuple(arguments), (*first.results, *second.results))
