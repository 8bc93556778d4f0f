"""Run a graph with every floating-point tensor in float64, to tell a change of meaning from rounding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import Target

from irongrad.graph.eager_control_flow import eager_control_flow

aten = torch.ops.aten

_WIDE = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64)
_WIDE[torch.complex64] = torch.complex128
_EPS = torch.finfo(torch.float64).eps


def run_in_float64(graph: GraphModule, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run a functional graph in float64, whatever floating-point dtypes it asks for."""
    with torch.no_grad(), eager_control_flow(), _float64_by_default():
        return _Wide(graph).outputs([in_float64(v) for v in values])


@contextmanager
def _float64_by_default() -> Iterator[None]:
    """While open, functions of integers with fractional results, such as `exp`, give float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_float64(value: Any) -> Any:
    """Return a tensor in float64, or complex128, if its dtype is narrower; likewise a dtype; else `value` itself."""
    if isinstance(value, torch.Tensor):
        return value.to(_WIDE.get(value.dtype, value.dtype))
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


class Eager(Interpreter):
    """Run a functional graph on tensors, including the bodies of its control flow."""

    def outputs(self, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the graph's results."""
        return list(self.run(*values, enable_io_processing=False))

    def of_body(self, body: GraphModule) -> Eager:
        """Return the interpreter of a body of control flow."""
        return type(self)(body)

    def fetch_attr(self, target: str) -> Any:
        """Return a constant, or the body of control flow as a function."""
        value = super().fetch_attr(target)
        return (lambda *values: self.of_body(value).outputs(values)) if isinstance(value, GraphModule) else value

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator; `view` runs as `reshape`, because tensors in a graph have no strides."""
        return super().call_function(aten.reshape.default if target is aten.view.default else target, args, kwargs)


class _Wide(Eager):
    def fetch_attr(self, target: str) -> Any:
        """Return a constant in float64, or a body."""
        return in_float64(super().fetch_attr(target))

    def run_node(self, n: Node) -> Any:
        """Run one node; a view of bits gets the number in its own dtype."""
        if n.target is aten.view.dtype:
            (source,) = n.all_input_nodes
            narrow = self.env[source].to(source.meta["val"].dtype)
            return in_float64(aten.view.dtype(narrow, n.args[1]))
        return super().run_node(n)

    def call_function(self, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator; a dtype argument becomes float64 if it is narrower."""
        args = tuple(in_float64(a) if isinstance(a, torch.dtype) else a for a in args)
        kwargs = {k: in_float64(v) if isinstance(v, torch.dtype) else v for k, v in kwargs.items()}
        return super().call_function(target, args, kwargs)


def magnitudes(graph: GraphModule, values: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[float]:
    """Return, for each of the `results` of `graph`, the largest magnitude of the result or of the terms that it sums.

    A sum whose terms cancel is nothing but rounding error, such as the gradient of a bias before a normalisation. If
    the last bits of `values` change, such a sum moves by about an epsilon of its terms. The function perturbs `values`
    to measure that, and so finds the magnitude of the terms. A bit can also decide more than a sum, as among equal
    maxima. So the magnitude is capped by that of the largest result.
    """
    generator = torch.Generator().manual_seed(0)

    def perturbed(value: torch.Tensor) -> torch.Tensor:
        sign = torch.rand(value.shape, generator=generator, dtype=torch.float64).sub(0.5).sign()
        return value.double() * (1 + _EPS * sign) if value.is_floating_point() else value

    moved = run_in_float64(graph, [perturbed(v) for v in values])
    own = [_largest(r) for r in results]
    terms = [_largest(m.double() - r.double()) / _EPS for m, r in zip(moved, results, strict=True)]
    return [max(size, min(term, max(own))) for size, term in zip(own, terms, strict=True)]


def differences(
    before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], sizes: Sequence[float] | None = None
) -> list[float]:
    """Return the largest difference of each result, relative to `sizes`, or to the result's largest magnitude.

    The difference is infinite if only one of two values is finite, or if they are different infinities.
    """
    sizes = [_largest(b) for b in before] if sizes is None else sizes
    return [_difference(b, a, size) for b, a, size in zip(before, after, sizes, strict=True)]


def _difference(before: torch.Tensor, after: torch.Tensor, size: float) -> float:
    b, a = before.double(), after.double()
    finite = b.isfinite() & a.isfinite()
    if not torch.equal(b[~finite].nan_to_num(), a[~finite].nan_to_num()) or (b.isnan() != a.isnan()).any():
        return float("inf")
    gap = _largest(b[finite] - a[finite])
    return gap / size if size else gap


def _largest(tensor: torch.Tensor) -> float:
    """The largest finite magnitude; 0 if there is none."""
    finite = tensor.double()[tensor.isfinite()]
    return finite.abs().amax().item() if finite.numel() else 0.0
