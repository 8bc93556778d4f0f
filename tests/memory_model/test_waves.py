"""What runs at the same time."""

from __future__ import annotations

from irongrad.memory_model.concurrent_kernels import waves_of
from irongrad.memory_model.kernel_steps import Step


def _step(*needs: Step) -> Step:
    return Step(None, frozenset(), (), frozenset(needs))


def test_a_step_runs_with_the_wave_after_it_unless_that_needs_it() -> None:
    first = _step()
    second = _step(first)
    other = _step()  # comes after `second`, and nothing needs it
    last = _step(second)
    waves = waves_of([first, second, other, last])
    assert waves == {first: 0, second: 1, other: 2, last: 2}


def test_what_an_early_step_computes_for_a_late_one_is_there_all_the_time() -> None:
    early, first = _step(), _step()
    second = _step(first)
    last = _step(second, early)
    assert waves_of([early, first, second, last]) == {early: 0, first: 0, second: 1, last: 2}


def test_nothing_runs_in_no_wave() -> None:
    assert waves_of([]) == {}
