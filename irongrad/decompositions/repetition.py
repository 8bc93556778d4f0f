"""A function that is called many times while a graph is traced, and the operators it is made of only once.

make_fx takes about a millisecond for an operator, with its decomposition and its fake tensors. Copying its node takes a
thirtieth of that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node, Proxy
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor,
)

Tensors = Sequence[Tensor]


@dataclass(frozen=True)
class _Call:
    """The nodes that a call added to the graph.

    Attributes:
        kinds: shape and dtype of each argument.
        arguments: their nodes.
        nodes: what was added.
        results: the nodes of the results.
        values: the results.
    """

    kinds: list[tuple[torch.Size, torch.dtype]]
    arguments: list[Node]
    nodes: list[Node]
    results: list[Node]
    values: list[Tensor]


class Repeated:
    """`function`, a pure function of the tensors that it is given; under make_fx its nodes are copied where possible.

    They are those of an earlier call whose arguments were of the same shapes and dtypes, and were distinct: a first
    state of zeros is often one tensor for several arguments, and then nothing tells which of them an operator takes.
    """

    def __init__(self, function: Callable[..., Tensors]) -> None:
        self._function = function
        self._call: _Call | None = None

    def __call__(self, *values: Tensor) -> list[Tensor]:
        """The results of `function`."""
        mode = get_proxy_mode()
        recorded = any(v.requires_grad for v in values)  # by autograd, which a copy of nodes is not
        if mode is None or recorded or not all(isinstance(size, int) for v in values for size in v.shape):
            return list(self._function(*values))
        tracer = mode.tracer
        kinds, arguments = [(v.shape, v.dtype) for v in values], _nodes(values, tracer)
        if self._call is not None and self._call.kinds == kinds and arguments:
            return _copied(self._call, arguments, tracer)
        last = next(reversed(tracer.graph.nodes))
        made = list(self._function(*values))
        nodes = [*itertools.takewhile(lambda n: n is not last, reversed(tracer.graph.nodes))][::-1]
        results = _nodes(made, tracer)
        if results and len(set(arguments)) == len(values):
            self._call = _Call(kinds, arguments, nodes, results, made)
        return made


def _nodes(values: Tensors, tracer: Any) -> list[Node]:
    """The nodes of traced tensors; none where one is a constant."""
    slots = [get_proxy_slot(value, tracer, None) for value in values]
    return [] if None in slots else [slot.proxy.node for slot in slots]


def _copied(call: _Call, arguments: list[Node], tracer: Any) -> list[Tensor]:
    new = dict(zip(call.arguments, arguments, strict=True))
    for node in call.nodes:
        new[node] = tracer.graph.node_copy(node, lambda n: new.get(n, n))
    with disable_proxy_modes_tracing():
        made = [torch.empty_like(value) for value in call.values]
    for value, node in zip(made, call.results, strict=True):
        track_tensor(value, Proxy(new.get(node, node), tracer), constant=None, tracer=tracer)
    return made
