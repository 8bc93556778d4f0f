"""Check that the operands and results of a control flow operator match its bodies.

The arguments of a body are the operands that the operator passes to it: as many, of the same shapes and dtypes. Its
results are the arguments of its next iteration, or the results of the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from irongrad.graph.nodes import kind_of

control = torch.ops.higher_order

# The kinds of several values, as `kind_of` returns them.
Kinds = list[Any]


def problem_of(graph: GraphModule, node: Node) -> str:
    """Return what is wrong with the bodies of `node`, an operator of control flow; empty if nothing is."""
    match node.target:
        case control.cond:
            check = _cond
        case control.while_loop:
            check = _while_loop
        case control.scan:
            check = _scan
        case control.map_impl:
            check = _map
        case _:
            return f"{node.target} is no control flow that passes know"
    try:
        return check(graph, node)
    except (TypeError, ValueError, AttributeError) as error:
        return f"its arguments are not those of {node.target}: {error}"


def _cond(graph: GraphModule, node: Node) -> str:
    predicate, true, false, operands = node.args
    operands_of_body, wanted = _kinds(operands), _result_kinds(node)
    return (
        _not_a_condition("the predicate", _kinds([predicate]))
        or _takes_and_gives(graph, true, operands_of_body, wanted)
        or _takes_and_gives(graph, false, operands_of_body, wanted)
    )


def _while_loop(graph: GraphModule, node: Node) -> str:
    condition, body, carried, additional = node.args
    values = _kinds(carried)
    operands_of_body = [*values, *_kinds(additional)]
    return (
        _differ(f"the arguments of {condition}", _argument_kinds(graph, condition), operands_of_body)
        or _not_a_condition(f"the result of {condition}", _body_result_kinds(graph, condition))
        or _takes_and_gives(graph, body, operands_of_body, values)
        or _differ("the results of the loop", _result_kinds(node), values)
    )


def _scan(graph: GraphModule, node: Node) -> str:
    body, carried, sequences, additional = node.args
    return _over_rows(graph, node, body, _kinds(carried), _kinds(sequences), _kinds(additional))


def _map(graph: GraphModule, node: Node) -> str:
    body, sequences, additional = node.args
    return _over_rows(graph, node, body, [], _kinds(sequences), _kinds(additional))


def _over_rows(graph: GraphModule, node: Node, body: Any, carried: Kinds, sequences: Kinds, additional: Kinds) -> str:
    """A loop over the first dimension of all `sequences`; its results after the carries are stacked."""
    lengths = {shape[0] for shape, _ in sequences}
    if len(lengths) != 1:
        return f"the sequences have the lengths {lengths}"
    (length,) = lengths
    results = _body_result_kinds(graph, body)
    rows = [(shape[1:], dtype) for shape, dtype in sequences]
    stacks = [((length, *shape), dtype) for shape, dtype in results[len(carried) :]]
    return (
        _differ(f"the arguments of {body}", _argument_kinds(graph, body), [*carried, *rows, *additional])
        or _differ(f"what {body} carries on", results[: len(carried)], carried)
        or _differ("the results of the loop", _result_kinds(node), [*carried, *stacks])
    )


def _takes_and_gives(graph: GraphModule, body: Any, operands_of_body: Kinds, wanted: Kinds) -> str:
    taken = _differ(f"the arguments of {body}", _argument_kinds(graph, body), operands_of_body)
    return taken or _differ(f"the results of {body}", _body_result_kinds(graph, body), wanted)


def _not_a_condition(what: str, kinds: Kinds) -> str:
    if len(kinds) == 1 and (kinds[0] is None or kinds[0][1] is torch.bool):
        return ""
    return f"{what} is no condition, but {_spelled(kinds)}"


def _differ(what: str, found: Kinds, wanted: Kinds) -> str:
    return "" if found == wanted else f"{what} are {_spelled(found)}, and have to be {_spelled(wanted)}"


def _spelled(kinds: Kinds) -> str:
    return f"{len(kinds)}: {', '.join(map(str, kinds))}" if kinds else "none"


def _kinds(values: Sequence[Any]) -> Kinds:
    return [kind_of(v.meta.get("val") if isinstance(v, Node) else v) for v in values]


def _result_kinds(node: Node) -> Kinds:
    return _kinds(tree_leaves(node.meta.get("val")))


def _body(graph: GraphModule, name: Any) -> GraphModule:
    body = getattr(graph, str(name.target))
    if not isinstance(body, GraphModule):
        raise TypeError(f"{name} is no graph")
    return body


def _argument_kinds(graph: GraphModule, name: Any) -> Kinds:
    return _kinds([n for n in _body(graph, name).graph.nodes if n.op == "placeholder"])


def _body_result_kinds(graph: GraphModule, name: Any) -> Kinds:
    return _kinds(tree_leaves(_body(graph, name).graph.output_node().args[0]))
