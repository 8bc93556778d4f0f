"""Fixtures of all tests; artifacts that many tests share are compiled once per test run."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from iree.runtime import system_setup
from torch import nn

import irongrad as ig
from irongrad.runtime import Session
from irongrad.runtime.devices import Device, find_device
from tests.fixtures.step_copies import twin_of

# Fixtures that several test folders share, one file per subject.
pytest_plugins = (
    "tests.fixtures.compiled_steps",
    "tests.fixtures.flower",
    "tests.fixtures.long_files_first",
    "tests.fixtures.ranks",
    "tests.fixtures.rewritten_graphs",
    "tests.fixtures.thinned",
)

# The steps here are small. A thread pool slows their eager runs down, several times over on a busy machine.
torch.set_num_threads(1)
# Tests patch the compiler, which no cache key covers. They must not touch the user's cache either.
os.environ["IRONGRAD_CACHE_SIZE"] = "0"

# This variable is set in the process of a test that runs alone.
_ALONE = "IRONGRAD_TEST_ALONE"


def make_mlp_step(hidden: int = 16, seed: int = 0) -> ig.TrainStep:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, hidden), nn.BatchNorm1d(hidden), nn.Tanh(), nn.Linear(hidden, 4))
    return ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        inputs={"x": torch.randn(6, 8), "y": torch.randint(0, 4, (6,))},
    )


@pytest.fixture(scope="session")
def mlp_step() -> ig.TrainStep:
    return make_mlp_step()


@pytest.fixture(scope="session")
def mlp_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with every entry point: an MLP with BatchNorm, cross-entropy and AdamW."""
    directory = tmp_path_factory.mktemp("artifacts") / "mlp"
    ig.compile(make_mlp_step(), directory)
    return directory


@pytest.fixture
def session(mlp_artifact: Path) -> Session:
    return Session(mlp_artifact)


@pytest.fixture
def batches() -> list[dict[str, np.ndarray]]:
    """Twenty batches for `mlp_artifact`."""
    rng = np.random.default_rng(0)
    return [
        {"x": rng.standard_normal((6, 8)).astype(np.float32), "y": rng.integers(0, 4, 6, dtype=np.int64)}
        for _ in range(20)
    ]


@pytest.fixture(scope="session")
def vulkan() -> Device:
    found = find_device("vulkan")
    assert found is not None, "these tests need a Vulkan device: apt-get install mesa-vulkan-drivers libvulkan1"
    return found


@pytest.fixture(scope="module", autouse=True)
def _close_vulkan_devices() -> Iterator[None]:
    """Close the Vulkan devices that the tests of a file opened.

    IREE waits for an open device in threads that, with Mesa 22.3.6, poll instead of sleep. They would take most of the
    CPU time from all later tests of the process. IREE keeps a device in its cache, and a session keeps it too.
    """
    yield
    opened = [uri for uri in system_setup._GLOBAL_DEVICES_BY_URI if uri.startswith("vulkan")]
    for uri in opened:
        del system_setup._GLOBAL_DEVICES_BY_URI[uri]
    if opened:
        gc.collect()


@pytest.fixture(scope="session")
def iree_run() -> Callable[[list[str]], subprocess.CompletedProcess[str]]:
    """Run iree-run-module, and run it again after a failure of the driver or of IREE that comes now and then.

    Mesa 22.3.6 loses the device in one of 20 to 60 processes on a busy machine (VK_ERROR_DEVICE_LOST, IREE's
    DATA_LOSS), before anything is computed. Rarely, a process with Mesa ends by a segmentation fault and says nothing.
    On local-task, one in 300 refused runs of IREE 3.13.0 hangs at exit (tests/runtime/test_iree_bugs.py).
    """
    segmentation_fault = 256 - signal.SIGSEGV  # as the tool's launcher returns it

    def run(arguments: list[str]) -> subprocess.CompletedProcess[str]:
        tool = shutil.which(arguments[0]) or str(Path(sys.executable).with_name(arguments[0]))
        for _ in range(3):
            try:
                result = subprocess.run([tool, *arguments[1:]], capture_output=True, text=True, check=False, timeout=60)
            except subprocess.TimeoutExpired:
                continue
            if "DATA_LOSS" not in result.stderr and result.returncode != segmentation_fault:
                return result
        pytest.fail(f"three runs of {arguments} did not end, crashed, or lost the device")

    return run


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Run a failed test again, alone in a new process, if it failed because the driver lost the device.

    The device stays lost for the rest of this process. Mesa 22.3.6 also loses it in the middle of a process: if two of
    IREE's threads signal a semaphore in quick succession, Mesa reports the device as lost (VK_ERROR_DEVICE_LOST from
    vkSignalSemaphore). A test that fails alone too stays a failure.
    """
    report = yield
    if report.failed and "VK_ERROR_DEVICE_LOST" in report.longreprtext and _ALONE not in os.environ:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", item.nodeid]
        for _ in range(3):
            alone = subprocess.run(
                command,
                cwd=item.config.rootpath,
                env=os.environ | {_ALONE: "1"},
                capture_output=True,
                text=True,
                check=False,
            )
            if alone.returncode == 0 or "VK_ERROR_DEVICE_LOST" not in alone.stdout:
                break
        report.sections.append(("the test alone, as the device was lost", alone.stdout))
        if alone.returncode == 0:
            skipped = (str(item.path), item.location[1], "passed in a process of its own, as the device was lost")
            report.outcome, report.longrepr = ("passed", None) if call.when == "call" else ("skipped", skipped)
    return report


@pytest.fixture(scope="session")
def trains_as_eager() -> Callable[..., None]:
    """`trains_as_eager(session, step, batches, ...)`: a reset session trains as eager float64 does.

    The loss of each batch of `x` and `y` must agree within `rtol`. The state after the last batch must agree within
    `state`, a relative and an absolute tolerance.
    """

    def check(
        session: Session,
        step: ig.TrainStep,
        batches: Iterable[Mapping[str, torch.Tensor]],
        *,
        rtol: float,
        state: tuple[float, float],
    ) -> None:
        twin = twin_of(step, torch.float64)
        session.reset()
        for batch in batches:
            loss = twin.loss(twin.model(batch["x"]), batch["y"])
            twin.optimizers[0].zero_grad()
            loss.backward()
            if twin.clip_grad_norm is not None:
                nn.utils.clip_grad_norm_(twin.model.parameters(), twin.clip_grad_norm)
            twin.optimizers[0].step()
            made = session.train_step(**{n: v.numpy() for n, v in batch.items()})
            np.testing.assert_allclose(made, loss.item(), rtol=rtol)
        found = session.state()
        for name, value in twin.model.state_dict().items():
            np.testing.assert_allclose(found[name], value.numpy(), rtol=state[0], atol=state[1], err_msg=name)

    return check
