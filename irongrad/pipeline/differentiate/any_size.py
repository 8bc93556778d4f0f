"""Run a captured graph with its named dimensions as symbols, so that one trace serves every size.

The trace is right for every size only if no operator tests a size. PyTorch answers such a test from the example, and
keeps it as a guard. So the first operator that tests a size is refused, with its line. Conditions of the captured
program itself are allowed: the entry points check them (`irongrad.sizes.limits`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from irongrad.diagnostics.source_lines import line_of
from irongrad.graph.subgraphs import check_control_flow
from irongrad.operators.legalize.retrace import Portable, interpret_eager
from irongrad.pipeline.capture.plain_operators import plain_operators
from irongrad.runtime.errors import UnsupportedOpError
from irongrad.sizes.asked import Asked, listed
from irongrad.sizes.symbols import environment_of

# Entry points check the conditions that these assert.
_ASSERTIONS = frozenset({torch.ops.aten._assert_scalar.default, torch.ops.aten.sym_constrain_range_for_size.default})


def interpret_any_size(
    graph: GraphModule, values: Sequence[torch.Tensor], known: Collection[Any] = ()
) -> Sequence[torch.Tensor]:
    """Run `graph` as `interpret_eager` does, on fake tensors whose named dimensions are symbols.

    Args:
        graph: a captured graph.
        values: its arguments.
        known: conditions on named dimensions that every call satisfies, in their form by `canonical`.

    Raises:
        UnsupportedOpError: an operator's form depends on a size; names the user's line.
    """
    environment = environment_of(values)
    if environment is None:
        return interpret_eager(graph, values)
    check_control_flow(graph)
    with plain_operators():
        outputs: Sequence[torch.Tensor] = _AnySize(graph, environment, known).run(*values, enable_io_processing=False)
    return outputs


class _AnySize(Portable):
    def __init__(self, graph: GraphModule, environment: ShapeEnv, known: Collection[Any]) -> None:
        super().__init__(graph)
        self._asked = Asked(environment, known)

    def run_node(self, n: Node) -> Any:
        """Run one node, and refuse it if it tests a condition on sizes that is not known to hold."""
        if n.target in _ASSERTIONS:
            return None
        result = super().run_node(n)
        if new := self._asked.new():
            raise UnsupportedOpError(self._refusal(n, new))
        return result

    def _refusal(self, node: Node, asked: Sequence[Any]) -> str:
        names = ", ".join(sorted({repr(str(s)) for condition in asked for s in condition.free_symbols}))
        return (
            f"{line_of(node)}\n  {node.target} is compiled differently where {listed(asked)} does not hold, so it "
            f"cannot be compiled for every size of {names}: leave {names} out of dynamic=, so that its size is fixed, "
            "or give buckets= without bucket_fallback, which pad to fixed sizes"
        )
