"""Refusing what cannot be compiled, by name and line, before torch-mlir and IREE are started."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.traceback import NodeSource

from irongrad.diagnostics import advice, source_lines
from irongrad.diagnostics.refusals import Refusal, refuse, unsupported
from irongrad.graph.dtypes import is_supported
from irongrad.graph.step_graph import Function, StepGraph, Value
from irongrad.operators.decompositions.registry import LIBRARY
from irongrad.operators.legalize.core_operators import CONTROL_FLOW, CORE
from irongrad.targets import Target

# What torch-mlir 20261001 imports of the arithmetic of sizes.
_ARITHMETIC = frozenset(
    {
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.neg, operator.mod),
        *(torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default),
    }
)
_FIXED = "Leave its dimensions out of dynamic=, so that their sizes are fixed"


def check_operators(graph: StepGraph) -> None:
    """Refuse all that cannot be compiled in any function of `graph`.

    Raises:
        UnsupportedOpError: naming every such operator, up to `MOST`.
    """
    refuse(refusals(graph))


def check_float64(graph: StepGraph, targets: Sequence[Target]) -> None:
    """Refuse tensors of float64 where a target's devices do not compute in it; scalars are computed on the host.

    Raises:
        UnsupportedOpError: naming every input, state tensor and operator that first gives one, up to `MOST`.
    """
    refuse(float64_refusals(graph, targets))


def float64_refusals(graph: StepGraph, targets: Sequence[Target]) -> list[Refusal]:
    """What `check_float64` refuses."""
    lacking = ", ".join(t.name for t in targets if not t.float64)
    found = [r for n, f in graph.functions.items() for r in _float64(n, f, lacking)] if lacking else []
    return list(dict.fromkeys(found))


def _float64(name: str, function: Function, lacking: str) -> Iterator[Refusal]:
    reason = f"gives a float64 tensor, and the devices of {lacking} do not compute in float64"
    advice = "Use float32 there, or compile for a target with float64: llvm-cpu or cuda"
    for argument, node in _placeholders(function):
        if _has_float64(node):
            yield Refusal(f"{argument.kind} {argument.name!r}", _where(name), reason, advice)
    for node in nodes_of(function.graph):
        if _has_float64(node) and not any(map(_has_float64, node.all_input_nodes)):
            yield Refusal(_named(node), source_lines.line_of(node, _otherwise(name)), reason, advice)


def _has_float64(node: Node) -> bool:
    values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(v, torch.Tensor) and v.dtype is torch.float64 and v.ndim > 0 for v in values)


def check_values(graph: GraphModule) -> None:
    """Refuse what later stages could not even trace: shapes and numbers that depend on values, and sparse tensors.

    Raises:
        UnsupportedOpError: naming every operator in `graph` that makes one, up to `MOST`.
    """
    if found := [r for node in nodes_of(graph) if (r := _untraceable(node))]:
        raise unsupported(list(dict.fromkeys(found)))


def _untraceable(node: Node) -> Refusal | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    # An index has the tag also where it is no mask, and then a shape without symbols.
    depends = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(target.tags)
    symbols = depends and free_unbacked_symbols(node.meta.get("val"))
    values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    if not symbols and all(v.layout is torch.strided for v in values if isinstance(v, torch.Tensor)):
        return None
    instead = advice.known(str(target)) or (advice.KEEP_SHAPE if symbols else advice.advice(str(target)))
    return Refusal(str(target), source_lines.line_of(node), advice.reason(target), instead)


def refusals(graph: StepGraph) -> list[Refusal]:
    """Everything in the functions of `graph` that cannot be compiled, each operator once a line."""
    found = [r for name, function in graph.functions.items() for r in function_refusals(name, function)]
    return list(dict.fromkeys(found))


def function_refusals(name: str, function: Function) -> Iterator[Refusal]:
    """Everything in one function of a step graph that cannot be compiled."""
    for argument, node in _placeholders(function):
        made = argument.kind in ("gradient", "accumulator")  # of a parameter, which is refused itself
        if not made and (problem := _value_problem(node)):
            yield Refusal(f"{argument.kind} {argument.name!r}", _where(name), *problem)
    for node in nodes_of(function.graph):
        if refusal := _refusal(node, _otherwise(name)):
            yield refusal


def _placeholders(function: Function) -> Iterator[tuple[Value, Node]]:
    """The arguments of a function, each with its node."""
    nodes = (n for n in function.graph.graph.nodes if n.op == "placeholder")
    return zip(function.arguments, nodes, strict=True)


def _where(name: str) -> str:
    """Where the arguments of the function `name` come from."""
    return "(the function's arguments)" if name == "call" else "(the step's inputs and state)"


def _otherwise(name: str) -> str:
    """What stands for the line of an operator of the function `name` that has none."""
    return "(the optimizer's update)" if name in ("update", "mean", "accumulate") else "(line unknown)"


def nodes_of(graph: GraphModule) -> Iterator[Node]:
    """The calls in `graph`, and in the bodies of its control flow."""
    for node in graph.graph.nodes:
        if node.op == "call_function":
            yield node
        elif node.op == "get_attr" and isinstance(body := getattr(graph, str(node.target), None), GraphModule):
            yield from nodes_of(body)


def _refusal(node: Node, otherwise: str) -> Refusal | None:
    line = partial(source_lines.line_of, node, otherwise)  # which few need
    target = node.target
    if _is_size(node) and target not in _ARITHMETIC:
        name = getattr(target, "__name__", str(target))
        return Refusal(name, line(), "computes a size, or a number, that has no compiled form for every size", _FIXED)
    if target is operator.getitem or _is_size(node) or any(_value_problem(n) for n in node.all_input_nodes):
        return None  # where its inputs have a problem already, they are refused
    if isinstance(target, torch._ops.HigherOrderOperator):
        if target.name() in CONTROL_FLOW:
            return None
        return Refusal(str(target), line(), advice.NO_LOWERING, "Use torch.cond, while_loop, scan or map")
    if isinstance(target, torch._ops.OpOverload) and str(target) not in CORE:
        return Refusal(_named(node), line(), advice.reason(target), advice.advice(str(target)))
    problem = _value_problem(node)
    return Refusal(_named(node), line(), *problem) if problem else None


def _is_size(node: Node) -> bool:
    """Whether `node` is a size, or a number that is computed from sizes."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _named(node: Node) -> str:
    """The operator, and what the user called where that is another."""
    history = history_of(node)
    known = not history or history[-1].target == str(node.target)
    return str(node.target) if known else f"{node.target}, a part of {called(history[-1].target)},"


def called(operator: str) -> str:
    """What the user calls `operator`: a `torch.autograd.Function` by its class."""
    library, _, name = operator.partition(".")
    return f"{name.rpartition('_')[0]}.apply" if library == LIBRARY else operator


def history_of(node: Node) -> list[NodeSource]:
    """What `node` was in the graphs before, the latest first; nothing where the compiler itself added it."""
    found: list[NodeSource] = []
    source = node.meta.get("from_node")
    while source:
        found.append(source[0])
        source = source[0].from_node
    return found


def _value_problem(node: Node) -> tuple[str, str] | None:
    """Why a value of `node` cannot be compiled, and what to do."""
    for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
        if not isinstance(value, torch.Tensor):
            continue
        if value.layout is not torch.strided:
            return f"gives a {value.layout} tensor, and only dense ones can be compiled", f"Use {advice.DENSE}"
        if value.is_complex():
            return f"gives {value.dtype} values, which no target computes", f"Use {advice.COMPLEX}"
        if not is_supported(value.dtype):
            return f"gives {value.dtype} values, which no target computes", "Use x.to(torch.float32) outside"
    return None
