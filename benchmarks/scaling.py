"""Several ranks on this machine: scaling beside torch's DDP, hidden communication, and the cost of being attached.

    python benchmarks/scaling.py [--batch 16] [--steps 30] [--rounds 3] [--delay 0.05] [--json]

The step is that of examples/gpt.py. Every rank computes with one thread; the first row is one process with two.

* *strong*: two ranks with half of the batch each, against one process with the whole batch;
* *weak*: two ranks with a whole batch each. Its efficiency is the time of one rank alone over that of two;
* *delay*: every all-reduce takes so many seconds more. What no computation could hide is what the same delays cost if
  all buckets were sent as they are ready and the network had room for all of them; the rest is *exposed*;
* *alone*: the step compiled without `communicate`, in turn with one that exchanges buckets of the default size but has
  no ranks attached, in one process.

It needs the extra `mpi`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from mpirun import results  # noqa: E402

LENGTH, BUCKET = 64, "256KiB"


def seconds_of(run: Callable[[], object], steps: int, rounds: int) -> float:
    """The median over rounds of the seconds of a step, after one round that is not counted."""
    found = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        for _ in range(steps):
            run()
        found.append((time.perf_counter() - begun) / steps)
    return statistics.median(found[1:])


class Delayed:
    """A communicator whose all-reduces take longer."""

    def __init__(self, ranks: Any, seconds: float) -> None:
        self._ranks, self.seconds = ranks, seconds
        self.started: list[float] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def start_sum(self, array: np.ndarray) -> Any:
        """Start an all-reduce that is complete after the delay at the earliest."""
        self.started.append(time.perf_counter())
        return _Later(self._ranks.start_sum(array), self.started[-1] + self.seconds)


class _Later:
    def __init__(self, request: Any, at: float) -> None:
        self._request, self._at = request, at

    def test(self) -> bool:
        return self._request.test() and time.perf_counter() >= self._at


def batch_of(size: int, seed: int) -> dict[str, np.ndarray]:
    """A batch of tokens."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 128, (size, LENGTH)) for name in ("x", "y")}


def ours(arguments: argparse.Namespace) -> dict[str, Any]:
    """One rank of ours: the seconds of a step, and what the exchange cost."""
    from mpi4py import MPI

    from irongrad.runtime import Session
    from irongrad.runtime.ranks.mpi import MpiCommunicator

    ranks = MpiCommunicator(MPI.COMM_WORLD)
    session = Session(arguments.artifact, device="local-sync" if arguments.threads == 1 else "local-task")
    batch = batch_of(arguments.batch, ranks.rank)
    if ranks.size == 1:
        return {"seconds": seconds_of(lambda: session.train_step(**batch), arguments.steps, arguments.rounds)}
    delayed = Delayed(ranks, 0.0)
    session.attach(delayed)
    plain = seconds_of(lambda: session.train_step(**batch), arguments.steps, arguments.rounds)
    found = {"seconds": plain, "buckets": list(session.manifest.exchange[""]), "megabytes": _megabytes(session)}
    if arguments.delay:
        found |= _with_delay(session, delayed, batch, arguments, plain)
    return found


def _megabytes(session: Any) -> float:
    return session.traffic.nbytes / session.traffic.steps / 1e6


