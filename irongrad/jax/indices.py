"""Indices of JAX programs, which JAX clamps, drops or fills when they are out of range, written so in the program.

IREE 3.13.0 trusts most of them. It lowers a gather along one dimension to a load without StableHLO's clamp
(`iree-stablehlo-preprocessing-gather-to-torch-index-select`). It lowers a scatter to `iree_linalg_ext.scatter`, which
does not drop what is out of range. Both reach memory of other tensors, or end the process. It reads unsigned indices as
signed ones. It refuses scatters of windows over several dimensions ("expected indices to be equal to batch rank").
`test_iree_still_trusts_indices` (tests/jax/test_indices.py) fails when IREE does better.

So each operation is written with indices that are always in range, and each scatter as one of rows into a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core

from irongrad.jax.programs import Rule, Site
from irongrad.runtime.manifest import PROVED, IndexSpec

# What replaces an operation, None for nothing; what becomes of its index; the largest number that is in range.
_Decision: TypeAlias = tuple[Callable[..., Any] | None, str, int]

AS_CLAMPED, AS_DROPPED, AS_FILLED = "clamped as in JAX", "dropped as in JAX", "filled as in JAX"

_ROWS = lax.ScatterDimensionNumbers(
    update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)
# Updates that change nothing: -0.0 + x is x, also if x is -0.0.
_NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "scatter-add": lambda dtype: -0.0 if jnp.issubdtype(dtype, jnp.inexact) else 0,
    "scatter-sub": lambda _: 0,
    "scatter-mul": lambda _: 1,
    "scatter-min": lambda dtype: jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).max,
    "scatter-max": lambda dtype: -jnp.inf if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min,
}


def index_rules(record: Callable[[IndexSpec], object]) -> dict[str, Rule]:
    """Return the rules for all operations with dynamic indices.

    Args:
        record: takes a record of each index.
    """
    scatters = ("scatter", *_NEUTRAL)

    def recorded(rule: Callable[[Site], _Decision]) -> Rule:
        def decide(site: Site) -> Callable[..., Any] | None:
            function, how, most = rule(site)
            record(IndexSpec(_short(site.line), site.equation.primitive.name, f"[0, {most}]", how))
            return function

        return decide

    rules = {"gather": _gather, "dynamic_slice": _slice, "dynamic_update_slice": _update}
    return {name: recorded(rule) for name, rule in (rules | dict.fromkeys(scatters, _scatter)).items()}


def _short(line: str) -> str:
    """A line without the folders of its file, which mean nothing on another machine."""
    file, separator, rest = line.partition(":")
    return file.rsplit("/", 1)[-1] + separator + rest


# An index has one number for each indexed dimension; `limits` has the largest valid one of each.


def _columns(indices: Any) -> list[Any]:
    """The numbers of an index as int32 where no value is lost; they lie along the last dimension."""
    if indices.dtype.itemsize < 4:
        indices = indices.astype(jnp.int32)
    return [indices[..., k] for k in range(indices.shape[-1])]


def _clamped(column: Any, limit: int) -> Any:
    """Clamp in the index's own dtype, which may be unsigned or wider than the result."""
    return lax.clamp(column.dtype.type(0), column, column.dtype.type(limit)).astype(jnp.int32)


def _inside(columns: Sequence[Any], limits: Sequence[int], shape: Sequence[int]) -> Any:
    found = jnp.full(shape, True)
    for column, limit in zip(columns, limits, strict=True):
        found = found & (column >= column.dtype.type(0)) & (column <= column.dtype.type(limit))
    return found


def _always_inside(indices: np.ndarray[Any, Any] | None, limits: Sequence[int]) -> bool:
    return indices is not None and bool(np.all((indices >= 0) & (indices <= np.array(limits, np.int64))))


def _fills(mode: Any) -> bool:
    return bool(mode == lax.GatherScatterMode.FILL_OR_DROP)


