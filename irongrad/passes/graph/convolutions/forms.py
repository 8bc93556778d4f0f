"""The table of forms that a convolution and its gradients can take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from irongrad.operators.decompositions import convolution as plain
from irongrad.passes.graph.convolutions import costs
from irongrad.passes.graph.convolutions.depthwise import (
    depthwise,
    depthwise_input_gradient,
    depthwise_weight_gradient,
    filtered,
    filtered_input_gradient,
    filtered_weight_gradient,
)
from irongrad.passes.graph.convolutions.problem import Kind, Problem, Window
from irongrad.passes.graph.convolutions.products import (
    gathered_product,
    scattered_product,
    weight_gradient_by_row,
    weight_gradient_gathered,
)
from irongrad.passes.graph.convolutions.windowed import (
    is_windowed,
    windowed,
    windowed_input_gradient,
    windowed_weight_gradient,
)
from irongrad.passes.graph.convolutions.winograd import winograd, winograd_input_gradient, winograd_weight_gradient

aten = torch.ops.aten


@dataclass(frozen=True)
class Form:
    """One way to compute the problems of one kind.

    Attributes:
        name: the name in `--pass-report` and in options.
        kind: the kind of problem that the form solves.
        cost: returns the cost of a problem, in nanoseconds of one core.
        build: computes the result of a problem from its two operands.
        takes: whether the form can solve a problem.
        is_product: whether operands are only moved before they are multiplied, so that they may be bfloat16.
    """

    name: str
    kind: Kind
    cost: Callable[[Problem], float]
    build: Callable[[torch.Tensor, torch.Tensor, Problem], torch.Tensor]
    takes: Callable[[Problem], bool]
    is_product: bool = False

    @property
    def channels_last(self) -> bool:
        """Whether the form is written for channels-last images."""
        return self.build not in _CHANNELS_FIRST


def forms_of(problem: Problem) -> list[Form]:
    """Return every form that can solve `problem`, the direct form first.

    If the kernel reads only padding, the direct form is the only one.
    """
    forms = [form for form in FORMS if form.kind == problem.kind and form.takes(problem)]
    return forms if problem.window.taps() else forms[:1]


def _direct(x: torch.Tensor, weight: torch.Tensor, problem: Problem) -> torch.Tensor:
    window, zeros = problem.window, [0, 0]
    padded = plain.zero_padded(x, window.pads())
    moves = (window.stride, zeros, window.dilation)
    result: torch.Tensor = aten.convolution.default(padded, weight, None, *moves, False, zeros, problem.groups)
    return result


def _direct_input_gradient(grad: torch.Tensor, weight: torch.Tensor, problem: Problem) -> torch.Tensor:
    window = problem.window
    geometry = plain.Geometry(window.stride, window.padding, window.dilation, problem.groups)
    return plain.input_gradient(grad, window.sizes, weight, geometry)


def _direct_weight_gradient(grad: torch.Tensor, x: torch.Tensor, problem: Problem) -> torch.Tensor:
    window = problem.window
    geometry = plain.Geometry(window.stride, [0, 0], window.dilation, problem.groups)
    shape = (problem.channels[1], problem.channels[0] // problem.groups, *window.kernel)
    return plain.weight_gradient(grad, plain.zero_padded(x, window.pads()), shape, geometry)


_CHANNELS_FIRST = (_direct, _direct_input_gradient, _direct_weight_gradient)


def _any(problem: Problem) -> bool:
    return True


def _dense(problem: Problem) -> bool:
    return problem.groups == 1


def _depthwise(problem: Problem) -> bool:
    return problem.is_depthwise


def _filtered(problem: Problem) -> bool:
    return problem.groups == problem.channels[0] > 1 and problem.channels[1] >= _FEWEST_CHANNELS


def _is_winograd(problem: Problem) -> bool:
    """Whether Winograd's minimal filtering is defined for `problem`."""
    window = problem.window
    within = all(pad <= 2 for pad in window.padding)
    alike = {*window.stride, *window.dilation} == {1} and window.kernel == (3, 3)
    return problem.groups == 1 and alike and within


def _windowed(
    function: Callable[[torch.Tensor, torch.Tensor, Window], torch.Tensor],
) -> Callable[[torch.Tensor, torch.Tensor, Problem], torch.Tensor]:
    return lambda first, second, problem: function(first, second, problem.window)


def _by_group(form: Form) -> Form:
    """Apply `form` to each group separately."""

    def build(first: torch.Tensor, second: torch.Tensor, problem: Problem) -> torch.Tensor:
        lefts = first.chunk(problem.groups, 1)
        rights = second.chunk(problem.groups, 1 if problem.kind == "weight" else 0)
        parts = [form.build(*pair, problem.of_group()) for pair in zip(lefts, rights, strict=True)]
        return torch.cat(parts, 0 if problem.kind == "weight" else 1)

    def takes(problem: Problem) -> bool:
        return (
            1 < problem.groups <= _MOST_GROUPS
            and not (problem.is_depthwise or problem.adds_images)
            and form.takes(problem.of_group())
        )

    name = f"{form.name}-by-group"
    return Form(name, form.kind, lambda p: p.groups * form.cost(p.of_group()), build, takes, form.is_product)


_MOST_GROUPS = 32
_FEWEST_CHANNELS = 4  # of a kernel of ours for depthwise convolutions

_FORMS: Sequence[Form] = (
    Form("direct", "forward", costs.direct, _direct, _any),
    Form("windowed", "forward", costs.windowed, _windowed(windowed), is_windowed, is_product=True),
    Form("gathered", "forward", costs.gathered, _windowed(gathered_product), _dense, is_product=True),
    Form("winograd", "forward", costs.winograd, _windowed(winograd), _is_winograd),
    Form("depthwise", "forward", costs.depthwise, _windowed(depthwise), _depthwise),
    Form("filtered", "forward", costs.filtered, _windowed(filtered), _filtered),
    Form("direct", "input", costs.direct, _direct_input_gradient, _any),
    Form("windowed", "input", costs.windowed, windowed_input_gradient, is_windowed, is_product=True),
    Form("scattered", "input", costs.scattered, _windowed(scattered_product), _dense, is_product=True),
    Form("winograd", "input", costs.winograd, _windowed(winograd_input_gradient), _is_winograd),
    Form("depthwise", "input", costs.depthwise, _windowed(depthwise_input_gradient), _depthwise),
    Form("filtered", "input", costs.filtered, filtered_input_gradient, _filtered),
    Form("direct", "weight", costs.direct, _direct_weight_gradient, _any),
    Form("windowed", "weight", costs.windowed, windowed_weight_gradient, is_windowed, is_product=True),
    Form("by-row", "weight", costs.by_row, _windowed(weight_gradient_by_row), _dense, is_product=True),
    Form("gathered", "weight", costs.gathered_apart, _windowed(weight_gradient_gathered), _dense, is_product=True),
    Form("winograd", "weight", costs.winograd, _windowed(winograd_weight_gradient), _is_winograd),
    Form("depthwise", "weight", costs.depthwise, _windowed(depthwise_weight_gradient), _depthwise),
    Form("filtered", "weight", costs.filtered, _windowed(filtered_weight_gradient), _filtered),
)

FORMS: Sequence[Form] = (*_FORMS, *(_by_group(form) for form in _FORMS if form.takes is _dense))
