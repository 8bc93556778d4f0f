"""Waves: the steps that IREE runs at the same time."""

from __future__ import annotations

from irongrad.memory_model.concurrent_kernels import waves_of
from irongrad.memory_model.kernel_steps import Step


def _step(*needs: Step) -> Step:
    return Step(None, frozenset(), (), frozenset(needs))


def test_a_step_joins_the_wave_after_it_unless_that_wave_needs_it() -> None:
    first = _step()
    second = _step(first)
    other = _step()  # comes after `second`, and nothing needs it
    last = _step(second)
    waves = waves_of([first, second, other, last])
    assert waves == {first: 0, second: 1, other: 2, last: 2}


def test_an_early_step_with_a_late_reader_stays_in_an_early_wave() -> None:
    early, first = _step(), _step()
    second = _step(first)
    last = _step(second, early)
    assert waves_of([early, first, second, last]) == {early: 0, first: 0, second: 1, last: 2}


def test_no_steps_give_no_waves() -> None:
    assert waves_of([]) == {}
