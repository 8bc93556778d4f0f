"""Record the graphs of the functions that passes write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule

from irongrad.graph import recorder
from irongrad.graph.subgraphs import simplified
from irongrad.operators.decompositions import decomposition_table
from irongrad.operators.legalize.empty_tensors import fold_empty_tensors
from irongrad.operators.legalize.stacked_scalars import stack_scalars_first

# The mode of the fake tensors in recorded graphs.
_MODE = FakeTensorMode(allow_non_fake_inputs=True)


def record(function: Callable[..., torch.Tensor], kinds: Sequence[tuple[Sequence[int], torch.dtype]]) -> GraphModule:
    """Record the graph of `function` on tensors of `kinds`; its one output is a list of the result.

    Args:
        function: functional, and made of operators that the decomposition table knows or the importer accepts.
        kinds: the sizes and dtype of each operand.
    """
    graph = recorder.record(lambda *operands: [function(*operands)], kinds, decomposition_table(), _MODE)
    return simplified(graph, [stack_scalars_first, fold_empty_tensors])
