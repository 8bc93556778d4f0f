"""Run a graph in its own dtypes, and bound its distance from the exact values as the float64 oracle does.

A pass may compute a sum in a different order, and so round differently, but it may not lose digits. Runs with
`irongrad.pipeline.oracle.rounding_noise.RoundingNoise` show how far apart runs with different rounding are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from irongrad.graph.dtypes import to_numpy
from irongrad.graph.eager_control_flow import eager_control_flow
from irongrad.graph.float64_runs import Eager
from irongrad.pipeline.oracle.oracle import Spread, Values
from irongrad.pipeline.oracle.rounding_noise import RoundingNoise
from irongrad.runtime.report import Comparison
from irongrad.runtime.verification import largest_error


class Bounds:
    """The largest errors that the results of a function may have.

    Args:
        graph: the captured function.
        values: its arguments.
        exact: its results in float64.
    """

    def __init__(self, graph: GraphModule, values: Sequence[torch.Tensor], exact: Sequence[torch.Tensor]) -> None:
        self._values = list(values)
        self._exact = Values()
        for place, result in enumerate(exact):
            self._exact.record(str(place), result)
        spread = Spread(self._exact)

        def run(seed: int | None) -> None:
            for place, result in enumerate(run_own(graph, values, seed)):
                spread.record(str(place), result)

        *_, self._allowed = spread.widened_by(run, sum(v.numel() for v in values))

    def ratios(self, graph: GraphModule) -> Iterator[float]:
        """Yield for each result the error of `graph`, as a share of the largest allowed error."""
        for place, result in enumerate(run_own(graph, self._values)):
            error = largest_error(to_numpy(result), self._exact.arrays[str(place)])
            yield Comparison("", str(place), error, self._allowed[str(place)]).ratio


def run_own(graph: GraphModule, values: Sequence[torch.Tensor], seed: int | None = None) -> list[torch.Tensor]:
    """Run a functional graph in its own dtypes, with the rounding noise of `seed` unless that is None."""
    with torch.no_grad(), eager_control_flow():
        runner = Eager(graph) if seed is None else _Noisy(graph, RoundingNoise(seed))
        return runner.outputs([v.clone() for v in values])


class _Noisy(Eager):
    def __init__(self, graph: GraphModule, noise: RoundingNoise) -> None:
        super().__init__(graph)
        self._noise = noise
        self._rounding = _rounding(graph)

    def of_body(self, body: GraphModule) -> Eager:
        """Return the interpreter of a body, which adds the same noise."""
        return _Noisy(body, self._noise)

    def run_node(self, n: Node) -> Any:
        """Run one node with noise if it rounds; control flow gets its noise inside the bodies."""
        with self._noise if n in self._rounding else nullcontext():
            return super().run_node(n)


def _rounding(graph: GraphModule) -> set[Node]:
    """The calls whose floating-point results depend on floating-point arguments.

    Values computed from integers alone are exact: random numbers, positions of elements, constants. Eager's operators
    compute these inside, where no noise reaches them. Noise would change a mask or a position, not the last bits.
    """
    known: set[Node] = set()
    for node in graph.graph.nodes:
        if _is_floating(node) and (node.op == "placeholder" or not known.isdisjoint(node.all_input_nodes)):
            known.add(node)
    return {n for n in known if n.op == "call_function" and not isinstance(n.target, HigherOrderOperator)}


def _is_floating(node: Node) -> bool:
    values = tree_leaves(node.meta.get("val"))
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)
