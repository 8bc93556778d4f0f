"""Which differentiable operators compile right: `./scripts/op_coverage --help`."""

from __future__ import annotations

import json
import multiprocessing
import re
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
from worker import operators, serve

NAMESPACES = ("nn.functional", "linalg", "fft", "special", "masked")
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
                    outcome = {"verdict": "hang", "detail": f"sample {worker.sample}: over {limit:.0f} s"}
                if outcome is None:
                    continue
                _append(store, {"name": worker.name, "samples": count, **outcome})
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
        return {"verdict": "crash", "detail": f"sample {worker.sample}: exit code {worker.process.exitcode}"}
    if message[0] == "progress":
        worker.sample = message[1]
        worker.deadline = time.monotonic() + limit
        return None
    _, results, seconds = message
    bad = [(i, v, d) for i, (v, d) in enumerate(results) if v != "pass"]
    verdict = bad[0][1] if bad else "pass"
    if any(v == "wrong" for _, v, _ in bad):
        verdict = "wrong"
    detail = "\n".join(f"sample {i}: {v}: {d}" for i, v, d in bad)
    return {"verdict": verdict, "detail": detail, "failed": [i for i, _, _ in bad], "seconds": round(seconds, 2)}


def _append(store: Path, record: dict[str, Any]) -> None:
    with store.open("a") as file:
        file.write(json.dumps(record) + "\n")


def load(store: Path, count: int) -> dict[str, dict[str, Any]]:
    """The newest record of every operator at `count` samples."""
    if not store.exists():
        return {}
    records = [json.loads(line) for line in store.read_text().splitlines()]
    return {r["name"]: r for r in records if r["samples"] == count}


def namespace(name: str) -> str:
    """The namespace of an operator."""
    return next((n for n in NAMESPACES if name.startswith(f"{n}.")), "torch")


def summary(records: dict[str, dict[str, Any]]) -> tuple[dict[str, tuple[int, int]], Counter[str]]:
    """Passed and all by namespace, and how many failed at each stage."""
    spaces = {n: [r for k, r in records.items() if namespace(k) == n] for n in ("torch", *NAMESPACES)}
    passed = {n: (sum(r["verdict"] == "pass" for r in found), len(found)) for n, found in spaces.items()}
    return passed, Counter(r["verdict"] for r in records.values() if r["verdict"] != "pass")


@click.command()
@click.option("--ops", default="", help="a regular expression that the operator's name contains")
@click.option("--samples", default=8, show_default=True, help="sample inputs an operator")
@click.option("--jobs", default=2, show_default=True, help="worker processes")
@click.option("--limit", default=180.0, show_default=True, help="seconds an operator, or one sample, may take")
@click.option("--store", type=click.Path(path_type=Path), default=Path("build/op_coverage.jsonl"), show_default=True)
@click.option("--again", is_flag=True, help="also operators whose outcome is stored already")
@click.option("--failed", is_flag=True, help="only operators that did not pass when last measured")
@click.option("--verbose", is_flag=True, help="print what each failing operator said")
@click.option("--json", "as_json", is_flag=True, help="print the outcome as JSON")
def main(
    ops: str,
    samples: int,
    jobs: int,
    limit: float,
    store: Path,
    again: bool,
    failed: bool,
    verbose: bool,
    as_json: bool,
) -> None:
    """Compile every differentiable operator of PyTorch's OpInfo database, and compare it with eager float64."""
    store.parent.mkdir(parents=True, exist_ok=True)
    names = [n for n in operators() if re.search(ops, n)]
    known = load(store, samples)
    todo = [n for n in names if again or n not in known or (failed and known[n]["verdict"] != "pass")]
    if todo:
        measure(todo, samples, jobs, limit, store)
    records = {n: r for n, r in load(store, samples).items() if n in names}
    passed, stages = summary(records)
    if as_json:
        print(json.dumps({"passed": passed, "stages": stages, "operators": records}))
        return
    table = Table("namespace", "pass", "of", "%", box=None)
    for name, (good, everything) in passed.items():
        if everything:
            table.add_row(name, str(good), str(everything), f"{100 * good / everything:.1f}")
    console.print(table)
    for stage, number in stages.most_common():
        failing = [n for n, r in records.items() if r["verdict"] == stage]
        console.print(f"{stage}: {number}: {' '.join(failing)}", highlight=False)
    if verbose:
        for name, record in records.items():
            if record["verdict"] != "pass":
                console.print(f"--- {name}\n{record['detail'][:3000]}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
