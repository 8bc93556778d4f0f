"""Which form each convolution takes, by what they cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from irongrad.graph.nodes import value_of
from irongrad.passes.base import Choice, Timer
from irongrad.passes.graph.convolutions.forms import Form
from irongrad.passes.graph.convolutions.problem import Kind, Problem
from irongrad.passes.graph.convolutions.recognise import Task

Costs: TypeAlias = Mapping[Form, float]  # all in one unit

# A form that the table takes to be so much slower than the fastest is not measured.
_HOPELESS = 5.0


def fastest(costs: Mapping[Problem, Costs], problems: Sequence[Problem]) -> dict[Problem, Form]:
    """The fastest form of each problem, if all images have their channels last, or else all have them first.

    Args:
        costs: by problem, of each form that it may take.
        problems: every problem, as often as it is there.
    """
    last = {p: _least({f: c for f, c in found.items() if f.channels_last} or found) for p, found in costs.items()}
    first = {p: f for p, found in costs.items() for f in found if not f.channels_last}
    choices = [last, first] if len(first) == len(last) else [last]
    return min(choices, key=lambda forms: sum(costs[p][forms[p]] for p in problems))


def _least(costs: Costs) -> Form:
    return min(costs, key=costs.__getitem__)


def measured(task: Task, forms: Sequence[Form], timer: Timer) -> Costs:
    """Seconds that each of `forms` takes, but for those without hope; one without rivals costs nothing."""
    problem = task.problem
    estimates = {form: form.cost(problem) for form in forms}
    hopeful = [form for form in forms if estimates[form] <= _HOPELESS * min(estimates.values())]
    if len(hopeful) == 1:
        return {hopeful[0]: 0.0}
    dtype = value_of(task.operands[0]).dtype
    operands = [torch.empty(shape, dtype=dtype, device="meta") for shape in problem.shapes()]
    last = [_last(o) if image else o for o, image in zip(operands, _IMAGES[problem.kind], strict=False)]
    seconds = timer(str(problem), {form.name: _alone(form, problem) for form in hopeful}, [*operands, *last])
    return {form: seconds[form.name] for form in hopeful}


# Whether each operand is an image, and the result.
_IMAGES: Mapping[Kind, tuple[bool, bool, bool]] = {
    "forward": (True, False, True),
    "input": (True, False, True),
    "weight": (True, True, False),
}


def _last(image: torch.Tensor) -> torch.Tensor:
    return image.permute(0, 2, 3, 1)


def _alone(form: Form, problem: Problem) -> Callable[..., torch.Tensor]:
    """A form as a function of the operands as they are, and then with the channels of images last.

    It reads those that it is made for, as the pass `layout` takes the transposes between convolutions away.
    """

    def run(*operands: torch.Tensor) -> torch.Tensor:
        if not form.channels_last:
            return form.build(operands[0], operands[1], problem)
        *given, result = _IMAGES[problem.kind]
        one, other = (o.permute(0, 3, 1, 2) if image else o for o, image in zip(operands[2:], given, strict=True))
        made = form.build(one, other, problem)
        return _last(made) if result else made

    return run


def choices_of(costs: Mapping[Problem, Costs], forms: Mapping[Problem, Form]) -> tuple[Choice, ...]:
    """What was chosen by measurement."""
    return tuple(
        Choice(str(problem), forms[problem].name, {form.name: seconds for form, seconds in found.items()})
        for problem, found in costs.items()
        if len(found) > 1
    )
