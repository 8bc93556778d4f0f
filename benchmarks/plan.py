"""`irongrad plan` against what ranks on this machine take, with a network that is made slow.

    python benchmarks/plan.py [--ranks 1 2 4] [--bandwidth 200Mbit] [--latency 10ms] [--batch 2] [--json]

The step is that of examples/gpt.py, with one thread a rank. The ranks exchange over MPI, and an exchange is complete no
sooner than on the network of the plan: it waits for the link, occupies it, and then for the latency. Ranks share the
cores of this machine, so as many processes make a plan at once.

It needs the extra `mpi`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

from mpirun import results  # noqa: E402
from scaling import batch_of, compiled, seconds_of  # noqa: E402

from irongrad.distributed.plan import Network, bandwidth_in, latency_in  # noqa: E402

SYNCS = ("gradients", "diloco:10", "local:10:int8")


class Slow:
    """A communicator on a slow network."""

    def __init__(self, ranks: Any, network: Network) -> None:
        self._ranks, self._network = ranks, network
        self._free = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def start_sum(self, array: np.ndarray) -> Any:
        """Start an all-reduce that is complete no sooner than the network allows."""
        latency, link = self._network.all_reduce(array.nbytes, self._ranks.size)
        self._free = max(self._free, time.perf_counter()) + link
        return _Later(self._ranks.start_sum(array), self._free + latency)

    def gather(self, row: np.ndarray) -> np.ndarray:
        """Gather rows, no sooner than the network allows."""
        latency, link = self._network.all_gather(row.nbytes, self._ranks.size)
        until = time.perf_counter() + latency + link
        rows = self._ranks.gather(row)
        time.sleep(max(until - time.perf_counter(), 0.0))
        return rows


class _Later:
    def __init__(self, request: Any, at: float) -> None:
        self._request, self._at = request, at

    def test(self) -> bool:
        return self._request.test() and time.perf_counter() >= self._at


def rank(arguments: argparse.Namespace) -> dict[str, float]:
    """One rank: the seconds of a step, and the peak resident memory."""
    from mpi4py import MPI

    from irongrad.distributed.sync_text import sync_of
    from irongrad.runtime import Session
    from irongrad.runtime.ranks.mpi import MpiCommunicator

    ranks: Any = MpiCommunicator(MPI.COMM_WORLD)
    session = Session(Path(arguments.artifact), device="local-sync")
    batch = batch_of(arguments.batch, ranks.rank)
    if ranks.size > 1:
        ranks = Slow(ranks, Network(bandwidth_in(arguments.bandwidth), latency_in(arguments.latency)))
    sync = sync_of(arguments.sync, ranks)
    sync.begin(session, {})
    steps = iter(range(10**9))

    def run() -> None:
        session.train_step(**batch)
        sync.after_step(next(steps), due=False)

    run()
    seconds = seconds_of(run, 10, 3)
    status = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    session.close()
    return {"seconds": seconds, "memory": peak}


def measured(arguments: argparse.Namespace, artifact: Path, count: int, sync: str) -> dict[str, float]:
    """What the ranks take, in the middle."""
    network = {name: getattr(arguments, name) for name in ("batch", "bandwidth", "latency")}
    found = results(count, __file__, {"rank": True, "artifact": artifact, "sync": sync, **network})
    return {name: statistics.median(one[name] for one in found) for name in ("seconds", "memory")}


def predicted(arguments: argparse.Namespace, artifact: Path, count: int, sync: str) -> dict[str, Any]:
    """The last row of `irongrad plan`, which as many processes make at once as ranks share the cores."""
    command = [sys.executable, "-m", "irongrad", "plan", str(artifact), "--machines", str(count), "--sync", sync]
    command += ["--bandwidth", arguments.bandwidth, "--latency", arguments.latency, "--device", "local-sync", "--json"]
    plans = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(count)]
    rows = [json.loads(plan.communicate()[0])["predictions"][-1] for plan in plans]
    return {name: statistics.median(row[name] for row in rows) for name in ("seconds", "memory")}


def main() -> None:
    """Compare; or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--bandwidth", default="200Mbit")
    parser.add_argument("--latency", default="10ms")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    for hidden in ("--artifact", "--sync"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        print(json.dumps(rank(arguments)), flush=True)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        artifact = compiled(Path(folder) / "net", arguments.batch, communicate=True, bucket_size="256KiB")
        for sync in SYNCS:
            for count in arguments.ranks:
                plan, took = predicted(arguments, artifact, count, sync), measured(arguments, artifact, count, sync)
                rows.append({"sync": sync, "ranks": count, "plan": plan, "measured": took})
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    print(
        f"{'':<16}{'ranks':>6}{'plan, ms':>11}{'measured':>10}{'ratio':>7}{'plan, MiB':>11}{'measured':>10}{'ratio':>7}"
    )
    for row in rows:
        cells = "".join(
            f"{row['plan'][name] / unit:11.1f}{row['measured'][name] / unit:10.1f}"
            f"{row['plan'][name] / row['measured'][name]:7.2f}"
            for name, unit in (("seconds", 1e-3), ("memory", 2**20))
        )
        print(f"{row['sync']:<16}{row['ranks']:>6}{cells}")


if __name__ == "__main__":
    main()
