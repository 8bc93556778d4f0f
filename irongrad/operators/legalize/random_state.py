"""Functions that draw random numbers: they are traced with the seed and the draw count as state."""

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
    """Retrace `run` with its random operators replaced by draws from the state.

    A function that draws takes the seed and the draw count as further arguments. It returns the draw count plus one
    as a further result.

    Args:
        run: takes tensors like `examples`, returns a flat sequence of tensors and mutates nothing.
        examples: real or fake tensors, one for each argument.
        arguments: the values of the step graph that `run` takes.
        results: the values of the step graph that `run` returns.
        dims: as in `retrace`.
        derived: as in `retrace`.

    Returns:
        The traced function.
    """
    used = False

    def drawing(*values: torch.Tensor) -> list[torch.Tensor]:
        nonlocal used
        *tensors, seed, draws = values
        with Draws(seed, draws) as mode:
            outputs = list(run(*tensors))
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


def random_state(functions: Iterable[Function], seed: int) -> tuple[StateTensor, ...]:
    """Return the seed and the draw count as state tensors, rank-0 int64; nothing if no function draws.

    Args:
        functions: the functions of a step.
        seed: the initial seed.
    """
    if not any(_STATE[0] in f.arguments for f in functions):
        return ()
    values = {SEED: seed, DRAWS: 0}
    return tuple(StateTensor(n, Role.RANDOM, torch.tensor(v, dtype=torch.int64)) for n, v in values.items())
