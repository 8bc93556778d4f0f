"""Tracing a function of tensors to a functional graph of the operators that the importer takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from irongrad.pipeline.decompositions import decomposition_table


def retrace(
    function: Callable[..., Sequence[torch.Tensor]], examples: Sequence[torch.Tensor], *, decompose: bool = True
) -> GraphModule:
    """Trace `function` on fake copies of `examples`, keeping the stack traces of graphs it interprets.

    Args:
        function: takes tensors like `examples`, returns a flat sequence of tensors, mutates nothing.
        examples: real or fake tensors; only shapes, dtypes and strides matter.
        decompose: expand operators with IronGrad's decomposition table.
    """
    table = decomposition_table() if decompose else {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [torch.empty_strided(e.shape, e.stride(), dtype=e.dtype) for e in examples]
    with mode, torch.no_grad(), preserve_node_meta():
        graph = make_fx(function, decomposition_table=table, tracing_mode="real")(*fakes)
    graph = GraphModule(graph, fx_graph_cse(graph.graph))
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph
