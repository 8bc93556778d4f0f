"""Which real models compile, and agree with eager float64: `./scripts/models --help`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import track
from rich.table import Table
from zoo import MODELS

HERE = Path(__file__).parent
DOCS = HERE.parent.parent / "docs" / "models.md"
PACKAGES = ("torch", "torch-mlir", "iree-base-compiler", "transformers", "ultralytics")
console = Console()


def measure(name: str, limit: float) -> dict[str, Any]:
    """Compile one model in a process of its own."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, str(HERE / "one.py"), name, directory]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            return {"name": name, "verdict": "hang", "detail": f"over {limit:.0f} s"}
    if result.returncode != 0:
        return {"name": name, "verdict": "crash", "detail": result.stderr[-2000:]}
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def load(store: Path) -> dict[str, dict[str, Any]]:
    """The newest stored outcome of every model."""
    lines = store.read_text().splitlines() if store.exists() else []
    return {o["name"]: o for o in map(json.loads, lines)}


def document(outcomes: list[dict[str, Any]]) -> str:
    """The page docs/models.md."""
    versions = ", ".join(f"{p} {version(p)}" for p in PACKAGES)
    good = sum(o["verdict"] == "agrees" for o in outcomes)
    lines = [
        "# Real models",
        "",
        "`./scripts/models --write` writes this page. It compiles small configurations of real models with random",
        "weights, and trains them on random data for 2 or 3 steps. Dropout and stochastic depth are those of each",
        "configuration by default. The losses, gradients and state of the compiled step are compared with eager",
        "float64 ([artifact.md](artifact.md#numbers) explains how). The configurations are in `scripts/modelzoo/`.",
        "DETR and YOLOv8 get their matched targets as inputs. [techniques.md](techniques.md) says what becomes of",
        "parametrizations, averages of weights, schedulers and hooks.",
        "",
        f"{good} of {len(outcomes)} agree. Made with {versions}.",
        "",
        "| model | parameters | compile time, s | .vmfb, KiB | worst error, of what is allowed | verdict |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for o in outcomes:
        lines.append(_row(o))
    return "\n".join(lines) + "\n"


def _row(outcome: dict[str, Any]) -> str:
    start = f"| {outcome['name']} | {outcome.get('parameters', '')}"
    if outcome["verdict"] != "agrees":
        return f"{start} | | | | {outcome['verdict']}: {outcome['detail'].splitlines()[0][:160]} |"
    return f"{start} | {outcome['seconds']:.0f} | {outcome['kib']:.0f} | {outcome['worst']:.0%} | agrees |"


@click.command()
@click.option("--models", "pattern", default="", help="a regular expression that the model's name contains")
@click.option("--store", type=click.Path(path_type=Path), default=Path("build/models.jsonl"), show_default=True)
@click.option("--again", is_flag=True, help="also models whose outcome is stored already")
@click.option("--limit", default=900.0, show_default=True, help="seconds a model may take")
@click.option("--write", is_flag=True, help="write docs/models.md")
@click.option("--json", "as_json", is_flag=True, help="print the outcomes as JSON")
def main(pattern: str, store: Path, again: bool, limit: float, write: bool, as_json: bool) -> None:
    """Compile small configurations of real models, and compare 3 training steps with eager float64."""
    names = [n for n in MODELS if re.search(pattern, n)]
    store.parent.mkdir(parents=True, exist_ok=True)
    known = {} if again else load(store)
    for name in track([n for n in names if n not in known], "models", console=Console(stderr=True)):
        known[name] = measure(name, limit)
        with store.open("a") as file:
            file.write(json.dumps(known[name]) + "\n")
    outcomes = [known[n] for n in names]
    if write:
        DOCS.write_text(document(outcomes))
    if as_json:
        print(json.dumps(outcomes))
    else:
        table = Table("model", "seconds", "worst", "verdict", box=None)
        for o in outcomes:
            seconds, worst = (f"{o['seconds']:.0f}", f"{o['worst']:.0%}") if "worst" in o else ("", "")
            table.add_row(o["name"], seconds, worst, f"{o['verdict']} {o.get('detail', '')[-700:]}")
        console.print(table)
    if any(o["verdict"] != "agrees" for o in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
