"""Threads that share a session, or an artifact."""

from __future__ import annotations

import subprocess
import sys
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


def stacked(batch: Batch, steps: int) -> Batch:
    """The same batch for each of many steps."""
    return {name: np.stack([array] * steps) for name, array in batch.items()}


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


@pytest.mark.parametrize("device", ["local-task", "local-sync"])
def test_a_session_trains_while_others_are_opened(mlp_artifact, batches, device):
    """Each of IREE's instances would disturb the calls of other threads (`irongrad.runtime.vm_instance`)."""
    ended = threading.Event()
    losses: list[float] = []

    def train() -> None:
        session = Session(mlp_artifact, device=device)
        losses.extend(session.train_step(**batches[0]) for _ in range(2000))
        ended.set()

    def open_and_close() -> None:
        while not ended.is_set():
            Session(mlp_artifact, device=device).close()

    run_threads([train, open_and_close])
    assert losses == [float(loss) for loss in Session(mlp_artifact).train_steps(**stacked(batches[0], 2000))]


OPENED_BESIDE_A_CALL = """
import sys, threading, time
import numpy as np
from irongrad.runtime import load, vm_instance

session = load(sys.argv[1], device="local-sync")
batches = {name: np.stack([a] * 3000) for name, a in np.load(sys.argv[2]).items()}
ended, training = [], threading.Thread(target=lambda: ended.append(len(session.train_steps(**batches))))
training.start()
while training.is_alive() and session._module.lock.acquire(blocking=False):
    session._module.lock.release()
    time.sleep(0.001)
made = vm_instance.ireert.get_driver
vm_instance.ireert.get_driver = lambda name: (print("in a call:", not session._module.lock._is_owned()), made(name))[1]
load(sys.argv[1], device="local-task")
training.join()
print(ended)
"""


def test_a_driver_is_made_between_the_calls_of_a_session(mlp_artifact, batches, tmp_path):
    """A process of its own: drivers are made once."""
    np.savez(tmp_path / "batch.npz", **batches[0])
    command = [sys.executable, "-c", OPENED_BESIDE_A_CALL, str(mlp_artifact), str(tmp_path / "batch.npz")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (result.stdout, result.stderr) == ("in a call: False\nin a call: False\n[3000]\n", "")


def test_an_instance_that_something_keeps_is_no_leak():
    """nanobind prints what lives on at the end, as if it were our fault."""
    code = "import ctypes; from irongrad.runtime.vm_instance import _instances as i; "
    code += "ctypes.pythonapi.Py_IncRef(ctypes.py_object(i))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_close_waits_for_a_call(mlp_artifact, batches):
    session = Session(mlp_artifact)
    begun = threading.Event()

    def train() -> None:
        begun.set()
        assert len(session.train_steps(**stacked(batches[0], 3000))) == 3000

    def close() -> None:
        begun.wait()
        threading.Event().wait(0.01)
        session.close()

    run_threads([train, close])
