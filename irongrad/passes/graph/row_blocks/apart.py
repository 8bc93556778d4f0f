"""Take a softmax and its gradient out of a graph, as a graph of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from irongrad.graph.nodes import value_of
from irongrad.memory_model.kernel_roles import is_constant, source
from irongrad.passes.graph.row_blocks.region import Axes, Region
from irongrad.passes.recompute import is_backward, never, tie


@dataclass(frozen=True)
class Apart:
    """A softmax with its gradient, apart.

    Attributes:
        graph: the graph. Its arguments are what the regions read, without constants; its results are what others read.
        node: the matrix under the softmax.
        axes: its rows and columns.
    """

    graph: GraphModule
    node: Node
    axes: Axes

    @property
    def operands(self) -> list[torch.Tensor]:
        """Tensors with the shapes and dtypes of the arguments."""
        values = [value_of(n) for n in self.graph.graph.find_nodes(op="placeholder")]
        return [torch.empty(v.shape, dtype=v.dtype, device="meta") for v in values]

    @property
    def description(self) -> str:
        """The computation in words, with a hash of its operators; equal computations have equal descriptions."""
        digest = hashlib.sha256(str(self.graph.graph).encode())
        for _, constant in self.graph.named_buffers():
            digest.update(constant.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        value = value_of(self.node)
        sizes = "x".join(map(str, value.shape))
        return f"softmax {sizes} {str(value.dtype).removeprefix('torch.')}, operators {digest.hexdigest()[:8]}"


def apart(regions: Sequence[Region], node: Node) -> Apart:
    """Copy what `regions` compute into a graph of its own; `node` is the matrix under the softmax.

    In a network the gradient that the backward reads depends on the result of the forward. Here it would not, so it is
    tied to that result.
    """
    copy = _Copy(regions)
    for one in copy.inside:
        copy.add(one)
    results = [n for n in copy.inside if any(u not in copy.inside for u in n.users)]
    copy.graph.output(tuple(copy.new[n] for n in results))
    copy.module.graph = copy.graph
    copy.module.recompile()
    return Apart(copy.module, copy.new[node], regions[0].axes[node])


class _Copy:
    def __init__(self, regions: Sequence[Region]) -> None:
        own = {n for region in regions for n in region.axes}
        self.inside = dict.fromkeys(n for n in next(iter(own)).graph.nodes if n in own)
        self.graph, self.module = Graph(), GraphModule({}, Graph())
        self.new: dict[Node, Node] = {}
        self._backward = regions[1].axes if len(regions) > 1 else {}
        self._forward = regions[0].results
        self._tied: dict[Node, Node] = {}
        self._never: Node | None = None
        for operand in dict.fromkeys(o for n in self.inside for o in n.all_input_nodes if o not in self.inside):
            if not is_constant(source(operand)):
                self.new[operand] = self.graph.placeholder(f"x{len(self.new)}")
                self.new[operand].meta = dict(operand.meta)

    def add(self, node: Node) -> Node:
        """Copy a node, and the constants that it reads."""
        if node in self.new:
            return self.new[node]
        if node.op == "get_attr":
            name = f"constant{len(list(self.module.buffers()))}"
            self.module.register_buffer(name, getattr(node.graph.owning_module, str(node.target)))
            new = self.graph.get_attr(name)
        else:
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: self._operand(n, node))
            new = self.graph.call_function(node.target, args, kwargs)
        new.meta = dict(node.meta)
        self.new[node] = new
        return new

    def _operand(self, operand: Node, reader: Node) -> Node:
        new = self.add(operand)
        done = [self.new[n] for n in self._forward if n in self.new and value_of(n).is_floating_point()]
        late = operand not in self.inside and is_backward(operand) and reader in self._backward
        if not late or not done or not value_of(operand).is_floating_point():
            return new
        self._never = self._never or never(self.graph, done[-1:])
        if operand not in self._tied:
            self._tied[operand] = tie(self.graph, new, self._never)
        return self._tied[operand]
