"""Which operations IREE computes in one kernel, and in which order kernels run.

A model of dispatch formation in IREE 3.13.0 (`fuseRootsWithConsumers` in FormDispatchRegions.cpp, in
compiler/src/iree/compiler/DispatchCreation), made to predict bytes. Every operation (`operations.py`) is a kernel, and
a contraction, convolution or reduction computes in its kernel the elementwise operation that alone reads it; and so on
with what alone reads that. Not, where

* that reads something else that depends on the kernel (`hasTransitiveDependencyOnFusionGroup`). What else it reads is
  then computed before the kernel;
* it has more dimensions than what is reduced, or another size than the product;
* the kernel would read and write more than 16 values;
* the contraction reads blocks (`blocks.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node

from irongrad.memory_model.blocked_operands import reads_blocks
from irongrad.memory_model.fused_operations import MOST_OPERANDS, Operations
from irongrad.memory_model.kernel_roles import bytes_of, is_control, is_reduction, shape_of, source
from irongrad.memory_model.written_views import CONTRACTIONS, is_in_place


@dataclass(frozen=True)
class Kernels:
    """Which kernel computes which node.

    Attributes:
        operations: the nodes by kernel.
        members: by a node that stands for a kernel, its nodes, in the order in which kernels run.
        position: of every node in that order.
        of_blocks: the contractions that read blocks.
    """

    operations: Operations
    members: dict[Node, list[Node]]
    position: dict[Node, int]
    of_blocks: frozenset[Node]

    @property
    def leader(self) -> dict[Node, Node]:
        """By node that is computed, the node that stands for its kernel."""
        return self.operations.leader

    def runs_at(self, node: Node) -> int:
        """When `node` is computed; its own position where it is no kernel's, such as the output."""
        return self.position[self.leader.get(node, node)]

    def is_stored(self, node: Node) -> bool:
        """Whether the value of `node` reaches memory: somebody outside its kernel reads it."""
        head = self.leader[node]
        return any(self.leader.get(r) is not head for r in self.operations.readers[node])

    def reads(self, head: Node) -> dict[Node, None]:
        """The values that the kernel of `head` reads from memory, in order."""
        return self.operations.operands(self.members[head])


def kernels(graph: Graph, *, packed: bool) -> Kernels:
    """Group the nodes of `graph` into kernels; contractions read blocks where their operands are `packed`."""
    of_blocks = frozenset(n for n in graph.nodes if reads_blocks(n)) if packed else frozenset()
    forming = _Forming(graph)
    found = forming.operations
    for head in sorted(found.members, key=found.position.__getitem__):
        if not (found.is_elementwise(head) or is_in_place(head) or is_control(head) or head in of_blocks):
            forming.absorb(head)
    members = {n: found.members[n] for n in forming.order if n in found.members}
    return Kernels(found, members, forming.position, of_blocks)


def _fits(root: Node, head: Node) -> bool:
    """Whether what the kernel of `root` goes over is as much as elementwise `head` does."""
    if is_reduction(root):
        return _dimensions(head) <= _dimensions(root.args[0])
    return bytes_of(head) == bytes_of(root) and not _cuts_columns(root, head)


def _is_reshaped_product(node: Node) -> bool:
    """Whether `node` reads a product with its dimensions divided: `SinkReshapes.cpp` gives it those of the product."""
    products = ((n, source(n)) for n in node.all_input_nodes)
    return any(p.target in CONTRACTIONS and _dimensions(n) > _dimensions(p) for n, p in products)


def _dimensions(node: Node) -> int:
    return sum(size != 1 for size in shape_of(node))


def _cuts_columns(root: Node, head: Node) -> bool:
    """Whether a reshape between a contraction and what reads it divides the last dimension."""
    if root.target not in CONTRACTIONS:
        return False
    return bool(shape_of(head)[-1:] != shape_of(root)[-1:])


class _Forming:
    """Kernels while they take in what reads them.

    Attributes:
        operations: the kernels so far.
        order: all nodes in the order in which their kernels run.
        position: by node, its place in `order`.
    """

    def __init__(self, graph: Graph) -> None:
        self.operations = Operations(graph)
        self.order = list(graph.nodes)
        self.position = dict(self.operations.position)

    def absorb(self, root: Node) -> None:
        """Compute in the kernel of `root` the elementwise operation that alone reads it, and so on."""
        last = [root]
        while (head := self._only_reader(last, root)) is not None:
            if not self.operations.is_elementwise(head) or not _fits(root, head):
                return
            if is_reduction(root) and any(map(_is_reshaped_product, self.operations.members[head])):
                return
            late = self._late(root, head)
            if late is None or self._operands(root, head) > MOST_OPERANDS:
                return
            self._move(late, root)
            last = list(self.operations.members[head])
            self.operations.merge(head, root)

    def _only_reader(self, last: list[Node], root: Node) -> Node | None:
        """The other kernel, or output, that alone reads values of the nodes `last` of the kernel of `root`."""
        reading = self.operations.reading(last) - {root}
        return next(iter(reading)) if len(reading) == 1 else None

    def _late(self, root: Node, head: Node) -> set[Node] | None:
        """The nodes of kernels after `root` that the kernel of `head` needs besides; None where one needs `root`."""
        found: set[Node] = set()
        stack = list(self.operations.producers(head).keys() - {root})
        while stack:
            kernel = stack.pop()
            if kernel is root or kernel is head:
                return None
            if kernel not in found and self.position[kernel] > self.position[root]:
                found.add(kernel)
                stack.extend(self.operations.producers(kernel))
        return {n for kernel in found for n in self.operations.members[kernel]}

    def _operands(self, root: Node, head: Node) -> int:
        """How many values the kernels of `root` and `head` would read and write as one."""
        inside = {*self.operations.members[root], *self.operations.members[head]}
        written = {n for n in inside if not inside.issuperset(self.operations.readers[n])}
        return len(self.operations.operands(inside)) + len(written)

    def _move(self, nodes: set[Node], root: Node) -> None:
        """Have `nodes` run right before `root`."""
        if nodes:
            others = [n for n in self.order if n not in nodes]
            place = others.index(root)
            self.order = [*others[:place], *sorted(nodes, key=self.position.__getitem__), *others[place:]]
            self.position = {n: i for i, n in enumerate(self.order)}