def _with_delay(
    session: Any, delayed: Delayed, batch: dict[str, np.ndarray], arguments: argparse.Namespace, plain: float
) -> dict[str, Any]:
    """Compare a step with delays with what it would take at best, and with what they cost one after the other."""
    delayed.started.clear()
    begun = time.perf_counter()
    session.train_step(**batch)
    ready = [at - begun for at in delayed.started]
    delayed.seconds = arguments.delay
    slow = seconds_of(lambda: session.train_step(**batch), max(arguments.steps // 3, 3), arguments.rounds)
    last = max(ready)
    best = plain + max(0.0, max(at + arguments.delay for at in ready) - last)
    hideable = sum(min(arguments.delay, max(last - at, 0.0)) for at in ready)
    return {"delayed": slow, "best": best, "hideable": hideable, "exposed": max(slow - best, 0.0)}


def theirs(arguments: argparse.Namespace) -> dict[str, Any]:
    """One rank of torch's DDP over gloo, in eager mode."""
    import gpt
    import torch
    import torch.distributed as dist

    torch.set_num_threads(arguments.threads)
    rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    dist.init_process_group("gloo")
    step = gpt.make_step(batch=arguments.batch, length=LENGTH)
    (optimizer,) = step.optimizers
    model = torch.nn.parallel.DistributedDataParallel(step.model) if size > 1 else step.model
    batch = {n: torch.from_numpy(a) for n, a in batch_of(arguments.batch, rank).items()}

    def run() -> None:
        optimizer.zero_grad()
        step.loss(model(batch["x"]), batch["y"]).backward()
        torch.nn.utils.clip_grad_norm_(step.model.parameters(), 1.0)
        optimizer.step()

    found = seconds_of(run, arguments.steps, arguments.rounds)
    dist.destroy_process_group()
    return {"seconds": found}


def ranks_of(count: int, who: str, arguments: argparse.Namespace, **changed: Any) -> dict[str, Any]:
    """Start ranks and return what one of them found."""
    given = {**vars(arguments), "delay": 0.0, "who": who, **changed}
    names = ("who", "artifact", "batch", "steps", "rounds", "threads", "delay")
    found: dict[str, Any] = results(count, __file__, {name: given[name] for name in names})[0]
    return found


def compiled(directory: Path, batch: int, **options: Any) -> Path:
    """Compile the step for a batch."""
    import gpt

    import irongrad as ig

    ig.compile(gpt.make_step(batch=batch, length=LENGTH), directory, entry_points=["train_step"], **options)
    return directory


def cost_of_attachment(scratch: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """A step that could exchange, against one that cannot, in turn in one process."""
    from irongrad.runtime import Session

    sessions = [Session(scratch / name, device="local-sync") for name in ("plain", "large")]
    batch, pairs = batch_of(arguments.batch, 0), []
    for _ in range(arguments.rounds + 2):
        pairs.append([seconds_of(lambda s=s: s.train_step(**batch), max(arguments.steps // 3, 3), 1) for s in sessions])
    return {"ratio": statistics.median(b / a for a, b in pairs[1:])}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all parts."""
    with tempfile.TemporaryDirectory() as folder:
        scratch, batch = Path(folder), arguments.batch
        whole = compiled(scratch / "whole", batch, communicate=True, bucket_size=BUCKET)
        half = compiled(scratch / "half", batch // 2, communicate=True, bucket_size=BUCKET)
        compiled(scratch / "plain", batch)
        compiled(scratch / "large", batch, communicate=True)
        rows = {}
        for who in ("ours", "theirs"):
            one = ranks_of(1, who, arguments, artifact=whole, threads=2)["seconds"]
            single = ranks_of(1, who, arguments, artifact=whole, threads=1)["seconds"]
            strong = ranks_of(2, who, arguments, artifact=half, threads=1, batch=batch // 2)["seconds"]
            weak = ranks_of(2, who, arguments, artifact=whole, threads=1)
            rows[who] = {
                "one process, two threads": one,
                "one process, one thread": single,
                "strong, two ranks": strong,
                "weak, two ranks": weak["seconds"],
                "weak efficiency": single / weak["seconds"],
            }
        delayed = ranks_of(2, "ours", arguments, artifact=whole, threads=1, delay=arguments.delay)
        return {"seconds": rows, "delay": delayed, "alone": cost_of_attachment(scratch, arguments)}


def main() -> None:
    """Measure; or be one of the ranks that are measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay", type=float, default=0.05)
    parser.add_argument("--json", action="store_true")
    for hidden, kind in (("--who", str), ("--artifact", Path), ("--threads", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.who:
        print(json.dumps({"ours": ours, "theirs": theirs}[arguments.who](arguments)), flush=True)
        return
    found = measure(arguments)
    print(json.dumps(found, indent=2) if arguments.json else _table(found))


def _table(found: dict[str, Any]) -> str:
    lines = [f"{'':<28}{'ours':>12}{'DDP, gloo':>12}"]
    for name in found["seconds"]["ours"]:
        a, b = (found["seconds"][who][name] for who in ("ours", "theirs"))
        milliseconds = f"{a * 1e3:9.1f} ms{b * 1e3:9.1f} ms"
        lines.append(f"{name:<28}" + (f"{a:12.2f}{b:12.2f}" if "efficiency" in name else milliseconds))
    late = found["delay"]
    share = late["exposed"] / late["hideable"] if late["hideable"] else 0.0
    lines += [
        f"{len(late['buckets'])} buckets, {late['megabytes']:.1f} MB a step and rank",
        f"with delays {late['delayed'] * 1e3:.1f} ms, at best {late['best'] * 1e3:.1f} ms; "
        f"{share:.0%} of {late['hideable'] * 1e3:.1f} ms that could be hidden is exposed",
        f"a step that could exchange takes {found['alone']['ratio']:.3f} of one that cannot",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
