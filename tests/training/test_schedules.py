"""Schedules equal PyTorch's and transformers' own schedulers bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from transformers import optimization

from irongrad.runtime import Session
from irongrad.runtime.errors import UserError
from irongrad.training import schedules
from irongrad.training.schedules import Schedule

RATES = {"lr_0": 0.1, "lr_1": 3e-4, "lr_2": 1.0 / 3.0}
STEPS = 53

# The schedule of ours, and the scheduler of theirs for an optimizer.
CASES: dict[str, tuple[Schedule, Callable[[torch.optim.Optimizer], Any]]] = {
    "constant": (schedules.constant(RATES), optimization.get_constant_schedule),
    "constant with warm-up": (
        schedules.constant(RATES, warmup=7),
        lambda o: optimization.get_constant_schedule_with_warmup(o, 7),
    ),
    "linear": (schedules.linear(RATES, STEPS), lambda o: optimization.get_linear_schedule_with_warmup(o, 0, STEPS)),
    "linear with warm-up": (
        schedules.linear(RATES, STEPS, warmup=7),
        lambda o: optimization.get_linear_schedule_with_warmup(o, 7, STEPS),
    ),
    "only a warm-up": (
        schedules.linear(RATES, STEPS, warmup=STEPS),
        lambda o: optimization.get_linear_schedule_with_warmup(o, STEPS, STEPS),
    ),
    "cosine": (schedules.cosine(RATES, STEPS), lambda o: optimization.get_cosine_schedule_with_warmup(o, 0, STEPS)),
    "cosine with warm-up": (
        schedules.cosine(RATES, STEPS, warmup=7),
        lambda o: optimization.get_cosine_schedule_with_warmup(o, 7, STEPS),
    ),
    "cosine of many waves": (
        schedules.cosine(RATES, STEPS, warmup=3, cycles=2.25),
        lambda o: optimization.get_cosine_schedule_with_warmup(o, 3, STEPS, num_cycles=2.25),
    ),
    "cosine annealing": (
        schedules.cosine_annealing(RATES, STEPS),
        lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    ),
    "cosine annealing to a least rate": (
        schedules.cosine_annealing(RATES, STEPS, minimum=1e-5),
        lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS, eta_min=1e-5),
    ),
    "cosine annealing beyond its end": (
        schedules.cosine_annealing(RATES, 11, minimum=1e-5),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 11, eta_min=1e-5),
    ),
    "step": (schedules.step(RATES, 5), lambda o: lr_scheduler.StepLR(o, 5)),
    "step by a third": (schedules.step(RATES, 1, gamma=1 / 3), lambda o: lr_scheduler.StepLR(o, 1, gamma=1 / 3)),
    "one-cycle": (
        schedules.one_cycle(RATES, STEPS),
        lambda o: lr_scheduler.OneCycleLR(o, list(RATES.values()), STEPS, cycle_momentum=False),
    ),
    "one-cycle on lines": (
        schedules.one_cycle(RATES, STEPS, rise=0.45, divide=7.0, final=30.0, linear=True),
        lambda o: lr_scheduler.OneCycleLR(
            o, list(RATES.values()), STEPS, pct_start=0.45, div_factor=7.0, final_div_factor=30.0,
            anneal_strategy="linear", cycle_momentum=False,
        ),
    ),
}  # fmt: skip


def _optimizer(kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> torch.optim.Optimizer:
    return kind([{"params": [torch.zeros(1)], "lr": rate} for rate in RATES.values()], **options)


def _theirs(optimizer: torch.optim.Optimizer, scheduler: Any, key: Callable[[dict[str, Any]], float]) -> list[Any]:
    rows = []
    for _ in range(STEPS):
        rows.append([key(group) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return rows


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_the_rates_of_every_group_are_theirs_bit_for_bit(case: str) -> None:
    ours, make = CASES[case]
    optimizer = _optimizer()
    assert [list(ours(n).values()) for n in range(STEPS)] == _theirs(optimizer, make(optimizer), lambda g: g["lr"])
    assert list(ours(0)) == list(RATES)


@pytest.mark.parametrize(
    ("kind", "options", "key"),
    [
        (torch.optim.SGD, {"momentum": 0.9}, lambda g: g["momentum"]),
        (torch.optim.AdamW, {}, lambda g: g["betas"][0]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_one_cycle_moves_the_momentum_as_theirs(kind: Any, options: dict[str, float], key: Any) -> None:
    ours = schedules.one_cycle(RATES, STEPS, momenta=("beta1_0", "beta1_1", "beta1_2"))
    optimizer = _optimizer(kind, **options)
    rows = _theirs(optimizer, lr_scheduler.OneCycleLR(optimizer, list(RATES.values()), STEPS), key)
    assert [list(ours(n).values())[3:] for n in range(STEPS)] == rows


@pytest.mark.parametrize("case", CASES)
def test_a_schedule_depends_on_the_step_alone(case: str) -> None:
    ours, _ = CASES[case]
    forward = [ours(n) for n in range(STEPS)]
    assert [ours(n) for n in reversed(range(STEPS))] == forward[::-1]
    assert ours(STEPS - 1) == forward[-1]


def test_the_names_of_rates_and_momenta_come_from_the_artifact(session: Session) -> None:
    assert schedules.rates_of(session.manifest) == {"lr": 1e-2}
    assert schedules.rates_of(session.manifest, 0.5) == {"lr": 0.5}
    assert schedules.momenta_of(session.manifest) == ("beta1",)


def test_a_schedule_that_ends_before_training_is_refused() -> None:
    schedules.linear(0.1, 10).refuse_end_before(10)
    schedules.step(0.1, 10).refuse_end_before(10**9)
    with pytest.raises(UserError, match="the schedule linear ends after 10 steps, and training ends after 11"):
        schedules.linear(0.1, 10).refuse_end_before(11)


REFUSED: dict[str, tuple[Callable[[], Schedule], str]] = {
    "rate": (lambda: schedules.constant(float("nan")), "lr is nan: it must be a finite number"),
    "rate of a group": (lambda: schedules.constant({"lr_1": True}), "lr_1 is True: it must be a finite number"),
    "warm-up": (lambda: schedules.linear(0.1, 10, warmup=11), "has 10 steps, and a warm-up of 11 is longer"),
    "fraction": (lambda: schedules.constant(0.1, warmup=0.5), "warmup is 0.5: it must be a whole number"),  # type: ignore[arg-type]
    "total": (lambda: schedules.cosine(0.1, 0), "total is 0: it must be a whole number of 1 or more"),
    "gamma": (lambda: schedules.step(0.1, 3, gamma=-1), "gamma is -1: it must be from 0"),
    "divide": (lambda: schedules.one_cycle(0.1, 9, divide=0), "divide is 0: it must be above 0"),
    "rise": (lambda: schedules.one_cycle(0.1, 9, rise=2), "rise is 2: it must be from 0 to 1"),
    "short": (lambda: schedules.one_cycle(0.1, 3), "0.3 of them leave too few to rise"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_numbers_that_make_no_schedule_are_refused(case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        make()
