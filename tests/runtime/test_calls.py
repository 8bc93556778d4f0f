"""The policy of the thread that waits for a call."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from irongrad.runtime.calls import invoke


class Context:
    """Stands for IREE's context, which other tests run: notes the thread's policy while it runs `function`."""

    def __init__(self) -> None:
        self.policy = -1

    def invoke(self, function: Callable[[], None], arguments: object, results: object) -> None:
        self.policy = os.sched_getscheduler(0)
        function()


@pytest.mark.parametrize(
    ("driver", "during"), [("local-task", os.SCHED_BATCH), ("local-sync", os.SCHED_OTHER), ("cuda", os.SCHED_OTHER)]
)
def test_the_policy_is_another_only_while_workers_compute(driver, during):
    context = Context()
    invoke(context, driver, lambda: None, None, None)
    assert (context.policy, os.sched_getscheduler(0)) == (during, os.SCHED_OTHER)


def test_a_call_that_fails_gives_the_policy_back():
    def fail() -> None:
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        invoke(Context(), "local-task", fail, None, None)
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_a_policy_of_the_threads_own_stays():
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        invoke(Context(), "local-task", lambda: None, None, None)
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def test_a_sandbox_may_forbid_it(monkeypatch):
    def forbidden(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    context = Context()
    invoke(context, "local-task", lambda: None, None, None)
    assert context.policy == os.SCHED_OTHER
