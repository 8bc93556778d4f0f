"""The one operator of a step graph that ranks compute together; alone, a rank has its own values.

It is a mark: the importer keeps it whole, and the stage `assemble` writes the exchange in its place.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import Graph, Node

# The count of elements, the mean of each channel, and the sum of its squared deviations: those of all ranks' elements.
MOMENTS = "moments"
# Gradients of what `MOMENTS` gave. Each rank gets the sum of all, as its own part of the loss counts them: the loss is
# the mean over the ranks, weighted by their batches.
GRADIENT = "gradient"


@torch.library.custom_op("irongrad::over_ranks", mutates_args=())  # type: ignore[untyped-decorator]
def over_ranks(values: Tensor, kind: str) -> Tensor:
    """Exchange a vector with the other ranks.

    Args:
        values: a vector of float32 or float64.
        kind: `MOMENTS` or `GRADIENT`.
    """
    return values.clone()


@over_ranks.register_fake  # type: ignore[untyped-decorator]
def _fake(values: Tensor, kind: str) -> Tensor:
    return values.new_empty(values.shape)


OVER_RANKS = torch.ops.irongrad.over_ranks.default


def exchanges_in(graph: Graph) -> list[Node]:
    """The exchanges of a graph, in order, without those in the bodies of its control flow."""
    return [node for node in graph.nodes if node.target is OVER_RANKS]


def kinds_of(nodes: Iterable[Node]) -> list[tuple[str, int]]:
    """What each exchange is: its kind, and the number of its elements."""
    return [(str(node.args[1]), int(node.meta["val"].numel())) for node in nodes]
