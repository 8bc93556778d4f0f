"""Functions that are called many times in a trace: their operators are traced once, and then the nodes are copied.

`make_fx` takes about a millisecond per operator, with its decomposition and its fake tensors. A recorder takes a fifth
of that, and copying the node takes a thirtieth.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor,
)

from irongrad.graph import recorder
from irongrad.graph.recorder import Recorder

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class _Call:
    """The nodes that a call added to the graph.

    Attributes:
        kinds: the shape and dtype of each argument.
        arguments: the nodes of the arguments.
        nodes: the added nodes, in order.
        results: the nodes of the results.
        values: the results.
    """

    kinds: list[tuple[torch.Size, torch.dtype]]
    arguments: list[Node]
    nodes: list[Node]
    results: list[Node]
    values: list[Tensor]


class Repeated:
    """A pure function of tensors; while it is traced, later calls copy the nodes of an earlier call if possible.

    The earlier call had arguments of the same shapes and dtypes, and all of them were distinct tensors. An initial
    state of zeros is often one tensor for several arguments. The nodes then do not tell which of these arguments an
    operator takes.

    Args:
        function: the function. It depends on its arguments alone.
    """

    def __init__(self, function: Callable[..., Tensors]) -> None:
        self._function = function
        self._call: _Call | None = None

    def __call__(self, *values: Tensor) -> list[Tensor]:
        """Return the results of `function`."""
        trace = _trace()
        recorded = any(v.requires_grad for v in values)  # autograd does not record copied nodes
        if trace is None or recorded or not all(isinstance(size, int) for v in values for size in v.shape):
            return list(self._function(*values))
        kinds, arguments = [(v.shape, v.dtype) for v in values], _nodes(values, trace)
        if self._call is not None and self._call.kinds == kinds and arguments:
            return _copied(self._call, arguments, trace)
        last = next(reversed(trace.graph.nodes))
        made = list(self._function(*values))
        nodes = [*itertools.takewhile(lambda n: n is not last, reversed(trace.graph.nodes))][::-1]
        results = _nodes(made, trace)
        if results and len(set(arguments)) == len(values):
            self._call = _Call(kinds, arguments, nodes, results, made)
        return made


class _ByMakeFx:
    """The current trace of `make_fx`, with the methods of `Recorder`.

    Attributes:
        graph: the graph traced so far.
    """

    def __init__(self, tracer: Any) -> None:
        self.graph: Graph = tracer.graph
        self._tracer = tracer

    def found(self, value: Tensor) -> Node | None:
        """Return the node of `value`; None for a constant."""
        slot = get_proxy_slot(value, self._tracer, None)
        return None if slot is None else slot.proxy.node

    def another(self, like: Tensor, node: Node) -> Tensor:
        """Return a new tensor like `like` that is the result of `node`."""
        with disable_proxy_modes_tracing():
            value = torch.empty_like(like)
        track_tensor(value, Proxy(node, self._tracer), constant=None, tracer=self._tracer)
        return value


def _trace() -> _ByMakeFx | Recorder | None:
    """The current trace, if there is one."""
    mode = get_proxy_mode()
    return recorder.current() if mode is None else _ByMakeFx(mode.tracer)


def _nodes(values: Tensors, trace: _ByMakeFx | Recorder) -> list[Node]:
    """The nodes of traced tensors; empty if one of them is a constant."""
    found = [node for value in values if (node := trace.found(value)) is not None]
    return found if len(found) == len(values) else []


def _copied(call: _Call, arguments: list[Node], trace: _ByMakeFx | Recorder) -> list[Tensor]:
    new = dict(zip(call.arguments, arguments, strict=True))
    for node in call.nodes:
        new[node] = trace.graph.node_copy(node, lambda n: new.get(n, n))
    return [trace.another(value, new.get(node, node)) for value, node in zip(call.values, call.results, strict=True)]
