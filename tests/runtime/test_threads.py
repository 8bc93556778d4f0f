"""Threads that share a session, or an artifact."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import irongrad as ig
from irongrad.runtime import Session
from irongrad.runtime.manifest import STEPS
from tests.conftest import make_mlp_step

Batch = dict[str, np.ndarray]


def run_threads(works: list[Callable[[], None]]) -> None:
    """Run each in a thread of its own; re-raise the first error."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def mixed_calls(directory: Path, device: str, batch: Batch, calls: int) -> None:
    """Eight threads train, predict, evaluate and export one session's state; then every step must have counted."""
    session = Session(directory, device=device)
    losses: list[float] = []

    def train() -> None:
        for _ in range(calls):
            losses.append(session.train_step(**batch))

    def look() -> None:
        for number in range(calls):
            session.predict(x=batch["x"])
            session.eval_step(**batch)
            if number % 50 == 0:
                session.state()

    run_threads([train, train, train, train, look, look, look, look])
    assert int(session.state()[STEPS]) == 4 * calls
    alone = Session(directory, device=device)
    # Every step is on the same batch, so any serial order gives the same losses.
    assert sorted(losses) == sorted(alone.train_step(**batch) for _ in range(4 * calls))
    session.close()


@pytest.mark.parametrize("device", ["local-task", "local-sync"])
def test_threads_that_share_a_session_lose_no_update(mlp_artifact, batches, device):
    mixed_calls(mlp_artifact, device, batches[0], 60)


@pytest.mark.slow
def test_threads_that_share_a_session_on_a_gpu_lose_no_update(vulkan, batches, tmp_path):
    ig.compile(make_mlp_step(), tmp_path / "mlp", target="vulkan")
    mixed_calls(tmp_path / "mlp", vulkan.uri, batches[0], 60)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["local-task", "local-sync"])
def test_eight_threads_of_a_thousand_calls_twenty_times(mlp_artifact, batches, device):
    for _ in range(20):
        mixed_calls(mlp_artifact, device, batches[0], 1000)


@pytest.mark.parametrize("device", ["local-task", "local-sync"])
def test_sessions_of_their_own_do_not_disturb_each_other(mlp_artifact, batches, device):
    expected = [Session(mlp_artifact, device=device).train_step(**batches[0])]
    found: list[float] = []

    def work() -> None:
        with Session(mlp_artifact, device=device) as session:
            found.append(session.train_step(**batches[0]))
            for batch in batches:
                session.train_step(**batch)

    run_threads([work] * 8)
    assert found == expected * 8


def test_close_waits_for_a_call(mlp_artifact, batches):
    session = Session(mlp_artifact)
    stacked = {n: np.stack([batches[0][n]] * 3000) for n in batches[0]}
    begun = threading.Event()

    def train() -> None:
        begun.set()
        assert len(session.train_steps(**stacked)) == 3000

    def close() -> None:
        begun.wait()
        threading.Event().wait(0.01)
        session.close()

    run_threads([train, close])
