"""Tracing a function of tensors to a functional graph of the operators that the importer takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch.compile_utils import fx_graph_cse
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import Target
from torch.fx.traceback import preserve_node_meta

from irongrad.pipeline.decompose_stacks import stack_scalars_first
from irongrad.pipeline.decompositions import decomposition_table


def retrace(
    function: Callable[..., Sequence[torch.Tensor]], examples: Sequence[torch.Tensor], *, decompose: bool = True
) -> GraphModule:
    """Trace `function` on fake copies of `examples`, keeping the stack traces of graphs it interprets.

    Args:
        function: takes tensors like `examples`, returns a flat sequence of tensors, mutates nothing.
        examples: real or fake tensors; only shapes and dtypes matter: a compiled step has no strides.
        decompose: expand operators with IronGrad's decomposition table.
    """
    table = decomposition_table() if decompose else {}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [torch.empty(e.shape, dtype=e.dtype) for e in examples]
    with mode, torch.no_grad(), preserve_node_meta():
        graph = make_fx(function, decomposition_table=table, tracing_mode="real")(*fakes)
    graph = GraphModule(graph, fx_graph_cse(graph.graph))
    stack_scalars_first(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


def interpret(graph: GraphModule, values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run `graph` on flat `values` and return its flat outputs."""
    outputs: Sequence[torch.Tensor] = _Contiguous(graph).run(*values, enable_io_processing=False)
    return outputs


class _Contiguous(torch.fx.Interpreter):
    """Runs a graph that was traced with the user's strides (channels-last weights, say) on contiguous tensors."""

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # view asks for strides that fit; reshape is the same function of the values without that demand.
        if target is torch.ops.aten.view.default:
            target = torch.ops.aten.reshape.default
        return super().call_function(target, args, kwargs)
