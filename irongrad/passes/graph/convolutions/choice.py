"""Choose a form for each convolution by cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from irongrad.graph.nodes import value_of
from irongrad.passes.base import Choice, Measured, Timer
from irongrad.passes.graph.convolutions.forms import Form
from irongrad.passes.graph.convolutions.problem import Kind, Problem
from irongrad.passes.graph.convolutions.recognise import Task

Costs: TypeAlias = Mapping[Form, float]  # the cost of each form, all in one unit

# A form is not measured if the cost table says that it is this many times slower than the fastest.
_HOPELESS = 5.0


def fastest(costs: Mapping[Problem, Costs], problems: Sequence[Problem]) -> dict[Problem, Form]:
    """Return the fastest form of each problem, with one image layout for the whole graph.

    Either all images are channels-last or all are channels-first, whichever costs less in total.

    Args:
        costs: for each problem, the cost of each form that it may take.
        problems: all problems, repeated as often as they occur in the graph.
    """
    last = {p: _cheapest({f: c for f, c in found.items() if f.channels_last} or found) for p, found in costs.items()}
    first = {p: f for p, found in costs.items() for f in found if not f.channels_last}
    choices = [last, first] if len(first) == len(last) else [last]
    return min(choices, key=lambda forms: sum(costs[p][forms[p]] for p in problems))


def _cheapest(costs: Costs) -> Form:
    return min(costs, key=costs.__getitem__)


def in_seconds(costs: Costs) -> Costs:
    """Return estimates of the cost table, which are nanoseconds of one core, in seconds."""
    return {form: 1e-9 * cost for form, cost in costs.items()}


def hopeful(estimates: Costs, default: Form) -> list[Form]:
    """Return the forms that are worth measuring: the default, and those that the cost table does not rule out."""
    least = min(estimates.values())
    return [default, *(f for f, cost in estimates.items() if f != default and cost <= _HOPELESS * least)]


def measured(task: Task, forms: Sequence[Form], timer: Timer) -> Measured | None:
    """Measure the seconds that each of `forms` takes; return None if no time is left to measure."""
    problem = task.problem
    dtype = value_of(task.narrow_operands[0]).dtype
    operands = [torch.empty(shape, dtype=dtype, device="meta") for shape in problem.shapes()]
    last = [_channels_last(o) if image else o for o, image in zip(operands, _IMAGES[problem.kind], strict=False)]
    return timer(str(problem), {form.name: _standalone(form, problem) for form in forms}, [*operands, *last])


def costs_of(times: Measured | None, forms: Sequence[Form], default: Form) -> Costs:
    """Return the measured costs of those `forms` that ran; none if the default is not among them.

    A form that is not faster by more than the noise costs as much as the default.
    """
    if times is None or default.name not in times.seconds:
        return {}
    seconds, faster = times.seconds, times.faster
    least = {form: 0.0 if form.name in faster else seconds[default.name] for form in forms if form.name in seconds}
    return {form: max(seconds[form.name], at_least) for form, at_least in least.items()}


# For the two operands and the result: whether it is an image, and so has a layout.
_IMAGES: Mapping[Kind, tuple[bool, bool, bool]] = {
    "forward": (True, False, True),
    "input": (True, False, True),
    "weight": (True, True, False),
}


def _channels_last(image: torch.Tensor) -> torch.Tensor:
    return image.permute(0, 2, 3, 1)


def _standalone(form: Form, problem: Problem) -> Callable[..., torch.Tensor]:
    """A form as a function of the operands, given twice: as they are, and with images channels-last.

    The function reads the operands in the form's own layout. The pass `layout` removes the transposes between
    convolutions, so they must not be measured.
    """

    def run(*operands: torch.Tensor) -> torch.Tensor:
        if problem.halves and not form.is_product:
            operands = tuple(x.float() for x in operands)
        if not form.channels_last:
            return form.build(operands[0], operands[1], problem)
        *images, is_image = _IMAGES[problem.kind]
        one, other = (o.permute(0, 3, 1, 2) if image else o for o, image in zip(operands[2:], images, strict=True))
        output = form.build(one, other, problem)
        return _channels_last(output) if is_image else output

    return run


def choices_of(
    times: Mapping[Problem, Measured | None], forms: Mapping[Problem, Form], defaults: Mapping[Problem, Form]
) -> tuple[Choice, ...]:
    """Return the choices that were made by measurement, from what was measured and the forms with and without it."""
    return tuple(
        Choice(str(problem), forms[problem].name, found.seconds, defaults[problem].name, failed=found.failed)
        for problem, found in times.items()
        if found is not None
    )
