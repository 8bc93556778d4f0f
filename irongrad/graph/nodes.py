"""Helpers with which passes rewrite graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from irongrad.graph import shape_only_tensors
from irongrad.sizes.symbols import has_symbols

# The metadata that a new node takes over from the node that it replaces, which has the same source line.
_KEPT = ("stack_trace", "from_node", "autograd_backward", "nn_module_stack", "source_fn_stack", "seq_nr")


def call(graph: Graph, operator: Callable[..., Any], *args: Any, like: Node, **kwargs: Any) -> Node:
    """Add a call of `operator` at the graph's insertion point, with its fake value and the source line of `like`."""
    node = graph.call_function(operator, args, kwargs)
    node.meta = meta_of(like)
    node.meta["val"] = computed_value(node)
    return node


def meta_of(node: Node) -> dict[str, Any]:
    """Return the part of `node.meta` that another node with the same source line keeps."""
    return {k: node.meta[k] for k in _KEPT if k in node.meta}


def computed_value(node: Node) -> Any:
    """Return the fake value that the operator of `node` computes from the values of its arguments.

    Arguments are taken as contiguous, because tensors in a graph have no strides. Results are cached by operator and
    shapes, because passes write the same form a hundred times.
    """
    mode = fake_mode_of(node)
    known = _COMPUTED.setdefault(mode, {})
    key = node.target, _key(node.args), _key(node.kwargs)
    if key not in known:
        with torch.no_grad():
            known[key] = _computed(node, mode)
    return known[key]


def _computed(node: Node, mode: FakeTensorMode) -> Any:
    operator = node.target
    assert callable(operator)
    if isinstance(operator, OpOverload) and all(map(_is_tensor_of_known_size, node.all_input_nodes)):
        with suppress(NotImplementedError):  # PyTorch has no meta kernel for every operator
            args, kwargs = _arguments(node, shape_only_tensors.empty)
            return shape_only_tensors.faked(shape_only_tensors.result_of(operator, args, kwargs), mode)
    # PyTorch 2.13 computes the shapes of some operators (constant_pad_nd) for symbolic sizes in Python only. In C++ it
    # would take the example's sizes for those of every call.
    with mode, enable_python_dispatcher():
        args, kwargs = _arguments(node, torch.empty)
        return operator(*args, **kwargs)


def _is_tensor_of_known_size(node: Node) -> bool:
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and not has_symbols(value)


def _arguments(node: Node, empty: Callable[..., torch.Tensor]) -> tuple[Any, Any]:
    """The arguments of `node`, with a tensor made by `empty` of the same shape and dtype for each node."""

    def value_of(argument: Node) -> Any:
        value = argument.meta["val"]
        return empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value

    arguments: tuple[Any, Any] = map_arg((node.args, node.kwargs), value_of)
    return arguments


_COMPUTED: WeakKeyDictionary[FakeTensorMode, dict[Hashable, Any]] = WeakKeyDictionary()


def _key(argument: Any) -> Hashable:
    """A key that is equal for arguments of equal types, shapes and dtypes, or for constants that print the same."""
    if isinstance(argument, Node):
        return _key(argument.meta["val"])
    if isinstance(argument, torch.Tensor):
        kind: Hashable = kind_of(argument)
        return kind
    if isinstance(argument, (list, tuple)):
        return tuple(map(_key, argument))
    if isinstance(argument, dict):
        return tuple((name, _key(value)) for name, value in argument.items())
    return type(argument), repr(argument)


def fake_mode_of(node: Node) -> FakeTensorMode:
    """Return the mode of the fake tensors in the graph of `node`."""
    for other in node.graph.nodes:
        if isinstance(value := other.meta.get("val"), FakeTensor):
            return value.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def replace(node: Node, new: Node) -> None:
    """Replace `node` by `new` in all its users, and drop `node`."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def bodies(graph: GraphModule) -> Iterator[tuple[str, GraphModule]]:
    """Yield the bodies of control flow that `graph` itself names, by attribute."""
    for node in graph.graph.nodes:
        body = getattr(graph, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(body, GraphModule):
            yield str(node.target), body


def sort_topologically(graph: Graph) -> None:
    """Move nodes after the nodes that they use; otherwise nodes keep their order."""
    placed: set[Node] = set()
    waiting: dict[Node, list[Node]] = {}
    ready = list(reversed(graph.nodes))
    last: Node | None = None
    while ready:
        node = ready.pop()
        missing = next((i for i in node.all_input_nodes if i not in placed), None)
        if missing is not None:
            waiting.setdefault(missing, []).append(node)
            continue
        if last is not None:
            last.append(node)
        placed.add(node)
        last = node
        ready += reversed(waiting.pop(node, ()))


def graph_of(region: Node) -> Graph:
    """Return the graph that the node `region` names: a branch, or the body of a loop."""
    graph: Graph = getattr(region.graph.owning_module, str(region.target)).graph
    return graph


def kind_of(value: Any) -> Any:
    """Return the sizes and dtype of a tensor, or of each of several tensors, in a form that can be compared.

    A symbolic size is returned as its expression: PyTorch would compare it by its value in the example.
    """
    if isinstance(value, torch.Tensor):
        return tuple([s if type(s) is int else s.node.expr for s in value.shape]), value.dtype
    if isinstance(value, (list, tuple)):
        return tuple(map(kind_of, value))
    return None


def is_zeros(node: Node) -> bool:
    """Whether `node` makes a tensor that is filled with zeros."""
    return node.target is torch.ops.aten.full.default and bool(node.args[1] == 0)


def value_of(node: torch.fx.Node) -> torch.Tensor:
    """Return the fake tensor that `node` computes."""
    value: torch.Tensor = node.meta["val"]
    return value
