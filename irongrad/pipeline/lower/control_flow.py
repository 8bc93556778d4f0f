"""Import of PyTorch's control flow operators (cond, while_loop, scan, map) as regions of structured control flow.

torch-mlir 20261001 imports only `while_loop`, without its additional inputs, and turns its graphs into functions that
it calls. This importer inlines the graph of a branch or loop body into a region of `torch.prim.If` or
`torch.prim.Loop`. torch-mlir lowers `torch.prim.If` to `scf.if`. It lowers `torch.prim.Loop` to `scf.while`, or to
`scf.for` if the trip count is a constant.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node
from torch_mlir.dialects import arith
from torch_mlir.ir import Block, InsertionPoint, IntegerAttr, IntegerType, Location, Operation, Type, Value

from irongrad.diagnostics.source_lines import line_of
from irongrad.graph.nodes import graph_of
from irongrad.graph.over_ranks import OVER_RANKS
from irongrad.graph.subgraphs import has_while_loop
from irongrad.pipeline.lower.dynamic_slices import constant, convert, empty, read_row, size_of, write_row
from irongrad.pipeline.lower.literals import SharedLiterals
from irongrad.pipeline.lower.over_ranks import marked_copy
from irongrad.pipeline.lower.size_values import SizeValues
from irongrad.runtime.errors import UnsupportedOpError

Body = Callable[[Value, Sequence[Value]], Sequence[Value]]


class ControlFlowImporter(SharedLiterals):
    """Imports the nodes of a graph; control flow operators become operations with regions."""

    _in_loop = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._reversed: set[Node] = set()

    def _import_torch_op_overload(
        self, loc: Location, node: Node, concrete_target: torch._ops.OpOverload | None = None
    ) -> None:
        """Import an operator; `x == x` is imported as the equivalent `x <= x`, an exchange as a marked copy.

        A reversal of a stack that a loop has written from its last row on is the stack itself.

        torch-mlir 20261001 folds `x == x` to true (`AtenEqTensorOp::fold`), even if x is NaN. `isfinite` compares a
        value with itself to detect NaN.
        """
        if node in self._reversed:
            with loc:
                self.bind_node_value(node, self._argument(node.args[0]))
            return
        if node.target is OVER_RANKS:
            values, kind = node.args
            with loc:
                self.bind_node_value(node, marked_copy(self._argument(values), str(kind)))
            return
        if node.target is torch.ops.aten.eq.Tensor and node.args[0] is node.args[1]:
            concrete_target = torch.ops.aten.le.Tensor
        super()._import_torch_op_overload(loc, node, concrete_target)

    def _import_hop(self, loc: Location, node: Node, hop: HigherOrderOperator) -> None:
        with loc:
            super()._import_hop(loc, node, hop)

    def _import_hop_cond(self, loc: Location, node: Node, hop: HigherOrderOperator) -> None:
        predicate, *branches, operands = node.args
        inputs = [self._argument(o) for o in operands]
        if self._in_loop:
            self._bind(node, self._selected(node, self._argument(predicate), branches, inputs))
            return
        condition, types = self._argument(predicate), self._types(node)
        # torch-mlir 20261001 turns a choice between two constants into an `arith.select`, which it cannot lower.
        by_branch = [_constant_results(b, operands) for b in branches]
        constants = [all(both) for both in zip(*by_branch, strict=True)]
        kept_types = [kind for kind, fixed in zip(types, constants, strict=True) if not fixed]
        choice = Operation.create("torch.prim.If", results=kept_types, operands=[self._boolean(condition)], regions=2)
        for region, branch in zip(choice.regions, branches, strict=True):
            with _block(region, []):
                outputs = zip(self._inline(branch, inputs), constants, strict=True)
                Operation.create("torch.prim.If.yield", operands=[value for value, fixed in outputs if not fixed])
        selected = self._selected(node, condition, branches, inputs) if any(constants) else types
        chosen = iter(choice.results)
        self._bind(node, [s if fixed else next(chosen) for s, fixed in zip(selected, constants, strict=True)])

    def _selected(self, node: Node, predicate: Value, branches: Sequence[Node], inputs: Sequence[Value]) -> list[Value]:
        """Run both branches and select between their results.

        Choices in a loop need this: there IREE 3.13.0 reads the condition on the host before it is computed ("transient
        buffer has not been committed", or the wrong branch).

        Raises:
            UnsupportedOpError: a branch contains a while_loop, which may never end if its branch is not taken.
        """
        if any(has_while_loop(graph_of(b).owning_module) for b in branches):
            raise UnsupportedOpError(
                f"{line_of(node)}: a while_loop in a branch of torch.cond cannot be compiled in a loop, where both "
                "branches run. Put the choice into the condition of the while_loop"
            )
        true, false = (self._inline(b, inputs) for b in branches)
        return [
            Operation.create("torch.aten.where.self", results=[kind], operands=[predicate, a, b]).result
            for kind, a, b in zip(self._types(node), true, false, strict=True)
        ]

    def _import_hop_while_loop(self, loc: Location, node: Node, hop: HigherOrderOperator) -> None:
        condition, body, carried, additional = node.args
        outer = [self._argument(a) for a in additional]
        types = self._types(node)

        def goes_on(values: Sequence[Value]) -> Value:
            (result,) = self._inline(condition, [*values, *outer])
            return self._boolean(result)

        def loop(index: Value, initial: Sequence[Value]) -> Sequence[Value]:
            operands = [self._integer(torch.iinfo(torch.int64).max), goes_on(initial), *initial]
            made = Operation.create("torch.prim.Loop", results=types, operands=operands, regions=1)
            with _block(made.regions[0], [self._cc.torch_int_type, *types]) as block:
                after = self._inline(body, [*block.arguments[1:], *outer], in_loop=True)
                Operation.create("torch.prim.Loop.condition", operands=[goes_on(after), *after])
            return list(made.results)

        # An outer loop of one iteration, which lowering removes: torch-mlir 20261001 takes a loop for an endless one
        # if it can fold the first condition to true (`PrimLoopOp::isForLike`).
        self._bind(node, self._counted(constant(1, self._c), [self._argument(c) for c in carried], loop))

    def _import_hop_scan(self, loc: Location, node: Node, hop: HigherOrderOperator) -> None:
        self._for_each(node, *node.args)

    def _import_hop_map_impl(self, loc: Location, node: Node, hop: HigherOrderOperator) -> None:
        body, sequences, additional = node.args
        self._for_each(node, body, (), sequences, additional)

    def _for_each(
        self, node: Node, body: Node, carried: Sequence[Any], sequences: Sequence[Any], additional: Sequence[Any]
    ) -> None:
        """Import a loop over the first dimension of `sequences`; results of `body` after its carries are stacked.

        Raises:
            UnsupportedOpError: the size of a result is dynamic, and no arithmetic of the sizes of operands.
        """
        outer = [self._argument(a) for a in additional]
        upwards = [s in self._reversed or not _is_reversed(s) for s in sequences]
        stacked = [self._argument(s if up else s.args[0]) for s, up in zip(sequences, upwards, strict=True)]
        initial = [self._argument(c) for c in carried]
        size = len(initial)
        operands = zip([*carried, *sequences, *additional], [*initial, *stacked, *outer], strict=True)
        tensors = [(n, v) for n, v in operands if isinstance(n.meta["val"], torch.Tensor)]
        sizes = SizeValues(tensors, self._c)
        stacks = [self._empty(node, v, sizes) for v in node.meta["val"][size:]]
        trips = self._trips(sequences[0], stacked[0])
        flips = [_reversals(node, size + i) for i in range(len(stacks))]

        def step(index: Value, values: Sequence[Value]) -> Sequence[Value]:
            last = arith.SubIOp(trips, constant(1, self._c)).result
            reverse = arith.SubIOp(last, index).result
            rows = [read_row(s, index if up else reverse) for s, up in zip(stacked, upwards, strict=True)]
            results = self._inline(body, [*values[:size], *rows, *outer], in_loop=True)
            written = zip(results[size:], values[size:], flips, strict=True)
            return [*results[:size], *(write_row(row, s, reverse if flip else index) for row, s, flip in written)]

        self._bind(node, self._counted(trips, [*initial, *stacks], step))
        self._reversed |= {flip for of_stack in flips for flip in of_stack}

    def _trips(self, sequence: Node, value: Value) -> Value:
        length = sequence.meta["val"].shape[0]
        if isinstance(length, int):
            return constant(length, self._c)
        return arith.IndexCastOp(IntegerType.get_signless(64, self._c), size_of(value, 0)).result

    def _empty(self, node: Node, like: torch.Tensor, sizes: SizeValues) -> Value:
        try:
            dynamic = [sizes.value(s) for s in like.shape if isinstance(s, torch.SymInt)]
        except KeyError:
            raise UnsupportedOpError(
                f"{line_of(node)}: {node.target} makes a tensor whose size is no sum, product or quotient of the sizes "
                "of its operands. Leave its dimensions out of dynamic=, so that their sizes are fixed"
            ) from None
        return empty(self._cc.get_vtensor_type(like.shape, like.dtype), dynamic)

    def _counted(self, trips: Value, initial: Sequence[Value], step: Body) -> list[Value]:
        """Import a loop of `trips` iterations of `step`, which also takes the iteration's index; return its results."""
        true = Operation.create(
            "torch.constant.bool",
            results=[self._cc.torch_bool_type],
            attributes={"value": IntegerAttr.get(IntegerType.get_signless(1, self._c), 1)},
        ).result
        types = [v.type for v in initial]
        operands = [convert("torch_c.from_i64", trips, self._cc.torch_int_type), true, *initial]
        loop = Operation.create("torch.prim.Loop", results=types, operands=operands, regions=1)
        with _block(loop.regions[0], [self._cc.torch_int_type, *types]) as block:
            index = convert("torch_c.to_i64", block.arguments[0], trips.type)
            results = step(index, list(block.arguments)[1:])
            Operation.create("torch.prim.Loop.condition", operands=[true, *results])
        return list(loop.results)

    def _inline(self, region: Node, inputs: Sequence[Value], *, in_loop: bool = False) -> list[Value]:
        """Import the graph that the node `region` names at the insertion point, on `inputs`; return its results."""
        graph = graph_of(region)
        inner = type(self)(self.fx_importer, self._c, self._cc, InsertionPoint.current.block)
        inner._in_loop = in_loop or self._in_loop
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        for placeholder, value in zip(placeholders, inputs, strict=True):
            inner.bind_node_value(placeholder, value)
        inner.import_nodes(graph.nodes, skip_placeholders_outputs=True)
        results = graph.output_node().args[0]
        return [inner._argument(r) for r in (results if isinstance(results, (list, tuple)) else [results])]

    def _argument(self, argument: Any) -> Value:
        return self._import_argument(Location.current, argument)

    def _bind(self, node: Node, results: Sequence[Value]) -> None:
        self._multi_result_nodes.add(node)
        for index, value in enumerate(results):
            self.bind_node_value(node, value, index)

    def _types(self, node: Node) -> list[Type]:
        return [self._cc.value_info_to_type(v) for v in node.meta["val"]]

    def _boolean(self, value: Value) -> Value:
        if value.type == self._cc.torch_bool_type:
            return value
        return convert("torch.aten.Bool.Tensor", value, self._cc.torch_bool_type)

    def _integer(self, value: int) -> Value:
        attributes = {"value": self._cc.integer_attr(value, 64)}
        return Operation.create("torch.constant.int", [self._cc.torch_int_type], [], attributes).result


def _is_reversed(sequence: Node) -> bool:
    """Whether a sequence is another one in reverse, so that a loop reads that one from its last row on."""
    return sequence.target is torch.ops.aten.flip.default and sequence.args[1] == [0]


def _reversals(loop: Node, place: int) -> list[Node]:
    """The readers of a loop's result, if each of them reverses it; else none. What reads its sizes alone is none."""
    items = [n for n in loop.users if n.target is operator.getitem and n.args[1] == place]
    readers = [r for item in items for r in item.users if r.target is not torch.ops.aten.sym_size.int]
    return readers if all(map(_is_reversed, readers)) else []


def _constant_results(region: Node, operands: Sequence[Any]) -> list[bool]:
    """For each result of the graph that `region` names: whether it depends only on constants, given `operands`."""
    graph, known = graph_of(region), _constants(region.graph, [])
    pairs = zip(graph.find_nodes(op="placeholder"), operands, strict=True)
    constants = _constants(graph, [placeholder for placeholder, operand in pairs if operand in known])
    results = graph.output_node().args[0]
    return [r in constants for r in (results if isinstance(results, list | tuple) else [results])]


def _constants(graph: Graph, known: Sequence[Node]) -> set[Node]:
    """The nodes of `graph` that depend only on constants; `known` are placeholders that are constant."""
    constants = set(known)
    for node in graph.nodes:
        if node.op == "get_attr" or (node.op == "call_function" and constants.issuperset(node.all_input_nodes)):
            constants.add(node)
    return constants


@contextmanager
def _block(region: Any, types: Sequence[Type]) -> Iterator[Block]:
    block = Block.create_at_start(region, types)
    with InsertionPoint(block):
        yield block
