"""Schedules: hyperparameters as functions of the step, equal to those of PyTorch and of transformers to the last bit.

A schedule is a function of the number of the step, from 0 on, so a resumed run needs no state of it. The formulas are
those of `torch.optim.lr_scheduler` and of `transformers.optimization`, with their order of operations. Two of PyTorch's
schedulers compute each value from the one before, and so do the schedules here: a closed form would differ in the last
bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from irongrad.runtime.arguments import check_whole
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import Manifest

# The learning rate of all parameter groups, or that of each by the name of its hyperparameter, such as `lr_1`.
Rates: TypeAlias = float | Mapping[str, float]


@dataclass(frozen=True)
class Schedule:
    """Hyperparameters as a function of the step.

    Attributes:
        name: its name, such as `cosine`.
        total: the number of steps that it is made for; None if it has no end.
        values: the value of each hyperparameter at a step.
    """

    name: str
    total: int | None
    values: Mapping[str, Callable[[int], float]]

    def __call__(self, step: int) -> dict[str, float]:
        """Return the hyperparameters of step `step`, counted from 0, by name."""
        return {name: value(step) for name, value in self.values.items()}

    def refuse_end_before(self, steps: int) -> None:
        """Refuse a training that goes on after the schedule's end.

        Args:
            steps: the number of the training's steps, those before a resumed checkpoint included.

        Raises:
            UserError: the schedule is shorter.
        """
        if self.total is not None and self.total < steps:
            raise UserError(
                f"the schedule {self.name} ends after {self.total} steps, and training ends after {steps}: make the "
                "schedule as long, or train less"
            )


def rates_of(manifest: Manifest, rate: float | None = None) -> dict[str, float]:
    """Return the learning rate of every parameter group by the name of its hyperparameter: `lr`, or `lr_0`, `lr_1`, ….

    Args:
        manifest: the manifest of an artifact (`session.manifest`), or of one of its steps.
        rate: a rate for all groups; by default each has the one that was compiled.

    Raises:
        UserError: the learning rate is no run-time input of the step.
    """
    rates = compiled_rates(manifest)
    if not rates:
        raise UserError("the step has no hyperparameter lr, so no schedule can set it")
    return rates if rate is None else dict.fromkeys(rates, rate)


def compiled_rates(manifest: Manifest) -> dict[str, float]:
    """Return the compiled learning rate of every parameter group by name; nothing if no rate is a run-time input."""
    return {h.name: h.default for h in manifest.hypers if _is(h.name, "lr")}


def momenta_of(manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the hyperparameters that `one_cycle` moves against the rate: `momentum` or `beta1`."""
    return tuple(h.name for h in manifest.hypers if _is(h.name, "momentum") or _is(h.name, "beta1"))


def constant(rate: Rates, *, warmup: int = 0) -> Schedule:
    """The rate itself, after a linear warm-up: `get_constant_schedule_with_warmup` of transformers.

    Args:
        rate: the learning rate, or one for each parameter group by name.
        warmup: the number of steps in which the rate rises from 0.

    Raises:
        UserError: a number is not finite, or out of its range.
    """
    check_whole("a schedule: warmup", warmup)

    def factor(step: int) -> float:
        return float(step) / float(max(1.0, warmup)) if step < warmup else 1.0

    return Schedule("constant", None, _scaled(rate, factor))


def linear(rate: Rates, total: int, *, warmup: int = 0) -> Schedule:
    """A linear warm-up, and a linear decay to 0: `get_linear_schedule_with_warmup` of transformers.

    Args:
        rate: the largest learning rate, or one for each parameter group by name.
        total: the number of steps, those of the warm-up included.
        warmup: the number of steps in which the rate rises from 0.

    Raises:
        UserError: a number is not finite, or out of its range; or the warm-up is longer than the schedule.
    """
    _warms_up("linear", total, warmup)

    def factor(step: int) -> float:
        if step < warmup:
            return float(step) / float(max(1, warmup))
        return max(0.0, float(total - step) / float(max(1, total - warmup)))

    return Schedule("linear", total, _scaled(rate, factor))


