"""Batches that are read in advance: the same, in the same order, and no more of them than asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from irongrad.runtime import Session
from irongrad.runtime.errors import GuardError, UserError
from irongrad.training import Arrays, Prefetched, Stream, train
from irongrad.training.events import Stepped


class Counted:
    """Twenty batches, and how many were read."""

    def __init__(self, *, broken_at: int = 20) -> None:
        self.read, self.broken_at = 0, broken_at

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for number in range(20):
            if number == self.broken_at:
                raise OSError("the disk is gone")
            self.read += 1
            yield {"x": np.full(3, number)}


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


def readers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("irongrad-prefetch")]


@pytest.mark.parametrize("ahead", [1, 3, 50])
def test_the_batches_are_those_of_the_source(ahead: int) -> None:
    arrays = {"x": np.arange(60), "y": np.arange(60) * 2}
    source, same = (Arrays(arrays, 4, accumulate=2, seed=5) for _ in range(2))
    prefetched = Prefetched(source, ahead)
    assert (prefetched.steps, prefetched.order) == (same.steps, same.order)
    for epoch, start in ((0, 0), (1, 3)):
        for ours, theirs in zip(prefetched.epoch(epoch, start), same.epoch(epoch, start), strict=True):
            np.testing.assert_equal(ours, theirs)


def test_no_more_is_read_than_asked_for() -> None:
    batches = Counted()
    steps = Prefetched(Stream(batches), 3).epoch(0, 0)
    for number, _ in enumerate(steps, 1):
        wait_for(lambda n=number: batches.read >= min(n + 3, 20))
        assert batches.read <= number + 3
    assert batches.read == 20
    assert not readers()


def test_an_error_is_raised_at_its_step() -> None:
    steps = Prefetched(Stream(Counted(broken_at=7)), 3).epoch(0, 0)
    assert [next(steps)[0]["x"][0] for _ in range(7)] == list(range(7))
    with pytest.raises(OSError, match="the disk is gone"):
        next(steps)
    assert not readers()


def test_an_end_before_the_data_is_over_ends_the_reader() -> None:
    steps = Prefetched(Stream(Counted()), 2).epoch(0, 0)
    next(steps)
    assert readers()
    steps.close()  # type: ignore[attr-defined]
    assert not readers()


def test_training_is_the_same_to_the_bit(
    mlp_artifact: Any, session: Session, batches: list[dict[str, np.ndarray]]
) -> None:
    losses: dict[int, list[float]] = {}
    for prefetch, one in ((0, session), (2, Session(mlp_artifact))):
        seen = losses.setdefault(prefetch, [])
        result = train(
            one, batches, epochs=2, prefetch=prefetch,
            callbacks=[lambda e, seen=seen: seen.append(e.loss) if isinstance(e, Stepped) else None],
        )  # fmt: skip
        assert result.step == 40
    assert losses[0] == losses[2]
    with pytest.raises(GuardError, match="x is 2-dimensional|expected"):
        train(session, [{"x": np.zeros(3), "y": np.zeros(3)}], epochs=1, prefetch=2)
    assert not readers()


@pytest.mark.parametrize("prefetch", [-1, 1.5, True, "2"])
def test_a_number_of_steps_that_is_none_is_refused(session: Session, prefetch: Any) -> None:
    with pytest.raises(UserError, match="prefetch is .*: it must be a whole number of 0 or more"):
        train(session, [], epochs=1, prefetch=prefetch)
