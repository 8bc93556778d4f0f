"""IronGrad beside Inductor and XLA on the same training steps: kernels, bytes, intermediates, FLOP, times.

    python benchmarks/compare.py [--model ResNet-18] [--again] [--write]

Each model is compared as `irongrad compare --one-thread` does it. Finished models are kept in build/compare, so an
interrupted run goes on where it ended. `--write` writes docs/analysis.json and docs/compare.svg; it needs the extra
`benchmarks`. YOLOv8 needs what `./scripts/models` installs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STORE = ROOT / "build" / "compare"
DOCS = ROOT / "docs"
PEERS = ("irongrad", "inductor", "xla")
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "compare",
    "font.family": "sans-serif",
    "axes.spines.right": False,
    "axes.spines.top": False,
}

# Of examples/: the file and its arguments.
_EXAMPLES: dict[str, tuple[str, dict[str, object]]] = {
    "MLP": ("mlp", {"batch": 128, "hidden": 1024}),
    "ResNet-18": ("resnet18", {"batch": 16, "width": 32}),
    "LSTM": ("rnn", {"batch": 16, "length": 8, "width": 32}),
    "MoE": ("moe", {}),
    "GPT": ("gpt", {}),
}
# Of scripts/modelzoo/, which has small configurations of the models' own code.
_ZOO = ("BERT", "ViT", "MobileNetV2", "EfficientNet", "DETR", "YOLOv8")
MODELS = (*_EXAMPLES, *_ZOO)


def make_step(name: str) -> Any:
    """The training step of a model."""
    import torch

    torch.manual_seed(0)
    if name in _EXAMPLES:
        file, arguments = _EXAMPLES[name]
        sys.path.insert(0, str(ROOT / "examples"))
        return importlib.import_module(file).make_step(**arguments)
    sys.path.insert(0, str(ROOT / "scripts" / "modelzoo"))
    return importlib.import_module("zoo").MODELS[name]()


def measured(name: str, rounds: int, say: Callable[[str], object]) -> dict[str, Any]:
    """Compare one model, and keep the result."""
    from irongrad.cli.compare import as_dict
    from irongrad.peers.comparison import compare, differences

    found = compare(partial(make_step, name), PEERS, one_thread=True, rounds=rounds, say=say)
    result = as_dict(found, differences(found))
    STORE.mkdir(parents=True, exist_ok=True)
    (STORE / f"{name}.json").write_text(json.dumps(result))
    return result


def summary(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What docs/analysis.json holds: the sums of each model, without single kernels."""
    return {name: {**one, "columns": [_short(c) for c in one["columns"]]} for name, one in found.items()}


def _short(column: dict[str, Any]) -> dict[str, Any]:
    return {**column, "compiled": {k: v for k, v in column["compiled"].items() if k != "kernels"}}


def row(name: str, one: dict[str, Any]) -> str:
    """A row of the table of docs/analysis.md."""
    columns = {c["compiled"]["peer"]: c for c in one["columns"]}
    cells = (" / ".join(value(columns[p]) if p in columns else "-" for p in PEERS) for value in _CELLS)
    return f"| {name} | {' | '.join(cells)} |"


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.3g}"


_CELLS: tuple[Callable[[dict[str, Any]], str], ...] = (
    lambda c: f"{c['totals']['count']:,}",
    lambda c: _mebibytes(c["totals"]["bytes"]),
    lambda c: f"{c['totals']['intermediates']:,}",
    lambda c: _mebibytes(c["totals"]["intermediate_bytes"]),
    lambda c: _mebibytes(c["compiled"]["peak_bytes"]),
    lambda c: f"{c['compiled']['flops'] / 1e6:,.0f}",
    lambda c: f"{1e3 * c['cpu_seconds']:.1f}",
    lambda c: f"{c['compiled']['compile_seconds']:.0f}",
)


def draw(found: dict[str, dict[str, Any]], file: Path) -> None:
    """Four panels of bars: kernels, bytes, intermediates and CPU time of a step, as multiples of IronGrad's."""
    import matplotlib
    from matplotlib import pyplot

    panels: tuple[tuple[str, Callable[[dict[str, Any]], float]], ...] = (
        ("kernels", lambda c: c["totals"]["count"]),
        ("bytes read and written", lambda c: c["totals"]["bytes"]),
        ("bytes of intermediates", lambda c: c["totals"]["intermediate_bytes"]),
        ("CPU time of a step", lambda c: c["cpu_seconds"]),
    )
    with matplotlib.rc_context(STYLE):
        figure, all_axes = pyplot.subplots(1, len(panels), figsize=(9.6, 4.2), layout="constrained", sharey=True)
        for axes, (title, value) in zip(all_axes, panels, strict=True):
            for number, peer in enumerate(PEERS):
                places, lengths = [], []
                for place, one in enumerate(found.values()):
                    columns = {c["compiled"]["peer"]: c for c in one["columns"]}
                    if peer in columns and PEERS[0] in columns:
                        places.append(place + 0.27 * (number - 1))
                        lengths.append(value(columns[peer]) / value(columns[PEERS[0]]))
                axes.barh(places, lengths, height=0.25, label={"irongrad": "IronGrad"}.get(peer, peer))
            axes.set(title=title, xlabel="multiple of IronGrad's")
            if title.startswith("CPU"):  # from the same time to fifty times as long
                axes.set_xscale("log")
                axes.set_xlim(left=0.5)
            axes.title.set_fontsize("medium")
            axes.axvline(1, color="gray", linewidth=0.8)
            axes.set_yticks(range(len(found)), [*found])
        all_axes[0].invert_yaxis()
        figure.legend(*all_axes[0].get_legend_handles_labels(), frameon=False, loc="outside lower center", ncols=3)
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
        pyplot.close(figure)


def main() -> None:
    """Compare the chosen models, print a table, and write it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--again", action="store_true", help="also models that are kept already")
    parser.add_argument("--write", action="store_true", help="write docs/analysis.json and docs/compare.svg")
    options = parser.parse_args()
    names = options.model or MODELS
    found: dict[str, dict[str, Any]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            kept = STORE / f"{name}.json"
            if kept.exists() and not options.again:
                found[name] = json.loads(kept.read_text())
            else:
                say = partial(_say, progress, task, name)
                found[name] = measured(name, options.rounds, say)
            progress.advance(task)
    if options.write:
        (DOCS / "analysis.json").write_text(json.dumps(summary(found), indent=1) + "\n")
        draw(found, DOCS / "compare.svg")
    for name, one in found.items():
        print(row(name, one))
        for peer, why in one["missing"].items():
            print(f"{name}, {peer}: {why}", file=sys.stderr)


def _say(progress: Any, task: Any, name: str, text: str) -> None:
    progress.update(task, description=f"{name}: {text}")


if __name__ == "__main__":
    main()
