"""Held-out loss against the bytes that each rank has sent, for every way to synchronise: the same samples for all.

    python benchmarks/sync_curves.py [--ranks 2] [--steps 400] [--json FILE] [--picture docs/sync.svg]

The model and the data are those of examples/digits.py. It needs the extras `mpi` and, for the picture, `benchmarks`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from mpirun import results  # noqa: E402

SYNCS = ("gradients", "local:10", "local:50", "diloco:50", "diloco:50:bf16", "diloco:50:int8")
EVERY = 50
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sync",
    "font.family": "sans-serif",
    "axes.spines.right": False,
    "axes.spines.top": False,
}


def rank(arguments: argparse.Namespace) -> list[tuple[float, float]]:
    """Train as one rank; the megabytes sent and the held-out loss at each evaluation."""
    import digits
    from mpi4py import MPI

    from irongrad.distributed import sync_of
    from irongrad.runtime import Session
    from irongrad.runtime.ranks.mpi import MpiCommunicator
    from irongrad.training import Arrays, Evaluation, train
    from irongrad.training.events import Evaluated

    session = Session(Path(arguments.artifact), device="local-sync")
    sync = sync_of(arguments.sync, MpiCommunicator(MPI.COMM_WORLD))
    data, held_out = digits.load_digits()
    batches = [{n: a[i : i + digits.BATCH] for n, a in held_out.items()} for i in range(0, 320, digits.BATCH)]
    found: list[tuple[float, float]] = []

    def note(event: object) -> None:
        if isinstance(event, Evaluated):
            sent = session.traffic.nbytes if arguments.sync == "gradients" else sync.nbytes
            found.append((sent / 1e6, event.loss))

    train(
        session,
        Arrays(data, digits.BATCH),
        steps=arguments.steps,
        evaluation=Evaluation(batches, every=EVERY),
        sync=sync,
        callbacks=[note],
    )
    session.close()
    return found


def curve(arguments: argparse.Namespace, artifact: Path, sync: str) -> list[tuple[float, float]]:
    """What one of the ranks found."""
    options = {"rank": True, "artifact": artifact, "sync": sync, "steps": arguments.steps}
    found: list[tuple[float, float]] = results(arguments.ranks, __file__, options)[0]
    return found


def draw(curves: dict[str, list[tuple[float, float]]], ranks: int, file: Path) -> None:
    """One curve for each way to synchronise, with a point for each evaluation."""
    import matplotlib
    from matplotlib import pyplot

    with matplotlib.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
        for sync, points in curves.items():
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, label=sync)
        axes.set(xscale="log", yscale="log", xlabel="sent by each rank, MB", ylabel="held-out loss")
        axes.grid(alpha=0.3)
        axes.set_yticks([0.04, 0.06, 0.1, 0.2, 0.4])
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter("")
        figure.legend(frameon=False, title=f"{ranks} ranks, --sync", loc="outside right center")
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)
        pyplot.close(figure)


def main() -> None:
    """Train in every way; or be one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", type=Path, help="write all points to this file")
    parser.add_argument("--picture", type=Path, help="draw the curves into this file, such as an SVG")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    for hidden in ("--artifact", "--sync"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        print(json.dumps(rank(arguments)), flush=True)
        return
    import digits

    import irongrad as ig

    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "digits"
        ig.compile(digits.make_step(), artifact, communicate=True)
        curves: dict[str, Any] = {sync: curve(arguments, artifact, sync) for sync in SYNCS}
    for sync, points in curves.items():
        print(f"{sync:<16}{points[-1][0]:10.2f} MB  held-out loss {points[-1][1]:.4f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(curves, indent=1))
    if arguments.picture:
        draw(curves, arguments.ranks, arguments.picture)


if __name__ == "__main__":
    main()