def _gather(site: Site) -> _Decision:
    equation, parameters = site.equation, site.equation.params
    numbers, sizes, fills = parameters["dimension_numbers"], parameters["slice_sizes"], _fills(parameters["mode"])
    operand = equation.invars[0].aval
    limits = [operand.shape[d] - sizes[d] for d in numbers.start_index_map]
    if _always_inside(site.known(equation.invars[1]), limits):
        return None, PROVED, max(limits, default=0)
    plain = parameters | {"mode": lax.GatherScatterMode.CLIP, "fill_value": None}
    batch = [d for d in range(len(equation.outvars[0].aval.shape)) if d not in numbers.offset_dims]

    def gather(operand: Any, indices: Any) -> Any:
        columns = _columns(indices)
        places = jnp.stack([_clamped(c, m) for c, m in zip(columns, limits, strict=True)], -1)
        found = lax.gather_p.bind(operand, places, **plain)
        if not fills:
            return found
        inside = lax.broadcast_in_dim(_inside(columns, limits, indices.shape[:-1]), found.shape, batch)
        return jnp.where(inside, found, _fill(parameters["fill_value"], found.dtype))

    return gather, AS_FILLED if fills else AS_CLAMPED, max(limits, default=0)


def _fill(value: Any, dtype: Any) -> Any:
    """The value of a gather out of range: as given, or that of `jax.lax.GatherScatterMode`."""
    if value is None:
        if jnp.issubdtype(dtype, jnp.inexact):
            value = jnp.nan
        elif dtype == jnp.bool_:
            value = True
        else:
            about = jnp.iinfo(dtype)
            value = about.min if jnp.issubdtype(dtype, jnp.signedinteger) else about.max
    return jnp.full((), value, dtype)


def _slice(site: Site) -> _Decision:
    return _dynamic(site, site.equation.invars[1:], site.equation.params["slice_sizes"])


def _update(site: Site) -> _Decision:
    return _dynamic(site, site.equation.invars[2:], site.equation.invars[1].aval.shape)


def _dynamic(site: Site, starts: Sequence[Any], sizes: Sequence[int]) -> _Decision:
    """Clamp the start of a slice or of an update."""
    equation = site.equation
    limits = [n - s for n, s in zip(equation.invars[0].aval.shape, sizes, strict=True)]
    values = [site.known(s) for s in starts]
    if all(_always_inside(v, [m]) for v, m in zip(values, limits, strict=True)):
        return None, PROVED, max(limits)
    tensors = len(equation.invars) - len(starts)

    def dynamic(*operands: Any) -> Any:
        columns = [c for s in operands[tensors:] for c in _columns(s[None])]
        places = [_clamped(c, m) for c, m in zip(columns, limits, strict=True)]
        return equation.primitive.bind(*operands[:tensors], *places, **equation.params)

    return dynamic, AS_CLAMPED, max(limits)


