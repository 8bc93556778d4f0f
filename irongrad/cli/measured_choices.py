"""What `--tune` measured and chose, for people."""

from __future__ import annotations

from rich.table import Table

from irongrad.cli.common import console
from irongrad.runtime.manifest import TUNED, ChoiceSpec, Manifest, TuningSpec


def print_tuning(manifest: Manifest) -> None:
    """Print the choices of a tuned artifact, and what was measured for them; nothing without `--tune`."""
    choices = {(c.target, c.what): c for c in manifest.tuned}.values()  # functions with equal computations share a row
    if choices:
        table = Table("what", "chosen", "ms", box=None)
        for choice in choices:
            mark = " *" if choice.default not in ("", choice.chosen) else ""
            table.add_row(choice.what, f"{choice.chosen}{mark}", _times(choice))
        console.print(table)
    for what, form, why in dict.fromkeys((c.what, form, why) for c in choices for form, why in c.failed.items()):
        console.print(f"{what}: the form {form!r} failed, and is left out: {why}", highlight=False)
    if manifest.tuning is not None:
        console.print(_summary(manifest.tuning), highlight=False)


def _times(choice: ChoiceSpec) -> str:
    """The milliseconds of each form, fastest first."""
    times = sorted(choice.seconds.items(), key=lambda item: item[1])
    return ", ".join(f"{name} {1e3 * value:.3g}" for name, value in times)


def _summary(tuning: TuningSpec) -> str:
    if not tuning.measured and not tuning.left_out:
        return "not tuned: no product, convolution or attention of known sizes here has several forms"
    text = f"tuned within {tuning.budget} s: {tuning.measured} computations measured"
    if tuning.left_out:
        text += f", {tuning.left_out} not, for lack of time: they have their default forms"
    if tuning.step is None:
        return f"{text}; all default forms stay"
    step = tuning.step
    times = f"{1e3 * step.tuned:.3g} ms tuned, {1e3 * step.untuned:.3g} ms untuned"
    kept = "the tuned forms are kept" if tuning.kept == TUNED else "no clear gain, so the default forms stay"
    return f"{text}; a step takes {times}, in turn {step.ratio:.3f}, at most {step.bound:.3f} of the time: {kept}"
