"""The commands of docs/scaling.md for federated clients: Flower's superlink and its supernodes, over loopback."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest

from irongrad.distributed.averaging import averaged
from irongrad.runtime import Session, load
from irongrad.runtime.safetensors_file import read_arrays
from irongrad.training import Arrays
from tests.docs.pages import blocks_of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "scaling.md"
SECONDS = 1200

pytestmark = pytest.mark.slow


def commands() -> list[str]:
    """The shell commands of the section: those that prepare, of the server, of two clients, and of the run."""
    section = PAGE.read_text().partition("## Federated clients")[2].partition("\n## ")[0]
    return [block.text for block in blocks_of(section) if block.kind == "sh"]


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


class Federation:
    """Flower's processes in a folder, which run the commands of the page on ports that are free."""

    def __init__(self, place: Path, python: Path) -> None:
        self.place = place
        self._ports = dict(zip(("8000", "9094", "9095"), free_ports(3), strict=True))
        path = os.pathsep.join([str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
        self._environment = {
            **os.environ,
            "PATH": path,
            "PYTHONPATH": str(ROOT),
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
        }
        self._processes: list[subprocess.Popen[str]] = []
        _, superlink, *self._supernodes, self._run = commands()
        self._start(superlink, "superlink")
        self._wait_for_superlink()

    def _start(self, command: str, log: str) -> subprocess.Popen[str]:
        for port, free in self._ports.items():
            command = re.sub(rf"\b{port}\b", str(free), command)
        with (self.place / f"{log}.log").open("w") as output:
            process = subprocess.Popen(
                ["bash", "-c", f"set -eu\n{command}"],
                cwd=self.place,
                env=self._environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )
        self._processes.append(process)
        return process

    def _wait_for_superlink(self) -> None:
        for _ in range(SECONDS):
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self._ports['8000']}/health") as reply:
                if reply.status == 200:
                    return
            time.sleep(1)
        raise AssertionError((self.place / "superlink.log").read_text())

    def join(self, client: int) -> subprocess.Popen[str]:
        """Start a supernode."""
        return self._start(self._supernodes[client], f"supernode{client}")

    def run(self, **config: object) -> subprocess.Popen[str]:
        """Begin a run of the example's app, whose output goes to `run.log`."""
        changed = self._run.replace(
            "strategy='fedavg' num-server-rounds=3", " ".join(f"{n}={v}" for n, v in config.items())
        )
        assert changed != self._run
        return self._start(changed, "run")

    def output(self) -> str:
        """What the run has printed so far, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", (self.place / "run.log").read_text())

    def wait_for(self, pattern: str) -> None:
        """Wait until the run has printed a pattern."""
        for _ in range(SECONDS):
            if re.search(pattern, self.output(), re.DOTALL):
                return
            time.sleep(1)
        raise AssertionError(f"no {pattern!r} in {self.output()}")

    def close(self) -> None:
        """End all processes, with those that Flower started in sessions of their own."""
        for process in self._processes:
            end(process.pid)
            process.wait(timeout=60)


def end(pid: int) -> None:
    """End a process and all that it started, children of children too."""
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(pid).children(recursive=True)
        for process in [psutil.Process(pid), *started]:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        for process in psutil.wait_procs(started, timeout=10)[1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the example's artifact and data, made by the page's first commands."""
    place = tmp_path_factory.mktemp("federated")
    (place / "examples").symlink_to(ROOT / "examples")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    subprocess.run(["bash", "-c", f"set -eu\n{commands()[0]}"], cwd=place, env=environment, check=True)
    return place


@pytest.fixture
def federation(place: Path, flower_python: Path) -> Iterator[Federation]:
    federation = Federation(place, flower_python)
    yield federation
    federation.close()


def by_hand(place: Path, rounds: int) -> dict[str, np.ndarray]:
    """FedAvg over a session for each client, which keeps its moments."""
    nodes: list[tuple[Session, Arrays]] = []
    for client in range(2):
        with np.load(place / "build" / "federated" / f"client{client}.npz") as file:
            nodes.append((load(place / "build" / "digits"), Arrays({n: file[f"train_{n}"] for n in ("x", "y")}, 32)))
    names = [s.name for s in averaged(nodes[0][0].manifest)]
    mean = {n: nodes[0][0].state()[n] for n in names}
    for number in range(rounds):
        for session, source in nodes:
            session.load_state({**session.state(), **mean})
            for (batch,) in source.epoch(number, 0):
                session.train_step(**batch)
        states = [session.state() for session, _ in nodes]
        mean = {n: np.mean([state[n] for state in states], axis=0) for n in names}
    return mean


def check_parameters(place: Path, expected: dict[str, np.ndarray]) -> None:
    made, _ = read_arrays(place / "build" / "global.safetensors")
    for name, array in expected.items():
        np.testing.assert_allclose(made[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def losses(output: str) -> Sequence[float]:
    return [float(loss) for loss in re.findall(r"Aggregated MetricRecord: \{'loss': ([\d.]+)\}", output)]


def test_two_supernodes_train_what_two_sessions_do(federation: Federation, place: Path) -> None:
    for client in range(2):
        federation.join(client)
    run = federation.run(**{"strategy": "'fedavg'", "num-server-rounds": 2, "fraction-evaluate": 0.0})
    assert run.wait(timeout=SECONDS) == 0, federation.output()
    assert federation.output().count("Received 2 results and 0 failures") == 2, federation.output()
    check_parameters(place, by_hand(place, 2))


@pytest.mark.parametrize("strategy", ["fedprox", "diloco"])
def test_the_other_strategies_train(strategy: str, federation: Federation) -> None:
    for client in range(2):
        federation.join(client)
    run = federation.run(strategy=f"'{strategy}'", **{"num-server-rounds": 3})
    assert run.wait(timeout=SECONDS) == 0, federation.output()
    found = losses(federation.output())
    assert len(found) == 6, federation.output()
    assert found[-1] < 0.7 * found[1]


def test_clients_join_and_leave_between_rounds(federation: Federation, place: Path) -> None:
    first = federation.join(0)
    federation.run(**{"strategy": "'fedavg'", "num-server-rounds": 50, "fraction-evaluate": 0.0, "least-clients": 1})
    federation.wait_for(r"out of 1\).*Received 1 results and 0 failures")
    federation.join(1)
    federation.wait_for(r"out of 2\).*Received 2 results and 0 failures")
    end(first.pid)
    federation.wait_for(r"out of 2\).*out of 1\).*Received 1 results and 0 failures")
    made, _ = read_arrays(place / "build" / "global.safetensors")
    assert all(np.isfinite(array).all() for array in made.values())
