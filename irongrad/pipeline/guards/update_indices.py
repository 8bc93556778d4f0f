"""Decide on the indices that an update computes: those of an optimizer, of its hooks, and of `after_step`.

An update has no inputs that a call could check before it begins. So each index has to be proved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from torch import Tensor
from torch.fx import GraphModule, Node

from irongrad.graph.flat_graph import FlatGraph
from irongrad.graph.step_graph import Relied
from irongrad.pipeline.guards.decisions import Decided, Decisions
from irongrad.pipeline.guards.early_checks import Part
from irongrad.pipeline.guards.float_indices import clamp, float_indices
from irongrad.pipeline.guards.index_ranges import View, verdicts_on
from irongrad.pipeline.guards.kept_state import with_kept_state
from irongrad.pipeline.guards.relied_bounds import relied_bounds
from irongrad.pipeline.guards.value_bounds import ConstantBounds


def prove_indices(
    graph: GraphModule,
    known: Mapping[Node, Tensor] = MappingProxyType({}),
    changes: Iterable[tuple[Node, Tensor, Node]] = (),
) -> dict[Node, Relied]:
    """Prove that every index is in range, and clamp those that are computed from floats.

    Args:
        graph: the functional graph of an update.
        known: the values of placeholders that the update does not change.
        changes: for each state tensor that it changes, the placeholder, the value, and the new value.

    Returns:
        What the proofs rely on of these values.

    Raises:
        CaptureError: an index is not proved to be in range; names the user's line.
    """
    flat = FlatGraph(graph)
    view = View(flat.nodes, {}, ConstantBounds(known), {}, flat.makers, flat.carried, flat.carries)
    view = with_kept_state(view, changes)
    verdicts = verdicts_on(view)
    decisions = Decisions()
    decisions.add(Decided(verdicts, {}, {}, Part(graph, (), verdicts.bounds)), "update")
    decisions.indices()
    clamp(float_indices(flat.nodes, flat.makers, flat.carried))
    return relied_bounds(view, verdicts)
