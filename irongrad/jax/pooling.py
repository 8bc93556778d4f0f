"""The gradient of a pooling of windows, as operations that IREE has.

IREE 3.13.0 cannot lower `stablehlo.select_and_scatter` of windows that overlap ("failed to legalize operation").
`test_iree_still_lacks_overlapping_windows` (tests/jax/test_pooling.py) fails when it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import jax.numpy as jnp
from jax import lax

from irongrad.jax.programs import Rule, Site


def pooling_rules() -> dict[str, Rule]:
    """Return the rule for the gradient of pooling."""
    return {"select_and_scatter_add": _select_and_scatter_add}


def _select_and_scatter_add(site: Site) -> Callable[..., Any]:
    """Go over the places in a window, in their order; the first of equal elements is selected, as in XLA."""
    size, strides, padding, select = (
        site.equation.params[n] for n in ("window_dimensions", "window_strides", "padding", "select_prim")
    )

    def function(source: Any, operand: Any) -> Any:
        padded = [n + low + high for n, (low, high) in zip(operand.shape, padding, strict=True)]
        edges = [(low, high, 0) for low, high in padding]
        values = lax.pad(operand, jnp.zeros((), operand.dtype), edges)
        inside = lax.pad(jnp.full(operand.shape, True), jnp.array(False), edges)
        best, chosen = None, jnp.full(source.shape, -1, jnp.int32)
        for number, start in _places(size):
            ends = [a + (n - 1) * s + 1 for a, n, s in zip(start, source.shape, strides, strict=True)]
            value, there = (lax.slice(t, start, ends, strides) for t in (values, inside))
            better = there if best is None else there & ((chosen < 0) | ~select.bind(best, value))
            best = value if best is None else jnp.where(better, value, best)
            chosen = jnp.where(better, number, chosen)
        total = jnp.zeros(padded, source.dtype)
        for number, start in _places(size):
            part = jnp.where(chosen == number, source, jnp.zeros((), source.dtype))
            spread = [
                (a, p - a - (n - 1) * s - 1, s - 1)
                for a, p, n, s in zip(start, padded, source.shape, strides, strict=True)
            ]
            total = total + lax.pad(part, jnp.zeros((), source.dtype), spread)
        return lax.pad(total, jnp.zeros((), source.dtype), [(-low, -high, 0) for low, high in padding])

    return function


def _places(size: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
    return enumerate(product(*map(range, size)))
