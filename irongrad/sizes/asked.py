"""The conditions on sizes that a trace asks.

PyTorch answers a question about a symbolic size from the example, and keeps the answer as a guard. So the trace is
right only where the answer is: each such condition must hold in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from irongrad.sizes.dimensions import canonical, is_condition
from irongrad.sizes.symbols import names_in


class Asked:
    """The conditions that a trace asks.

    Args:
        environment: holds the symbols of the trace.
        known: conditions on named dimensions that every call satisfies, in their form by `canonical`.
        always: whether a further condition on named dimensions holds in every call; by default, none is taken to.
    """

    def __init__(
        self, environment: ShapeEnv, known: Collection[Any], always: Callable[[Any], bool] = lambda _: False
    ) -> None:
        self._environment = environment
        self._known = known
        self._always = always
        self._seen = len(environment.guards)

    def new(self) -> list[Any]:
        """The conditions asked since the last call of this method that some call may not satisfy."""
        guards, names = self._environment.guards[self._seen :], names_in(self._environment)
        self._seen = len(self._environment.guards)
        conditions = (guard.expr.xreplace(names) for guard in guards if is_condition(guard))
        asked = [part for condition in conditions for part in sympy.And.make_args(condition)]
        return [c for c in asked if canonical(c) not in self._known and not self._always(c)]


def listed(conditions: Sequence[Any]) -> str:
    """Conditions as a part of a message; of the lower bounds of one size, the one that implies the others."""
    kept: dict[Any, Any] = {}
    for condition in conditions:
        is_bound = isinstance(condition, sympy.StrictGreaterThan) and condition.rhs.is_Integer
        key = condition.lhs if is_bound else condition
        kept[key] = max(kept.get(key, condition), condition, key=lambda c: c.rhs) if is_bound else condition
    return ", ".join(map(str, kept.values()))
