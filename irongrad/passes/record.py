"""Writing down what a function of tensors computes, for functions that passes write.

`make_fx` does that for any function, by way of fake tensors and proxies: a millisecond an operator, which was a quarter
of all Python for a ResNet-18. What passes write is functional and reads no values, so that tensors without storage are
enough, and a node for each operator that is called on them: a fifth of the time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from irongrad.decompositions import decomposition_table
from irongrad.decompositions.registry import Decomposition, Operator
from irongrad.passes import without_storage
from irongrad.pipeline.empties import fold_empty_tensors
from irongrad.pipeline.regions import simplified
from irongrad.pipeline.stacks import stack_scalars_first

# Of the values in what is recorded.
_MODE = FakeTensorMode(allow_non_fake_inputs=True)


def record(function: Callable[..., torch.Tensor], kinds: Sequence[tuple[Sequence[int], torch.dtype]]) -> GraphModule:
    """The graph of `function` on tensors of `kinds`: their sizes and dtypes; with one output, the list of its result.

    Args:
        function: functional, and made of operators that the decomposition table knows, if not of those that the
            importer takes.
        kinds: of its operands.
    """
    recorder = _Recorder(decomposition_table())
    operands = [without_storage.empty(sizes, dtype) for sizes, dtype in kinds]
    for number, operand in enumerate(operands):
        recorder.holds(operand, recorder.graph.placeholder(f"arg{number}"))
    with recorder, torch.no_grad():
        result = function(*operands)
    recorder.graph.output([recorder.node_of(result)])
    return simplified(_make_graph_module({}, recorder.graph), [stack_scalars_first, fold_empty_tensors])


class _Recorder(TorchDispatchMode):
    """While open, adds a node to `graph` for each operator that is called.

    Attributes:
        graph: what was called so far.
    """

    def __init__(self, table: Mapping[Operator, Decomposition]) -> None:
        super().__init__()
        self.graph = Graph()
        self._table = table
        self._nodes: dict[int, Node] = {}
        self._alive: list[torch.Tensor] = []  # else another tensor might get the identity of one of these

    def holds(self, value: torch.Tensor, node: Node) -> None:
        """Remember that `node` is where `value` comes from."""
        node.meta["val"] = without_storage.faked(value, _MODE)
        self._keep(value, node)

    def _keep(self, value: torch.Tensor, node: Node) -> None:
        self._nodes[id(value)] = node
        self._alive.append(value)

    def node_of(self, value: torch.Tensor) -> Node:
        """Where `value` comes from."""
        return self._nodes[id(value)]

    def _node_or_value(self, value: Any) -> Any:
        return self.node_of(value) if isinstance(value, torch.Tensor) else value

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Decompose an operator that is decomposed, or else record it.

        Inside a decomposition the dispatcher no longer expands composite operators by itself: `decompose` does.
        """
        kwargs = kwargs or {}
        for decomposition in (self._table.get(func), func.decompose):
            if decomposition is not None:
                with self:
                    result = decomposition(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        result = without_storage.result_of(func, args, kwargs)
        if func is torch.ops.aten.alias.default:  # nothing is written, so it stands for the tensor itself
            self._keep(result, self.node_of(args[0]))
        else:
            self._add(func, args, kwargs, result)
        return result

    def _add(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        args, kwargs = map_aggregate((args, kwargs), self._node_or_value)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": without_storage.CPU}
        node = self.graph.call_function(func, args, kwargs)
        if isinstance(result, torch.Tensor):
            self.holds(result, node)
            return
        node.meta["val"] = without_storage.faked(result, _MODE)
        for number, value in enumerate(result):
            self.holds(value, self.graph.call_function(operator.getitem, (node, number)))