@dataclass(frozen=True)
class _Windows:
    """What a scatter writes: one window into the operand for each index.

    Attributes:
        shape: the shape of the operand.
        sizes: the size of the window along each dimension of the operand.
        axes: the dimension of the updates along each dimension of the operand; None if the window has none.
        batch: the dimensions of the updates that number the indices.
        indexed: the dimensions of the operand that the index has a number for.
        batching: the dimension of the indices for each batching dimension of the operand.
        row: the first of the trailing dimensions that windows cover whole, and that no index moves.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    axes: tuple[int | None, ...]
    batch: tuple[int, ...]
    indexed: tuple[int, ...]
    batching: dict[int, int]
    row: int

    @property
    def limits(self) -> list[int]:
        """The largest valid index for each indexed dimension."""
        return [self.shape[d] - self.sizes[d] for d in self.indexed]

    @property
    def rows(self) -> int:
        """How many rows the operand has."""
        return prod(self.shape[: self.row])

    @property
    def leading(self) -> list[int]:
        """The dimensions of the updates that become several rows."""
        return [a for a in self.axes[: self.row] if a is not None]

    @property
    def order(self) -> list[int]:
        """The dimensions of the updates, so that rows are one after the other."""
        return [*self.batch, *self.leading, *(a for a in self.axes[self.row :] if a is not None)]

    def places(self, columns: Sequence[Any], counts: Sequence[int], dims: Sequence[int]) -> Any:
        """The row of each update, from indices that are in range.

        Args:
            columns: the numbers of the indices.
            counts: the shape of the indices.
            dims: `counts`, then the sizes of the dimensions in `leading`.
        """
        found = jnp.zeros(dims, jnp.int32)
        after = len(counts)
        for d in range(self.row):
            stride = prod(self.shape[d + 1 : self.row])
            if d in self.indexed:
                column = columns[self.indexed.index(d)]
                found = found + lax.broadcast_in_dim(column, dims, range(len(counts))) * stride
            if d in self.batching:
                found = found + lax.broadcasted_iota(jnp.int32, dims, self.batching[d]) * stride
            if self.axes[d] is not None:
                found = found + lax.broadcasted_iota(jnp.int32, dims, after) * stride
                after += 1
        return found


def _windows(equation: core.JaxprEqn) -> _Windows:
    numbers = equation.params["dimension_numbers"]
    shape, _, updates = (tuple(map(int, v.aval.shape)) for v in equation.invars)
    absent = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window = iter(numbers.update_window_dims)
    axes = tuple(None if d in absent else next(window) for d in range(len(shape)))
    sizes = tuple(1 if a is None else updates[a] for a in axes)
    moved = {*numbers.scatter_dims_to_operand_dims, *absent}
    row = len(shape)
    while row and row - 1 not in moved and sizes[row - 1] == shape[row - 1]:
        row -= 1
    return _Windows(
        shape,
        sizes,
        axes,
        tuple(d for d in range(len(updates)) if d not in numbers.update_window_dims),
        tuple(numbers.scatter_dims_to_operand_dims),
        dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)),
        row,
    )


def _scatter(site: Site) -> _Decision:
    equation, parameters = site.equation, site.equation.params
    windows = _windows(equation)
    limits, clamps = windows.limits, parameters["mode"] == lax.GatherScatterMode.CLIP
    proved = _always_inside(site.known(equation.invars[1]), limits)
    plain = parameters | {
        "dimension_numbers": _ROWS,
        "mode": lax.GatherScatterMode.CLIP,
        "unique_indices": False,
        "indices_are_sorted": False,
    }

    def scatter(operand: Any, indices: Any, updates: Any) -> Any:
        if not operand.size or not updates.size:
            return operand
        columns, counts = _columns(indices), indices.shape[:-1]
        dims = (*counts, *(updates.shape[a] for a in windows.leading))
        places = windows.places([_clamped(c, m) for c, m in zip(columns, limits, strict=True)], counts, dims)
        matrix = operand.reshape(windows.rows, -1)
        rows = updates.transpose(windows.order).reshape(-1, matrix.shape[1])
        places = places.reshape(-1, 1)
        beyond = False
        if not proved and not clamps:
            inside = lax.broadcast_in_dim(_inside(columns, limits, counts), dims, range(len(counts))).reshape(-1, 1)
            neutral = _NEUTRAL.get(equation.primitive.name)
            beyond = neutral is None or operand.dtype == jnp.bool_
            if beyond:  # write what is dropped into one more row
                places = jnp.where(inside, places, windows.rows)
                matrix = jnp.pad(matrix, ((0, 1), (0, 0)))
            elif neutral is not None:
                rows = jnp.where(inside, rows, jnp.full((), neutral(operand.dtype), operand.dtype))
        written = equation.primitive.bind(matrix, places, rows, **plain)
        return (written[:-1] if beyond else written).reshape(operand.shape)

    how = PROVED if proved else AS_CLAMPED if clamps else AS_DROPPED
    return scatter, how, max(limits, default=0)
