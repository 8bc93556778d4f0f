"""`irongrad check` reports all refusals of a step at once, even if the step cannot be captured."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.pipeline.check_step import Report, check
from irongrad.runtime.errors import UnsupportedOpError
from irongrad.targets import parse_target


@torch.library.custom_op("irongrad_test_check::foreign", mutates_args=())
def foreign(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("irongrad_test_check::without_shape", mutates_args=())
def without_shape(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@foreign.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Model(nn.Module):
    def __init__(self, body: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.eye(3, dtype=dtype))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x @ self.w)


class Own(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(foreign(p.grad))  # the update


def of(model: nn.Module, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, target: str = "llvm-cpu") -> Report:
    dtype = next(model.parameters()).dtype
    step = ig.TrainStep(model, lambda y: y.sum(), optimizer(model.parameters()), {"x": torch.ones(3, 3, dtype=dtype)})
    return check(step, [parse_target(target)])


def refused(report: Report, function: object) -> set[tuple[str, str]]:
    """The refused operators, without their overloads, each with the comment at its line of `function`."""
    lines, start = inspect.getsourcelines(function)
    marks = {f"{__file__}:{start + i}": text.partition("# ")[2].strip() for i, text in enumerate(lines)}
    places = [(r.operator.partition(",")[0], ":".join(r.line.split(":")[:2])) for r in report.refusals]
    return {(o.removesuffix(".default"), marks.get(line, "elsewhere")) for o, line in places}


FOREIGN = "irongrad_test_check.foreign"


def complex_ones(y):
    a = torch.linalg.eigvals(y.detach())  # first
    b = torch.linalg.eig(y.detach())[0]  # second
    return y + torch.special.bessel_j0(a.real + b.imag)  # third


def decides(y):
    if y.sum() > 0:  # a decision
        y = y * 2
    y = y[y > 0]
    return y + foreign(y.detach()).sum()  # after both


def has_no_shape(y):
    y = y + without_shape(y.detach())  # without a shape
    return y + foreign(y.detach())  # after it


CASES = [
    (complex_ones, {("aten.linalg_eig", "first"), ("aten.linalg_eig", "second"), ("aten.special_bessel_j0", "third")}),
    (decides, {("", "a decision"), ("aten.index.Tensor", "after both"), (FOREIGN, "after both")}),
    (has_no_shape, {("irongrad_test_check.without_shape", "without a shape"), (FOREIGN, "after it")}),
]


@pytest.mark.parametrize(("body", "expected"), CASES, ids=lambda c: getattr(c, "__name__", None))
def test_all_refusals_of_a_forward_are_reported_at_once(body, expected):
    assert refused(of(Model(body)), body) == expected


def test_a_refusal_in_the_update_has_its_line_even_if_the_forward_is_refused():
    assert (FOREIGN, "the update") in refused(of(Model(lambda y: y * y.sum().item()), Own), Own)


def test_complex_state_is_refused_together_with_operators():
    class Turned(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (foreign(x) @ self.w) * self.turn.real  # both

    model = Turned(lambda y: y)
    model.register_buffer("turn", torch.zeros(3, dtype=torch.complex64))
    report = of(model)
    assert refused(report, Turned) == {("state 'turn'", "elsewhere"), (FOREIGN, "both")}


def test_compilation_reports_all_refusals_at_once_too(tmp_path):
    model = Model(complex_ones)
    step = ig.TrainStep(model, lambda y: y.sum(), torch.optim.SGD(model.parameters()), {"x": torch.ones(3, 3)})
    with pytest.raises(UnsupportedOpError, match="^3 operators cannot be compiled") as caught:
        ig.compile(step, tmp_path / "out")
    assert all(mark in str(caught.value) for mark in ("# first", "# second", "# third"))


def test_a_target_without_float64_is_checked():
    report = of(Model(lambda y: y, torch.float64), target="vulkan")
    assert {r.operator for r in report.refusals} >= {"state 'w'", "input 'x'"}
