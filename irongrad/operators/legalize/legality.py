"""Refuse operators and values that cannot be compiled, by name and line, before torch-mlir and IREE run."""

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
from irongrad.operators.legalize.core_operators import CONTROL_FLOW, CORE, SIZE_ARITHMETIC
from irongrad.targets import Target

_FIXED = "Leave its dimensions out of dynamic=, so that their sizes are fixed"


def check_operators(graph: StepGraph) -> None:
    """Refuse every operator and value of `graph` that cannot be compiled.

    Raises:
        UnsupportedOpError: there are any. The message names up to `irongrad.diagnostics.refusals.MOST` of them.
    """
    refuse(refusals(graph))


def check_float64(graph: StepGraph, targets: Sequence[Target]) -> None:
    """Refuse float64 tensors if a target's devices do not compute in float64.

    Rank-0 tensors are allowed: the host computes them.

    Raises:
        UnsupportedOpError: there are any. The message names up to `MOST` inputs, state tensors and operators. It
            names an operator only if none of its operands is float64.
    """
    refuse(float64_refusals(graph, targets))


def float64_refusals(graph: StepGraph, targets: Sequence[Target]) -> list[Refusal]:
    """Return everything that `check_float64` refuses."""
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
    """Refuse values that later stages cannot trace: shapes and numbers that depend on values, and sparse tensors.

    Raises:
        UnsupportedOpError: an operator of `graph` gives such a value. The message names up to `MOST` operators.
    """
    if found := [r for node in nodes_of(graph) if (r := _untraceable(node))]:
        raise unsupported(list(dict.fromkeys(found)))


def _untraceable(node: Node) -> Refusal | None:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return None
    # aten.index has the tag for integer indices too, but its result then has no unbacked symbols.
    depends = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(target.tags)
    symbols = depends and free_unbacked_symbols(node.meta.get("val"))
    values = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    if not symbols and all(v.layout is torch.strided for v in values if isinstance(v, torch.Tensor)):
        return None
    instead = advice.known(str(target)) or (advice.KEEP_SHAPE if symbols else advice.advice(str(target)))
    return Refusal(str(target), source_lines.line_of(node), advice.reason(target), instead)


def refusals(graph: StepGraph) -> list[Refusal]:
    """Return everything in the functions of `graph` that cannot be compiled; each operator once per source line."""
    found = [r for name, function in graph.functions.items() for r in function_refusals(name, function)]
    return list(dict.fromkeys(found))


def function_refusals(name: str, function: Function) -> Iterator[Refusal]:
    """Yield everything that cannot be compiled in one function of a step graph.

    Args:
        name: the function's name in the step graph.
        function: the function.
    """
    for argument, node in _placeholders(function):
        of_parameter = argument.kind in ("gradient", "accumulator")  # the parameter itself is refused
        if not of_parameter and (problem := _value_problem(node)):
            yield Refusal(f"{argument.kind} {argument.name!r}", _where(name), *problem)
    for node in nodes_of(function.graph):
        if refusal := _refusal(node, _otherwise(name)):
            yield refusal


def _placeholders(function: Function) -> Iterator[tuple[Value, Node]]:
    """The arguments of a function, each with its placeholder."""
    nodes = (n for n in function.graph.graph.nodes if n.op == "placeholder")
    return zip(function.arguments, nodes, strict=True)


def _where(name: str) -> str:
    """The text that messages show in place of a source line for arguments of the function `name`."""
    return "(the function's arguments)" if name == "call" else "(the step's inputs and state)"


def _otherwise(name: str) -> str:
    """The text that messages show for an operator of the function `name` that has no source line."""
    of_update = name.partition(".")[0] in ("update", "mean", "accumulate")
    return "(the optimizer's update)" if of_update else "(line unknown)"


def nodes_of(graph: GraphModule) -> Iterator[Node]:
    """Yield the calls in `graph` and in the bodies of its control flow."""
    for node in graph.graph.nodes:
        if node.op == "call_function":
            yield node
        elif node.op == "get_attr" and isinstance(body := getattr(graph, str(node.target), None), GraphModule):
            yield from nodes_of(body)


def _refusal(node: Node, otherwise: str) -> Refusal | None:
    line = partial(source_lines.line_of, node, otherwise)  # deferred: few nodes are refused
    target = node.target
    if _is_size(node) and target not in SIZE_ARITHMETIC:
        name = getattr(target, "__name__", str(target))
        return Refusal(name, line(), "does arithmetic on sizes that cannot be compiled for dynamic dimensions", _FIXED)
    if target is operator.getitem or _is_size(node) or any(_value_problem(n) for n in node.all_input_nodes):
        return None  # an input with a problem is refused at its own node
    if isinstance(target, torch._ops.HigherOrderOperator):
        if target.name() in CONTROL_FLOW:
            return None
        return Refusal(str(target), line(), advice.NO_LOWERING, "Use torch.cond, while_loop, scan or map")
    if isinstance(target, torch._ops.OpOverload) and str(target) not in CORE:
        return Refusal(_named(node), line(), advice.reason(target), advice.advice(str(target)))
    problem = _value_problem(node)
    return Refusal(_named(node), line(), *problem) if problem else None


def _is_size(node: Node) -> bool:
    """Whether `node` is a size or a number computed from sizes."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def _named(node: Node) -> str:
    """The operator's name; if the user called another operator that was expanded to it, that name too."""
    history = history_of(node)
    known = not history or history[-1].target == str(node.target)
    return str(node.target) if known else f"{node.target}, a part of {called(history[-1].target)},"


def called(operator: str) -> str:
    """Return the name of `operator` in the user's code: for a `torch.autograd.Function`, `<class>.apply`."""
    library, _, name = operator.partition(".")
    return f"{name.rpartition('_')[0]}.apply" if library == LIBRARY else operator


def history_of(node: Node) -> list[NodeSource]:
    """Return the nodes of earlier graphs that `node` comes from, latest first; empty if the compiler added it."""
    found: list[NodeSource] = []
    source = node.meta.get("from_node")
    while source:
        found.append(source[0])
        source = source[0].from_node
    return found


def _value_problem(node: Node) -> tuple[str, str] | None:
    """Why a value of `node` cannot be compiled, and the advice; None if all values can be."""
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
