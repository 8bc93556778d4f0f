"""Which differentiable operators compile right: `./scripts/op_coverage --help`."""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import re
import sys
import time
from importlib.metadata import version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from irongrad.runtime.installed import PACKAGE

sys.path.insert(0, str(Path(__file__).parent))
from report import PACKAGES, page, passed, stages, worst
from worker import operators, serve

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"
console = Console()


class Worker:
    """A worker process with its current operator."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()
        self.name = ""
        self.sample = -1  # -1: all together
        self.deadline = 0.0

    def start(self, name: str, count: int, limit: float) -> None:
        """Begin with an operator."""
        self.name, self.sample = name, -1
        self.deadline = time.monotonic() + limit
        self.connection.send((name, count))

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()


def measure(names: list[str], count: int, jobs: int, limit: float, store: Path) -> None:
    """Run every operator of `names` in worker processes and append each outcome to `store`."""
    queue = list(reversed(names))
    workers = [Worker() for _ in range(min(jobs, len(names)))]
    with Progress(console=console) as progress:
        task = progress.add_task("operators", total=len(names))
        busy: list[Worker] = []
        for worker in workers:
            worker.start(queue.pop(), count, limit)
            busy.append(worker)
        while busy:
            ready = wait([w.connection for w in busy], timeout=1.0)
            for worker in list(busy):
                outcome = None
                if worker.connection in ready:
                    outcome = _receive(worker, limit)
                elif time.monotonic() > worker.deadline:
                    outcome = _ended(worker, "hang", f"over {limit:.0f} s")
                if outcome is None:
                    continue
                _append(store, {"name": worker.name, "samples": count, "sources": sources(), **outcome})
                progress.update(task, advance=1, description=f"{worker.name}: {outcome['verdict']}")
                busy.remove(worker)
                if outcome["verdict"] in ("crash", "hang"):
                    worker.stop()
                    worker = Worker()
                if queue:
                    worker.start(queue.pop(), count, limit)
                    busy.append(worker)
                else:
                    worker.connection.close()


def _receive(worker: Worker, limit: float) -> dict[str, Any] | None:
    try:
        message = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        worker.process.join()
        return _ended(worker, "crash", f"exit code {worker.process.exitcode}")
    if message[0] == "progress":
        worker.sample = message[1]
        worker.deadline = time.monotonic() + limit
        return None
    _, results, seconds = message
    verdicts, details = [v for v, _ in results], [d for _, d in results]
    return {"verdict": worst(verdicts), "verdicts": verdicts, "details": details, "seconds": round(seconds, 2)}


def _ended(worker: Worker, verdict: str, said: str) -> dict[str, Any]:
    """The outcome of an operator whose process is gone; of its other samples nothing is known."""
    return {"verdict": verdict, "verdicts": [verdict], "details": [f"sample {worker.sample}: {said}"], "seconds": 0.0}


def _append(store: Path, record: dict[str, Any]) -> None:
    with store.open("a") as file:
        file.write(json.dumps(record) + "\n")


def load(store: Path, count: int, *, any_sources: bool) -> dict[str, dict[str, Any]]:
    """The newest record of every operator at `count` samples, of these sources of IronGrad or of any."""
    if not store.exists():
        return {}
    records = [json.loads(line) for line in store.read_text().splitlines()]
    return {r["name"]: r for r in records if r["samples"] == count and (any_sources or r["sources"] == sources())}


@functools.cache
def sources() -> str:
    """A hash of what an outcome depends on: IronGrad's code, the measurement's, and the compilers' versions."""
    state = hashlib.sha256(" ".join(version(p) for p in PACKAGES).encode())
    for file in sorted([*PACKAGE.rglob("*.py"), Path(__file__).parent / "worker.py"]):
        state.update(file.read_bytes())
    return state.hexdigest()[:16]


@click.command()
@click.option("--ops", default="", help="a regular expression that the operator's name contains")
@click.option("--samples", default=8, show_default=True, help="sample inputs an operator")
@click.option("--jobs", default=2, show_default=True, help="worker processes")
@click.option("--limit", default=180.0, show_default=True, help="seconds an operator, or one sample, may take")
@click.option("--store", type=click.Path(path_type=Path), default=Path("build/op_coverage.jsonl"), show_default=True)
@click.option("--again", is_flag=True, help="also operators whose outcome is stored already")
@click.option("--resume", is_flag=True, help="keep outcomes that were measured with other sources of IronGrad")
@click.option("--failed", is_flag=True, help="as --resume, but measure again what did not pass")
@click.option("--verbose", is_flag=True, help="print what each failing operator said")
@click.option("--json", "as_json", is_flag=True, help="print the outcome as JSON")
def main(
    ops: str,
    samples: int,
    jobs: int,
    limit: float,
    store: Path,
    again: bool,
    resume: bool,
    failed: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Compile every differentiable operator of PyTorch's OpInfo database, and compare it with eager float64.

    Outcomes are stored as they come, so that a run which is stopped goes on where it was. A run over all operators
    writes docs/operators.md.
    """
    store.parent.mkdir(parents=True, exist_ok=True)
    names = [n for n in operators() if re.search(ops, n)]
    known = load(store, samples, any_sources=resume or failed)
    todo = [n for n in names if again or n not in known or (failed and known[n]["verdict"] != "pass")]
    if todo:
        measure(todo, samples, jobs, limit, store)
    records = {n: r for n, r in load(store, samples, any_sources=resume or failed).items() if n in names}
    if not ops:
        PAGE.write_text(page(records, samples))
    if as_json:
        print(json.dumps({"passed": passed(records), "stages": stages(records), "operators": records}))
    else:
        _print(records, verbose=verbose)


def _print(records: dict[str, dict[str, Any]], *, verbose: bool) -> None:
    table = Table("namespace", "pass", "of", "%", box=None)
    for name, (good, everything) in passed(records).items():
        table.add_row(name, str(good), str(everything), f"{100 * good / everything:.1f}")
    console.print(table)
    for stage, number in stages(records).items():
        failing = [n for n, r in records.items() if r["verdict"] == stage]
        console.print(f"{stage}: {number}: {' '.join(failing)}", highlight=False)
    for name, record in records.items() if verbose else ():
        if record["verdict"] != "pass":
            said = "\n".join(f"sample {i}: {v}: {d}" for i, (v, d) in enumerate(_samples(record)) if v != "pass")
            console.print(f"--- {name}\n{said[:3000]}", markup=False, highlight=False)


def _samples(record: dict[str, Any]) -> list[tuple[str, str]]:
    return list(zip(record["verdicts"], record["details"], strict=True))


if __name__ == "__main__":
    main()
