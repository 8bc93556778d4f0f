"""Import of PyTorch's control flow operators (cond, while_loop, scan, map) as regions of structured control flow.

torch-mlir 20261001 imports `while_loop` alone, without its additional inputs, as calls of functions. Here the graph of
a branch or of a loop's body is imported in place, into a region of `torch.prim.If` or `torch.prim.Loop`, which
torch-mlir lowers to `scf.if`, `scf.while` and, where the number of iterations is a constant, to `scf.for`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.fx import Graph, Node
from torch_mlir.dialects import arith, tensor
from torch_mlir.extras.fx_importer import GraphNodeImporter
from torch_mlir.ir import (
    Block,
    IndexType,
    InsertionPoint,
    IntegerAttr,
    IntegerType,
    Location,
    Operation,
    RankedTensorType,
    Type,
    Value,
)

# A dynamic offset, as `tensor.extract_slice` and `tensor.insert_slice` encode it.
_DYNAMIC = -(2**63)

_VTENSOR = re.compile(r"!torch\.vtensor<\[([\d,]*)\],(\w+)>")

Body = Callable[[Value, Sequence[Value]], Sequence[Value]]


class ControlFlowImporter(GraphNodeImporter):
    """Imports the nodes of a graph, with the regions of its control flow."""

    def _import_hop(self, loc: Location, node: Node, hop: HigherOrderOperator) -> None:
        with loc:
            super()._import_hop(loc, node, hop)

    def _import_hop_cond(self, loc: Location, node: Node, hop: HigherOrderOperator) -> None:
        predicate, *branches, operands = node.args
        inputs = [self._argument(o) for o in operands]
        condition = self._boolean(self._argument(predicate))
        results = self._types(node)
        choice = Operation.create("torch.prim.If", results=results, operands=[condition], regions=2)
        for region, branch in zip(choice.regions, branches, strict=True):
            with _block(region, []):
                outputs = self._inline(branch, inputs)
                Operation.create("torch.prim.If.yield", operands=outputs)
        self._bind(node, choice.results)

    def _import_hop_while_loop(self, loc: Location, node: Node, hop: HigherOrderOperator) -> None:
        condition, body, carried, additional = node.args
        outer = [self._argument(a) for a in additional]
        initial = [self._argument(c) for c in carried]

        def goes_on(values: Sequence[Value]) -> Value:
            (result,) = self._inline(condition, [*values, *outer])
            return self._boolean(result)

        operands = [self._integer(torch.iinfo(torch.int64).max), goes_on(initial), *initial]
        types = self._types(node)
        loop = Operation.create("torch.prim.Loop", results=types, operands=operands, regions=1)
        with _block(loop.regions[0], [self._cc.torch_int_type, *types]) as block:
            after = self._inline(body, [*block.arguments[1:], *outer])
            Operation.create("torch.prim.Loop.condition", operands=[goes_on(after), *after])
        self._bind(node, loop.results)

    def _import_hop_scan(self, loc: Location, node: Node, hop: HigherOrderOperator) -> None:
        self._for_each(node, *node.args)

    def _import_hop_map_impl(self, loc: Location, node: Node, hop: HigherOrderOperator) -> None:
        body, sequences, additional = node.args
        self._for_each(node, body, (), sequences, additional)

    def _for_each(
        self, node: Node, body: Node, carried: Sequence[Any], sequences: Sequence[Any], additional: Any
    ) -> None:
        """A loop over the first dimension of `sequences`; what `body` returns beside its carries is stacked."""
        outer = [self._argument(a) for a in additional]
        stacked = [self._argument(s) for s in sequences]
        initial = [self._argument(c) for c in carried]
        types = self._types(node)
        count = len(initial)
        initial += [_Stack.of(t).empty(t) for t in types[count:]]
        length = _Stack.of(stacked[0].type).builtin.shape[0]

        def step(index: Value, values: Sequence[Value]) -> Sequence[Value]:
            rows = [_Stack.of(s.type).read(s, index) for s in stacked]
            results = self._inline(body, [*values[:count], *rows, *outer])
            written = zip(results[count:], values[count:], strict=True)
            return [*results[:count], *(_Stack.of(v.type).written(r, v, index) for r, v in written)]

        self._bind(node, self._counted(length, initial, step))

    def _counted(self, length: int, initial: Sequence[Value], step: Body) -> Sequence[Value]:
        """The values after `length` applications of `step`, which takes the iteration's index too."""
        true = Operation.create(
            "torch.constant.bool",
            results=[self._cc.torch_bool_type],
            attributes={"value": IntegerAttr.get(IntegerType.get_signless(1, self._c), 1)},
        ).result
        types = [v.type for v in initial]
        operands = [self._integer(length), true, *initial]
        loop = Operation.create("torch.prim.Loop", results=types, operands=operands, regions=1)
        with _block(loop.regions[0], [self._cc.torch_int_type, *types]) as block:
            count = _convert("torch_c.to_i64", block.arguments[0], IntegerType.get_signless(64, self._c))
            index = arith.IndexCastOp(IndexType.get(self._c), count).result
            results = step(index, list(block.arguments)[1:])
            Operation.create("torch.prim.Loop.condition", operands=[true, *results])
        return list(loop.results)

    def _inline(self, region: Node, inputs: Sequence[Value]) -> list[Value]:
        """Import the graph that the node `region` names here, on `inputs`, and return its results."""
        graph: Graph = getattr(region.graph.owning_module, str(region.target)).graph
        inner = type(self)(self.fx_importer, self._c, self._cc, InsertionPoint.current.block)
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
        return _convert("torch.aten.Bool.Tensor", value, self._cc.torch_bool_type)

    def _integer(self, value: int) -> Value:
        attributes = {"value": self._cc.integer_attr(value, 64)}
        return Operation.create("torch.constant.int", [self._cc.torch_int_type], [], attributes).result


