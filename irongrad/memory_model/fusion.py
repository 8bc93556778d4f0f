"""Which operations IREE fuses into one kernel, and in which order kernels run.

A model of dispatch formation in IREE 3.13.0 (`fuseRootsWithConsumers` in FormDispatchRegions.cpp, in
compiler/src/iree/compiler/DispatchCreation), made to predict bytes. Every operation (`fused_operations.py`) is a
kernel. The kernel of a contraction, convolution or reduction also computes its only reader, if that is an elementwise
operation, and then the only reader of that operation, and so on. The other inputs of a fused reader are computed before
the kernel. IREE does not fuse a reader if

* another input of the reader depends on the kernel (`hasTransitiveDependencyOnFusionGroup`);
* the reader has more dimensions than the input of the reduction, or another size than the product;
* the kernel would read and write more than 16 values;
* the contraction reads blocks (`blocked_operands.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Graph, Node

from irongrad.memory_model.blocked_operands import reads_blocks
from irongrad.memory_model.chunked_products import chunked_by, total_of
from irongrad.memory_model.fused_operations import MOST_OPERANDS, Operations
from irongrad.memory_model.kernel_roles import bytes_of, dimensions_of, is_control, is_reduction, shape_of, source
from irongrad.memory_model.written_views import CONTRACTIONS, is_in_place


@dataclass(frozen=True)
class Kernels:
    """Which kernel computes which node.

    Attributes:
        operations: the operations, with the readers and operands of their nodes.
        members: the nodes of each kernel, by the node that stands for it, in the order in which kernels run.
        position: the index of every node in that order.
        of_blocks: the contractions that read blocks.
        is_body: whether the graph is the body of a loop or a branch.
    """

    operations: Operations
    members: dict[Node, list[Node]]
    position: dict[Node, int]
    of_blocks: frozenset[Node]
    is_body: bool

    @property
    def leader(self) -> dict[Node, Node]:
        """For each computed node, the node that stands for its kernel."""
        return self.operations.leader

    def runs_at(self, node: Node) -> int:
        """The position of the kernel that computes `node`; the node's own if it has no kernel, such as the output."""
        return self.position[self.leader.get(node, node)]

    def is_stored(self, node: Node) -> bool:
        """Whether the value of `node` is written to memory, because another kernel or the output reads it."""
        head = self.leader[node]
        return any(self.leader.get(r) is not head for r in self.operations.readers[node])

    def reads(self, head: Node) -> dict[Node, None]:
        """The values that the kernel of `head` reads from memory, in order."""
        return self.operations.operands(self.members[head])


def kernels(graph: Graph, *, packed: bool, is_body: bool = False) -> Kernels:
    """Group the nodes of a graph into kernels.

    Args:
        graph: the graph.
        packed: whether operands of contractions are packed; large contractions then read blocks.
        is_body: whether the graph is the body of a loop or a branch.
    """
    of_blocks = frozenset(n for n in graph.nodes if reads_blocks(n)) if packed else frozenset()
    forming = _Forming(graph)
    found = forming.operations
    for product in of_blocks:
        if (total := total_of(product)) is not None:
            forming.join([total, *chunked_by(product)], product)
    for head in sorted(found.members, key=found.position.__getitem__):
        if not (found.is_elementwise(head) or is_in_place(head) or is_control(head) or head in of_blocks):
            forming.absorb(head)
    members = {n: found.members[n] for n in forming.order if n in found.members}
    return Kernels(found, members, forming.position, of_blocks, is_body)


def _fits(root: Node, head: Node) -> bool:
    """Whether the iteration space of elementwise `head` fits that of the kernel of `root`."""
    if is_reduction(root):
        return dimensions_of(head) <= dimensions_of(root.args[0])
    return bytes_of(head) == bytes_of(root) and not _cuts_columns(root, head)


def _is_reshaped_product(node: Node) -> bool:
    """Whether `node` reads a product with divided dimensions: `SinkReshapes.cpp` gives it the product's dimensions."""
    products = ((n, source(n)) for n in node.all_input_nodes)
    return any(p.target in CONTRACTIONS and dimensions_of(n) > dimensions_of(p) for n, p in products)


def _cuts_columns(root: Node, head: Node) -> bool:
    """Whether a reshape between a contraction and its reader divides the last dimension."""
    if root.target not in CONTRACTIONS:
        return False
    return bool(shape_of(head)[-1:] != shape_of(root)[-1:])


class _Forming:
    """Kernels while they fuse with their readers.

    Attributes:
        operations: the kernels so far.
        order: all nodes in the order in which their kernels run.
        position: the index of each node in `order`.
    """

    def __init__(self, graph: Graph) -> None:
        self.operations = Operations(graph)
        self.order = list(graph.nodes)
        self.position = dict(self.operations.position)

    def join(self, nodes: Iterable[Node], product: Node) -> None:
        """Let the kernel of `product` compute those of `nodes` that are operations of their own."""
        for node in nodes:
            if self.operations.members.get(node) == [node]:
                self.operations.merge(node, product)

    def absorb(self, root: Node) -> None:
        """Fuse the only reader of `root` into its kernel if that is elementwise; repeat with that reader's reader."""
        last = [root]
        while (head := self._only_reader(last, root)) is not None:
            if not self.operations.is_elementwise(head) or not _fits(root, head):
                return
            if is_reduction(root) and any(map(_is_reshaped_product, self.operations.members[head])):
                return
            late = self._also_needed(root, head)
            if late is None or self._operand_count(root, head) > MOST_OPERANDS:
                return
            self._move_before(late, root)
            last = list(self.operations.members[head])
            self.operations.merge(head, root)

    def _only_reader(self, last: list[Node], root: Node) -> Node | None:
        """The kernel or output that alone reads the nodes `last` of the kernel of `root`; None if there are several."""
        reading = self.operations.reading(last) - {root}
        return next(iter(reading)) if len(reading) == 1 else None

    def _also_needed(self, root: Node, head: Node) -> set[Node] | None:
        """The nodes of kernels after `root` that the kernel of `head` also needs; None if one of them needs `root`."""
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

    def _operand_count(self, root: Node, head: Node) -> int:
        """The number of values that the kernels of `root` and `head` would read and write if they were fused."""
        inside = {*self.operations.members[root], *self.operations.members[head]}
        written = {n for n in inside if not inside.issuperset(self.operations.readers[n])}
        return len(self.operations.operands(inside)) + len(written)

    def _move_before(self, nodes: set[Node], root: Node) -> None:
        """Move `nodes` directly before `root`."""
        if nodes:
            others = [n for n in self.order if n not in nodes]
            place = others.index(root)
            self.order = [*others[:place], *sorted(nodes, key=self.position.__getitem__), *others[place:]]
            self.position = {n: i for i, n in enumerate(self.order)}