def cosine(rate: Rates, total: int, *, warmup: int = 0, cycles: float = 0.5) -> Schedule:
    """A linear warm-up, and a decay along a cosine: `get_cosine_schedule_with_warmup` of transformers.

    Args:
        rate: the largest learning rate, or one for each parameter group by name.
        total: the number of steps, those of the warm-up included.
        warmup: the number of steps in which the rate rises from 0.
        cycles: the number of waves; half a wave decays to 0.

    Raises:
        UserError: a number is not finite, or out of its range; or the warm-up is longer than the schedule.
    """
    _warms_up("cosine", total, warmup)
    _between("cycles", cycles, 0.0, math.inf)

    def factor(step: int) -> float:
        if step < warmup:
            return float(step) / float(max(1, warmup))
        progress = float(step - warmup) / float(max(1, total - warmup))
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * float(cycles) * 2.0 * progress)))

    return Schedule("cosine", total, _scaled(rate, factor))


def cosine_annealing(rate: Rates, total: int, *, minimum: float = 0.0) -> Schedule:
    """A decay along a cosine to a least rate: PyTorch's `CosineAnnealingLR(T_max=total, eta_min=minimum)`.

    Args:
        rate: the first learning rate, or one for each parameter group by name.
        total: the number of steps.
        minimum: the rate after the last step.

    Raises:
        UserError: a number is not finite, or out of its range.
    """
    check_whole("a schedule: total", total, 1)
    _between("minimum", minimum, 0.0, math.inf)

    values = {
        name: _Recurrence(first, partial(_annealed, first, total, minimum)) for name, first in _groups(rate).items()
    }
    return Schedule("cosine-annealing", total, values)


def step(rate: Rates, size: int, *, gamma: float = 0.1) -> Schedule:
    """The rate is multiplied by `gamma` every `size` steps: PyTorch's `StepLR(step_size=size, gamma=gamma)`.

    Args:
        rate: the first learning rate, or one for each parameter group by name.
        size: the number of steps of one rate.
        gamma: the factor.

    Raises:
        UserError: a number is not finite, or out of its range.
    """
    check_whole("a schedule: size", size, 1)
    _between("gamma", gamma, 0.0, math.inf)
    stages = {name: _Recurrence(first, lambda _, value: value * gamma) for name, first in _groups(rate).items()}
    return Schedule("step", None, {name: partial(_staged, stage, size) for name, stage in stages.items()})


def one_cycle(
    rate: Rates,
    total: int,
    *,
    rise: float = 0.3,
    divide: float = 25.0,
    final: float = 1e4,
    linear: bool = False,
    momenta: tuple[str, ...] = (),
    least: float = 0.85,
    most: float = 0.95,
) -> Schedule:
    """The rate rises and then decays below where it began, the momentum goes the other way: PyTorch's `OneCycleLR`.

    Args:
        rate: the largest learning rate, or one for each parameter group by name.
        total: the number of steps (`total_steps`).
        rise: the part of the steps in which the rate rises (`pct_start`).
        divide: the largest rate, divided by the first (`div_factor`).
        final: the first rate, divided by the last (`final_div_factor`).
        linear: whether the rate follows lines, and not cosines (`anneal_strategy`).
        momenta: the names of the hyperparameters that are momenta (`momenta_of`), or none to leave them alone.
        least: the momentum at the largest rate (`base_momentum`).
        most: the momentum at the beginning and at the end (`max_momentum`).

    Raises:
        UserError: a number is not finite, or out of its range; or the rise is no longer than a step.
    """
    check_whole("a schedule: total", total, 1)
    for name, value in (("divide", divide), ("final", final)):
        _between(name, value, 0.0, math.inf, open_at_zero=True)
    for name, value in (("rise", rise), ("least", least), ("most", most)):
        _between(name, value, 0.0, 1.0)
    top = float(rise * total) - 1
    if not 0 < top < total - 1:
        raise UserError(
            f"the schedule one-cycle has {total} steps, and {rise} of them leave too few to rise or to fall"
        )
    between = _on_line if linear else _on_cosine

    def phased(first: float, middle: float, last: float, step: int) -> float:
        if step <= top:
            return between(first, middle, (step - 0.0) / (top - 0.0))
        return between(middle, last, (step - top) / (total - 1 - top))

    values: dict[str, Callable[[int], float]] = {}
    for name, most_rate in _groups(rate).items():
        first = most_rate / divide
        values[name] = partial(phased, first, most_rate, first / final)
    values |= {name: partial(phased, most, least, most) for name in momenta}
    return Schedule("one-cycle", total, values)


