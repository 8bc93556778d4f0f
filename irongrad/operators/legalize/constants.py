"""Constants captured by a function: small ones stay in its code, large ones become state."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import GraphModule

from irongrad.graph.step_graph import StateTensor, StepGraph, Value
from irongrad.runtime.manifest import Role

SMALL = 64  # elements; larger literals compile slowly, and every target's file repeats them


def constants_as_state(graph: StepGraph, name: str) -> StepGraph:
    """Turn the large constants of the function `name` into arguments read from the state.

    No function writes to this state. A uint8 constant of two or more elements becomes state at any size: torch-mlir
    20261001 imports such a literal as signed ("inferred type si8"). It does so even for a literal that it creates by
    folding a conversion.

    Args:
        graph: the step.
        name: the name of one of its functions.
    """
    function = graph.functions[name]
    module: GraphModule = function.graph
    state: list[StateTensor] = []
    last = next(n for n in module.graph.nodes if n.op != "placeholder")
    for node in [n for n in module.graph.nodes if n.op == "get_attr"]:
        value = getattr(module, str(node.target))
        if not isinstance(value, torch.Tensor) or value.numel() <= (1 if value.dtype is torch.uint8 else SMALL):
            continue
        tensor = StateTensor(f"constant/{len(graph.state) + len(state)}", Role.CONSTANT, value.detach().cpu())
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
