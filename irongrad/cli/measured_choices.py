"""What `--tune` measured and chose, for people."""

from __future__ import annotations

from rich.table import Table

from irongrad.cli.common import console
from irongrad.runtime.manifest import TUNED, UNTUNED, Manifest, TuningSpec


def print_tuning(manifest: Manifest) -> None:
    """Print the choices of a tuned artifact, and what was measured for them; nothing without `--tune`."""
    if manifest.tuned:
        console.print(_table(manifest))
    if manifest.tuning is not None:
        console.print(_summary(manifest.tuning), highlight=False)


def _summary(tuning: TuningSpec) -> str:
    text = f"tuned within {tuning.budget} s: {tuning.measured} computations measured"
    if tuning.left_out:
        text += f", {tuning.left_out} not, for lack of time: they have their default forms"
    if not tuning.step:
        return f"{text}; all default forms stay"
    tuned, untuned = (f"{1e3 * tuning.step[name]:.3g} ms" for name in (TUNED, UNTUNED))
    outcome = "the tuned forms are kept" if tuning.kept == TUNED else "that is no faster, so the default forms stay"
    return f"{text}; a step takes {tuned} tuned, {untuned} untuned: {outcome}"


def _table(manifest: Manifest) -> Table:
    """What was measured, the chosen form, and the milliseconds of each form, fastest first.

    Functions with the same computation share one row. A form that differs from the default is marked.
    """
    table = Table("what", "chosen", "ms", box=None)
    for choice in {(c.target, c.what): c for c in manifest.tuned}.values():
        times = sorted(choice.seconds.items(), key=lambda item: item[1])
        mark = " *" if choice.default not in ("", choice.chosen) else ""
        milliseconds = ", ".join(f"{name} {1e3 * value:.3g}" for name, value in times)
        table.add_row(choice.what, f"{choice.chosen}{mark}", milliseconds)
    return table
