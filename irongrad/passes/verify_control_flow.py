"""What must hold between a call of control flow and its bodies.

A body takes what it is given: as many values, of the same shapes and dtypes. What it gives back is what its next
iteration takes, or what the operator gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from irongrad.graph.nodes import kind_of

control = torch.ops.higher_order

# The kinds of several values, as `kind_of` has them.
Kinds = list[Any]


def problem_of(graph: GraphModule, node: Node) -> str:
    """What is wrong with the bodies of `node`, an operator of control flow; empty where nothing is."""
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
    given, made = _kinds(operands), _made(node)
    return (
        _not_a_condition("the predicate", _kinds([predicate]))
        or _takes_and_gives(graph, true, given, made)
        or _takes_and_gives(graph, false, given, made)
    )


def _while_loop(graph: GraphModule, node: Node) -> str:
    condition, body, carried, additional = node.args
    values = _kinds(carried)
    given = [*values, *_kinds(additional)]
    return (
        _differ(f"the arguments of {condition}", _taken(graph, condition), given)
        or _not_a_condition(f"the result of {condition}", _given(graph, condition))
        or _takes_and_gives(graph, body, given, values)
        or _differ("the results of the loop", _made(node), values)
    )


def _scan(graph: GraphModule, node: Node) -> str:
    body, carried, sequences, additional = node.args
    return _over_rows(graph, node, body, _kinds(carried), _kinds(sequences), _kinds(additional))


def _map(graph: GraphModule, node: Node) -> str:
    body, sequences, additional = node.args
    return _over_rows(graph, node, body, [], _kinds(sequences), _kinds(additional))


def _over_rows(graph: GraphModule, node: Node, body: Any, carried: Kinds, sequences: Kinds, additional: Kinds) -> str:
    """A loop over the first dimension of all `sequences`, whose results beside the carries are stacked."""
    lengths = {shape[0] for shape, _ in sequences}
    if len(lengths) != 1:
        return f"the sequences have the lengths {lengths}"
    (length,) = lengths
    results = _given(graph, body)
    rows = [(shape[1:], dtype) for shape, dtype in sequences]
    stacks = [((length, *shape), dtype) for shape, dtype in results[len(carried) :]]
    return (
        _differ(f"the arguments of {body}", _taken(graph, body), [*carried, *rows, *additional])
        or _differ(f"what {body} carries on", results[: len(carried)], carried)
        or _differ("the results of the loop", _made(node), [*carried, *stacks])
    )


def _takes_and_gives(graph: GraphModule, body: Any, given: Kinds, made: Kinds) -> str:
    taken = _differ(f"the arguments of {body}", _taken(graph, body), given)
    return taken or _differ(f"the results of {body}", _given(graph, body), made)


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


def _made(node: Node) -> Kinds:
    return _kinds(tree_leaves(node.meta.get("val")))


def _body(graph: GraphModule, name: Any) -> GraphModule:
    body = getattr(graph, str(name.target))
    if not isinstance(body, GraphModule):
        raise TypeError(f"{name} is no graph")
    return body


def _taken(graph: GraphModule, name: Any) -> Kinds:
    return _kinds([n for n in _body(graph, name).graph.nodes if n.op == "placeholder"])


def _given(graph: GraphModule, name: Any) -> Kinds:
    return _kinds(tree_leaves(_body(graph, name).graph.output_node().args[0]))
