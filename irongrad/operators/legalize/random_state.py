"""Graphs that draw random numbers: the seed and the number of draws as state, and what they are drawn with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from irongrad.graph.step_graph import Function, StateTensor, Value
from irongrad.operators.legalize.retrace import retrace
from irongrad.operators.random import Draws
from irongrad.runtime.manifest import DRAWS, SEED, Role
from irongrad.sizes.symbols import Derived, Dims

_STATE = (Value("state", SEED), Value("state", DRAWS))


def trace(
    run: Callable[..., Sequence[torch.Tensor]],
    examples: Sequence[torch.Tensor],
    arguments: Sequence[Value],
    results: Sequence[Value],
    dims: Sequence[Dims] = (),
    derived: Derived | None = None,
) -> Function:
    """Retrace `run`, with its random operators as draws from the state.

    A function that draws has the seed and the number of draws as further arguments, and as a further result that
    number and one more. `dims` and `derived` are as `retrace` has them.
    """
    used = False

    def drawing(*values: torch.Tensor) -> list[torch.Tensor]:
        nonlocal used
        *given, seed, draws = values
        with Draws(seed, draws) as mode:
            outputs = list(run(*given))
        used = mode.used
        return [*outputs, draws + 1] if used else outputs

    scalar = torch.zeros((), dtype=torch.int64)
    graph = retrace(drawing, [*examples, scalar, scalar], dims=[*dims, {}, {}] if dims else [], derived=derived)
    if used:
        return Function(graph, (*arguments, *_STATE), (*results, _STATE[1]))
    for node in [n for n in graph.graph.nodes if n.op == "placeholder"][-len(_STATE) :]:
        graph.graph.erase_node(node)
    graph.recompile()
    return Function(graph, tuple(arguments), tuple(results))


def random_state(functions: Iterable[Function | None], seed: int) -> tuple[StateTensor, ...]:
    """The state from which `functions` draw; none where none of them does."""
    if not any(f is not None and _STATE[0] in f.arguments for f in functions):
        return ()
    values = {SEED: seed, DRAWS: 0}
    return tuple(StateTensor(n, Role.RANDOM, torch.tensor(v, dtype=torch.int64)) for n, v in values.items())
