"""Tensors that a function names without taking them: small ones stay in its code, large ones become state."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import GraphModule

from irongrad.graph.step_graph import StateTensor, StepGraph, Value
from irongrad.runtime.manifest import Role

SMALL = 64  # elements; code with larger literals compiles slowly, and stands in every target's file


def constants_as_state(graph: StepGraph, name: str) -> StepGraph:
    """Turn the large constants of the function `name`, which no function writes, into arguments read from the state.

    Unsigned bytes of any number too: torch-mlir 20261001 takes a literal of several for signed ones ("inferred type
    si8"), also one that it makes itself by folding a conversion.
    """
    function = graph.functions[name]
    module: GraphModule = function.graph
    state: list[StateTensor] = []
    last = next(n for n in module.graph.nodes if n.op != "placeholder")
    for node in [n for n in module.graph.nodes if n.op == "get_attr"]:
        value = getattr(module, str(node.target))
        if not isinstance(value, torch.Tensor) or value.numel() <= (1 if value.dtype is torch.uint8 else SMALL):
            continue
        tensor = StateTensor(f"constant/{len(state)}", Role.CONSTANT, value.detach().cpu())
        state.append(tensor)
        with module.graph.inserting_before(last):
            argument = module.graph.placeholder(f"constant_{len(state)}")
        argument.meta = {**node.meta, "val": node.meta.get("val", tensor.initial)}
        node.replace_all_uses_with(argument)
        module.graph.erase_node(node)
    module.recompile()
    arguments = (*function.arguments, *(Value("state", t.name) for t in state))
    functions = {**graph.functions, name: replace(function, arguments=arguments)}
    return replace(graph, state=(*graph.state, *state), functions=functions)
