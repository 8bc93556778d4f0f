"""Refuse steps that change state on whose values at capture they, or other steps over the state, rely."""

from __future__ import annotations

from collections.abc import Iterable

from irongrad.graph.step_graph import StateTensor, StepGraph
from irongrad.runtime.errors import CaptureError


def refuse_changed(graphs: Iterable[StepGraph]) -> None:
    """Refuse these steps, over one state, if one changes a tensor on whose values one of them relies.

    A tensor may be changed where it is kept within the bounds that are relied on: by the forward of one step, or by
    what one step does after it.

    Raises:
        CaptureError: names the line that relies on them.
    """
    graphs = list(graphs)
    writers: dict[str, set[tuple[int, bool]]] = {}
    for number, graph in enumerate(graphs):
        for name, function in graph.functions.items():
            for value in (v for v in function.results if v.kind == "state"):
                writers.setdefault(value.name, set()).add((number, name == "update"))
    for tensor in (t for g in graphs for t in g.state):
        if tensor.relied is not None and len(writers.get(tensor.name, ())) > tensor.relied.kept:
            raise CaptureError(_reason(tensor))


def _reason(tensor: StateTensor) -> str:
    assert tensor.relied is not None
    name = tensor.name.rpartition(".")[2]
    if tensor.relied.bounds is None:
        return (
            f"{tensor.relied.line}\n  a Python decision or number depends on the values of the buffer {name}, which "
            "after_step or another step changes. Keep it a tensor, as in x * self.scale and "
            "torch.where(condition, a, b)"
        )
    return (
        f"{tensor.relied.line}\n  an index here depends on the values of {name}, which after_step or another step "
        "changes, so it is not proved to be in range. Clamp it: index.clamp(0, size - 1), or take index % size"
    )
