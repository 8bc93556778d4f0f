"""Complex numbers inside a function: operators on pairs match ATen, mutation and views work, the rest is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import irongrad as ig
from irongrad.diagnostics import source_lines
from irongrad.frontends.compile_function import _trace
from irongrad.operators.legalize.complex_numbers import in_reals
from irongrad.operators.legalize.retrace import interpret
from irongrad.pipeline.capture.plain_operators import plain_operators
from irongrad.runtime.errors import UnsupportedOpError

Z = Callable[[Tensor, Tensor], Tensor]

# Functions of two complex matrices, 3 by 4 and 4 by 4. Each has few operators, so a failure is easy to locate.
FUNCTIONS: dict[str, Z] = {
    "sums": lambda z, w: z + 2 * w[:3] - (1 + 2j) + torch.sub(1j, z, alpha=3) + w.real[:3] + z.imag,
    "products": lambda z, w: z * w[:3] * (2 - 1j) * z.real * 3.0,
    "quotients": lambda z, w: z / w[:3] + 1 / z + z / 2.0 + z / (1 + 1j) + z.real / w[:3] + w[:3].reciprocal(),
    "conjugates": lambda z, w: z.conj() * w[:3].conj().resolve_conj() + z.conj().imag + z.mH.mT,
    "sizes": lambda z, w: z.abs() * w[:3].angle() + z.sgn() + torch.linalg.vector_norm(w, dim=0) + z.abs().sum(),
    "made of reals": lambda z, w: torch.polar(z.real, w[:3].imag) + torch.complex(z.imag, w[:3].real),
    "exponentials": lambda z, w: z.exp() + w[:3].expm1() + z.exp2() + z.sigmoid(),
    "logarithms": lambda z, w: z.log() + w[:3].log2() + z.log10() + (w[:3] * 0.2).log1p() + z.log1p(),
    "powers": lambda z, w: z**2 + w[:3] ** 3 + z**-1 + z**0.5 + z**1.7 + 2.0**z + z ** w[:3] + z ** (1 + 1j) + z**0,
    "roots": lambda z, w: z.sqrt() + w[:3].rsqrt() + (-z * z.conj()).sqrt(),
    "circular": lambda z, w: z.sin() + w[:3].cos() + z.tan(),
    "hyperbolic": lambda z, w: z.sinh() + w[:3].cosh() + z.tanh(),
    "inverse": lambda z, w: z.asin() + w[:3].acos() + z.atan() + z.asinh() + w[:3].acosh() + z.atanh(),
    "matrices": lambda z, w: z @ w + torch.addmm(z, z, w, beta=0.5, alpha=2j),
    "batches": lambda z, w: torch.einsum("ij,bjk->bik", z, torch.stack([w, w.mT.conj()])) + torch.vdot(z[0], w[1]),
    "reductions": lambda z, w: z.sum(0) + w.mean() + z.prod(0) + z.prod() + w.cumsum(1)[2] + w.cumprod(0)[3],
    "spreads": lambda z, w: w.var(0) + w.std(1) + torch.var_mean(w, 0)[1],
    "shapes": lambda z, w: (
        torch.cat([z.reshape(4, 3).mT, w[:3].flip(0), z.real], 1).roll(1, 0).tril()[:, 1:6].unbind(1)[2]
    ),
    "indices": lambda z, w: (
        z[torch.tensor([0, 2, 0])] + z.gather(1, torch.tensor([[1, 0, 2, 3]] * 3)) + z.diagonal()[0]
    ),
    "choices": lambda z, w: (
        torch.where(z.real > 0, z, w[:3]) + torch.where(z == w[:3], 1j, z) + z.masked_fill(z != 0, 2j)
    ),
    "casts": lambda z, w: z.to(torch.complex64).to(torch.complex128) + z.real.to(torch.complex128) + z.bool(),
    "constants": lambda z, w: z + torch.ones(4, dtype=z.dtype) + torch.full((4,), 1 + 2j) + torch.tensor([1j, 2, 3, 4]),
    "views": lambda z, w: torch.view_as_complex(torch.view_as_real(z * 2)) + torch.view_as_real(z)[..., 1],
}


def _in_place(z: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros_like(w)
    out[:3] = z
    out.real[0] += 1.0
    out.mT[1].mul_(2j)
    torch.view_as_real(out)[..., 1].neg_()
    return out.add_(w.conj()).div_(3.0)


FUNCTIONS["in place"] = _in_place


def on_real_views(function: Z) -> Callable[..., list[Tensor]]:
    """`function` on real views of complex tensors; returns its value and the gradients of a weighted sum of it."""

    def run(z: Tensor, w: Tensor) -> list[Tensor]:
        given = [t.detach().requires_grad_() for t in (z, w)]
        with torch.enable_grad():
            value = function(*(torch.view_as_complex(t) for t in given))
            value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            weights = torch.linspace(0.3, 1.7, value.numel(), dtype=value.dtype).reshape(value.shape)
            gradients = torch.autograd.grad((value * weights).sum(), given, materialize_grads=True)
        return [value.detach(), *gradients]

    return run


def examples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(n, 4, 2, dtype=torch.float64, generator=generator) for n in (3, 4)]
    return made[0], made[1]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_match_aten(name: str) -> None:
    run = on_real_views(FUNCTIONS[name])
    with source_lines.quiet_export(), plain_operators():
        graph = in_reals(_trace(run, examples()))
    assert not any(v.is_complex() for n in graph.graph.nodes if isinstance(v := n.meta.get("val"), Tensor))
    for found, expected in zip(interpret(graph, examples()), run(*examples()), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_graph_without_complex_numbers_is_unchanged() -> None:
    with source_lines.quiet_export():
        graph = _trace(lambda x: [x.sin()], [torch.randn(3)])
    assert in_reals(graph) is graph


def test_compiled_complex_functions_match_eager() -> None:
    def function(z: Tensor, w: Tensor) -> Tensor:
        a, b = torch.view_as_complex(z), torch.view_as_complex(w)
        made = [f(a, b) for name, f in FUNCTIONS.items() if name in ("quotients", "sizes", "matrices", "spreads")]
        return sum((torch.view_as_real(m + 0j).sum() for m in made), torch.zeros((), dtype=z.dtype))

    ig.compile_function(function, [t.float() for t in examples()], gradients=True)


def test_an_operator_without_a_rule_is_refused_by_name() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.linalg.det(torch.complex(x, x)).abs()  # the line to name

    with pytest.raises(UnsupportedOpError, match=r"(?s)test_complex_numbers.py:\d+.*the line to name.*_linalg_det"):
        ig.compile_function(function, (torch.eye(3),))


def test_complex_arguments_and_results_are_refused() -> None:
    z = torch.randn(3, dtype=torch.complex64)
    with pytest.raises(UnsupportedOpError, match="'z' gives torch.complex64 values.*view_as_real"):
        ig.compile_function(lambda z: z.abs(), (z,))
    with pytest.raises(UnsupportedOpError, match=r"(?s)test_complex_numbers.py.*a result is complex.*view_as_real"):
        ig.compile_function(lambda x: torch.complex(x, x), (torch.ones(3),))


def test_complex_parameters_are_refused(tmp_path: Path) -> None:
    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.turn).abs()

    model = Rotation()
    step = ig.TrainStep(model, lambda out: out.sum(), torch.optim.SGD(model.parameters(), 0.1), {"x": torch.ones(4)})
    with pytest.raises(UnsupportedOpError, match="state 'turn' gives torch.complex64"):
        ig.compile(step, tmp_path / "artifact")