@dataclass(frozen=True)
class _Stack:
    """A tensor whose rows a loop reads or writes.

    In MLIR's own tensor dialect: the result of torch-mlir's slice at an unknown index has unknown sizes.
    """

    row: Type  # of one row, as torch-mlir's type
    builtin: RankedTensorType
    builtin_row: RankedTensorType

    @staticmethod
    def of(kind: Type) -> _Stack:
        """Rows of values of the static type `!torch.vtensor<[sizes],element>`."""
        matched = _VTENSOR.fullmatch(str(kind))
        assert matched, f"{kind} is no tensor of known sizes"
        sizes, element = matched[1].split(","), matched[2]
        row = Type.parse(f"!torch.vtensor<[{','.join(sizes[1:])}],{element}>", kind.context)
        # MLIR's own integers have no signs.
        builtin = [*sizes, element.removeprefix("u").removeprefix("s")]
        whole, part = (f"tensor<{'x'.join(b)}>" for b in (builtin, builtin[1:]))
        return _Stack(row, Type.parse(whole, kind.context), Type.parse(part, kind.context))

    def empty(self, kind: Type) -> Value:
        value = tensor.EmptyOp(self.builtin.shape, self.builtin.element_type).result
        return _convert("torch_c.from_builtin_tensor", value, kind)

    def read(self, stacked: Value, index: Value) -> Value:
        """`stacked[index]`."""
        whole = _convert("torch_c.to_builtin_tensor", stacked, self.builtin)
        part = tensor.ExtractSliceOp(self.builtin_row, whole, [index], [], [], *self._place()).result
        return _convert("torch_c.from_builtin_tensor", part, self.row)

    def written(self, part: Value, stacked: Value, index: Value) -> Value:
        """`stacked` with `part` at `index`."""
        whole = _convert("torch_c.to_builtin_tensor", stacked, self.builtin)
        row = _convert("torch_c.to_builtin_tensor", part, self.builtin_row)
        result = tensor.InsertSliceOp(row, whole, [index], [], [], *self._place()).result
        return _convert("torch_c.from_builtin_tensor", result, stacked.type)

    def _place(self) -> tuple[list[int], list[int], list[int]]:
        """Offsets, sizes and strides of one row at a dynamic index."""
        inner = self.builtin_row.shape
        return [_DYNAMIC, *(0 for _ in inner)], [1, *inner], [1] * self.builtin.rank


def _convert(operation: str, value: Value, kind: Type) -> Value:
    return Operation.create(operation, results=[kind], operands=[value]).result


@contextmanager
def _block(region: Any, types: Sequence[Type]) -> Iterator[Block]:
    block = Block.create_at_start(region, types)
    with InsertionPoint(block):
        yield block