class _Recurrence:
    """Values of which each is computed from the one before; the last is kept, so that the next takes no time."""

    def __init__(self, first: float, after: Callable[[int, float], float]) -> None:
        self._first, self._after = first, after
        self._step, self._value = 0, first

    def __call__(self, step: int) -> float:
        if step < self._step:
            self._step, self._value = 0, self._first
        while self._step < step:
            self._step += 1
            self._value = self._after(self._step, self._value)
        return self._value


def _annealed(first: float, total: int, minimum: float, step: int, value: float) -> float:
    """The rate of step `step` of a cosine annealing, whose rate of the step before is `value`."""
    if (step - 1 - total) % (2 * total) == 0:  # after the end, where the quotient would divide by zero
        return value + (first - minimum) * (1 - math.cos(math.pi / total)) / 2
    quotient = (1 + math.cos(math.pi * step / total)) / (1 + math.cos(math.pi * (step - 1) / total))
    return quotient * (value - minimum) + minimum


def _staged(stage: _Recurrence, size: int, step: int) -> float:
    return stage(step // size)


def _on_cosine(start: float, end: float, part: float) -> float:
    return end + (start - end) / 2.0 * (math.cos(math.pi * part) + 1)


def _on_line(start: float, end: float, part: float) -> float:
    return (end - start) * part + start


def _scaled(rate: Rates, factor: Callable[[int], float]) -> dict[str, Callable[[int], float]]:
    """Each rate times a factor of the step, as `torch.optim.lr_scheduler.LambdaLR` multiplies them."""

    def value(base: float, step: int) -> float:
        return base * factor(step)

    return {name: partial(value, base) for name, base in _groups(rate).items()}


def _groups(rate: Rates) -> dict[str, float]:
    """The learning rates by the names of their hyperparameters."""
    rates = dict(rate) if isinstance(rate, Mapping) else {"lr": rate}
    for name, value in rates.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UserError(f"a schedule: {name} is {value!r:.60}: it must be a finite number")
    return {name: float(value) for name, value in rates.items()}


def _warms_up(name: str, total: int, warmup: int) -> None:
    check_whole("a schedule: total", total, 1)
    check_whole("a schedule: warmup", warmup)
    if warmup > total:
        raise UserError(f"the schedule {name} has {total} steps, and a warm-up of {warmup} is longer")


def _between(name: str, value: object, low: float, high: float, *, open_at_zero: bool = False) -> None:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or not low <= value <= high
        or (open_at_zero and value == 0)
    ):
        least = "above 0" if open_at_zero else f"from {low:g}"
        raise UserError(
            f"a schedule: {name} is {value!r:.60}: it must be {least}{'' if math.isinf(high) else f' to {high:g}'}"
        )


def _is(hyper: str, name: str) -> bool:
    """Whether a hyperparameter is the one called `name`, of the only parameter group or of one of several."""
    base, _, group = hyper.rpartition("_")
    return hyper == name or (base == name and group.isdigit())
