"""Record the operators that a function of tensors calls as a graph.

`make_fx` records any function, through proxies and a fake tensor mode. That takes a millisecond for each operator. If
sizes are numbers and no values are read, it suffices to run each operator's meta kernel and to add a node to a graph.
That takes a fifth of the time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _make_graph_module
from torch.fx.experimental.proxy_tensor import decompose
from torch.fx.node import map_aggregate
from torch.fx.traceback import get_current_meta, has_preserved_node_meta
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from irongrad.graph import shape_only_tensors

Operator: TypeAlias = torch._ops.OperatorBase

Decomposition: TypeAlias = Callable[..., object]


# The metadata that a node inherits from the node that an interpreter runs, as in torch.fx.proxy's TracerBase.
_INHERITED = (
    "stack_trace",
    "from_node",
    "autograd_backward",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "source_fn_stack",
)


def record(
    function: Callable[..., Sequence[torch.Tensor]],
    kinds: Sequence[tuple[Sequence[int], torch.dtype]],
    table: Mapping[Operator, Decomposition],
    mode: FakeTensorMode,
) -> GraphModule:
    """Record the graph of `function` on tensors of `kinds`.

    Args:
        function: functional; a tensor with values is a constant in the graph. An operator without a meta kernel, or a
            higher-order one, raises some exception.
        kinds: the sizes and dtype of each argument.
        table: the decompositions of operators.
        mode: the mode of the fake values in the graph.
    """
    recorder = Recorder(table, mode)
    arguments = [
        recorder.holds(shape_only_tensors.empty(sizes, dtype), recorder.graph.placeholder(f"arg{number}"))
        for number, (sizes, dtype) in enumerate(kinds)
    ]
    with recorder, torch.no_grad():
        results = function(*arguments)
    nodes = [recorder.node_of(result) for result in results]
    recorder.graph.output(tuple(nodes) if isinstance(results, tuple) else nodes)
    return _make_graph_module(recorder.constants, recorder.graph)


class Recorder(TorchDispatchMode):
    """While open, adds a node to `graph` for each operator that is called.

    The tensors that functions see are fake tensors on the CPU, which behave as usual. Each of them has a *twin*: a
    tensor without storage that the meta kernels read.

    Attributes:
        graph: the calls so far.
        constants: tensors that are attributes of the graph's module, by name.
    """

    def __init__(self, table: Mapping[Operator, Decomposition], mode: FakeTensorMode) -> None:
        super().__init__()
        self.graph = Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self._table = table
        self._mode = mode
        self._nodes: dict[int, Node] = {}
        self._twins: dict[int, torch.Tensor] = {}
        self._fakes: dict[int, FakeTensor] = {}  # by the twin's id; the reference keeps the fake tensor's own id valid

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch.compile must skip `__torch_dispatch__`, checked at each call; nothing is compiled here."""
        return False

    def holds(self, twin: torch.Tensor, node: Node) -> FakeTensor:
        """Return the fake tensor whose twin is `twin`, and record that `node` computes it."""
        fake = self._fakes.get(id(twin))
        if fake is None:
            fake = shape_only_tensors.faked(twin, self._mode)
            self._fakes[id(twin)], self._twins[id(fake)] = fake, twin
        self._nodes[id(fake)] = node
        node.meta["val"] = fake
        return fake

    def node_of(self, value: torch.Tensor) -> Node:
        """Return the node that computes `value`."""
        self._register_constant(value)
        return self._nodes[id(value)]

    def found(self, value: torch.Tensor) -> Node | None:
        """Return the node that computes `value`; None for a constant."""
        return self._nodes.get(id(value)) if isinstance(value, FakeTensor) else None

    def another(self, like: torch.Tensor, node: Node) -> torch.Tensor:
        """Return a tensor of the shape and dtype of `like` that `node` computes."""
        with torch._C._DisableTorchDispatch():
            twin = shape_only_tensors.empty(like.shape, like.dtype)
        return self.holds(twin, node)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Decompose an operator if it has a decomposition, else record it.

        Inside a decomposition the dispatcher no longer expands composite operators, so this method calls `decompose`
        for them.
        """
        if func is torch.ops.prim.device.default:
            return shape_only_tensors.CPU
        kwargs = kwargs or {}
        for decomposition in (self._table.get(func), _expansion_of(func)):
            if decomposition is not None:
                with self:
                    result = decomposition(*args, **kwargs)
                if result is not NotImplemented:
                    return result
        twins, named = map_aggregate((args, kwargs), self._twin_or_value)
        result = shape_only_tensors.result_of(func, twins, named)
        if func is torch.ops.aten.lift_fresh.default or _is_final_detach(func, args, self._nodes):
            return self.holds(result, self.node_of(args[0]))
        return self._add(func, args, kwargs, result)

    def _add(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        node = self._call_node(func, *map_aggregate((args, kwargs), self._node_or_value))
        if isinstance(result, torch.Tensor):
            return self.holds(result, node)
        parts = [
            self.holds(part, self._call_node(operator.getitem, (node, number), {}))
            if isinstance(part, torch.Tensor)
            else part
            for number, part in enumerate(result)
        ]
        node.meta["val"] = type(result)(parts)
        return node.meta["val"]

    def _call_node(self, func: Any, args: Any, kwargs: Any) -> Node:
        packet = getattr(func, "overloadpacket", func)
        name = self.graph._target_to_str(packet.__name__)  # as make_fx names them: without the overload
        return _inheriting(self.graph.create_node("call_function", func, args, kwargs, name))

    def _register_constant(self, value: torch.Tensor) -> None:
        """Make a tensor with values a constant of the graph, unless it is one already."""
        if not isinstance(value, FakeTensor) and id(value) not in self._nodes:
            name = f"_tensor_constant{len(self.constants)}"
            self.constants[name] = value
            twin, node = shape_only_tensors.empty(value.shape, value.dtype), _inheriting(self.graph.get_attr(name))
            self._twins[id(value)], self._nodes[id(value)] = twin, node
            node.meta["val"] = shape_only_tensors.faked(twin, self._mode)

    def _twin_or_value(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        self._register_constant(value)
        return self._twins[id(value)]

    def _node_or_value(self, value: Any) -> Any:
        return self.node_of(value) if isinstance(value, torch.Tensor) else value

    @contextmanager
    def without_table(self) -> Iterator[None]:
        """While open, operators are not decomposed."""
        table, self._table = self._table, {}
        try:
            yield
        finally:
            self._table = table


@cache
def _expansion_of(func: Any) -> Callable[..., Any] | None:
    """The function that expands a composite operator; None for any other operator."""
    return func.decompose if func._can_decompose() else None


def _inheriting(node: Node) -> Node:
    """`node`, with the metadata of the node that an interpreter is running."""
    if has_preserved_node_meta():
        meta = get_current_meta()
        node.meta |= {name: meta[name] for name in _INHERITED if name in meta}
    return node


def _is_final_detach(func: Any, args: Any, nodes: Mapping[int, Node]) -> bool:
    """Whether the call is the `detach` with which functions end that create a tensor, such as `torch.arange`."""
    if func is not torch.ops.aten.detach.default or (node := nodes.get(id(args[0]))) is None:
        return False
    return node.op == "call_function" and not node.all_input_nodes


def current() -> Recorder | None:
    """Return the recorder that is open, if any."""
    return next((m for m in reversed(_get_current_dispatch_mode_stack()) if isinstance(m, Recorder)), None)


@contextmanager
def undecomposed() -> Iterator[None]:
    """While open, `make_fx` or a recorder keeps operators whole, so that a decomposition may call its operator."""
    recorder = current()
    with decompose({}) if recorder is None else recorder.without_table():
        yield
