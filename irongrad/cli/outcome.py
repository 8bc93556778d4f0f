"""The report of `irongrad compile`, in the same words if the artifact comes from the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from shlex import quote
from typing import TYPE_CHECKING, Any

from rich.table import Table

from irongrad.cli.common import console, print_unjudged
from irongrad.cli.measured_choices import print_tuning
from irongrad.runtime.byte_sizes import readable
from irongrad.runtime.cpu import multiplies_bfloat16
from irongrad.runtime.manifest import OF_BASE

if TYPE_CHECKING:
    from pathlib import Path

    from irongrad.pipeline.build_run import Build
    from irongrad.runtime.manifest import Manifest, TargetSpec


@dataclass(frozen=True)
class Outcome:
    """The outcome of a compilation.

    Attributes:
        summary: the JSON that `--json` prints.
        files: the user's source files that the artifact depends on.
        manifest: the manifest of the written artifact; None if none was written.
        unrecorded: why the next run cannot take the result from the cache, a verb with its object; empty if it can.
    """

    summary: dict[str, Any]
    files: list[str]
    manifest: Manifest | None
    unrecorded: str = ""


def summary_of(build: Build) -> dict[str, Any]:
    """The JSON that `--json` prints for a build."""
    result: dict[str, Any] = {"seconds": build.seconds, "passes": [asdict(r) for r in build.passes], "output": None}
    result["cached"] = build.cached
    result["predicted"] = build.memory.predicted if build.memory else {}
    result["limits"] = build.memory.limits if build.memory else {}
    if (artifact := build.artifact) is not None:
        result["output"] = str(artifact.directory)
        result["targets"] = {
            t.name: {
                "bytes": artifact.manifest.files[t.file].size,
                "worst": t.certificate.worst if t.certificate else None,
                "unjudged": t.certificate.unjudged if t.certificate else (),
                "skipped": artifact.reports[t.name].skipped if t.name in artifact.reports else (),
                "statistics": asdict(build.statistics[t.name]),
            }
            for t in artifact.manifest.targets
        }
    return result


def print_outcome(outcome: Outcome, output: Path, *, pass_report: bool) -> None:
    """Print an outcome for people."""
    summary = outcome.summary
    if pass_report:
        _print_passes(summary["passes"])
    table = Table("stage", "seconds", box=None)
    for name, value in summary["seconds"].items():
        table.add_row(name, f"{value:.2f}")
    console.print(table)
    if outcome.manifest is None:
        console.print("stopped as asked; no artifact was written")
        return
    if summary["cached"]:
        console.print("nothing has changed since it was compiled; it comes from the cache")
    if outcome.unrecorded:
        console.print(f"the step must run again the next time, because it {outcome.unrecorded}", highlight=False)
    print_tuning(outcome.manifest)
    _print_base(outcome.manifest, output)
    for target in outcome.manifest.targets:
        _print_target(target, summary, output, is_half=outcome.manifest.precision == "bf16")
    page = output.with_name(f"{output.name}.html")
    first = "" if find_spec("plotly") else "pip install 'irongrad[report]' && "
    report = f"irongrad report {quote(str(output))} -o {quote(str(page))}"
    console.print(f"see it: {first}{report}", highlight=False, soft_wrap=True)


def _print_passes(records: Sequence[Mapping[str, Any]]) -> None:
    table = Table("pass", "function", "nodes", "", "ms", box=None)
    for record in records:
        if record["changed"]:
            before, after = record["nodes"]
            counts = ", ".join(f"{name} {count}" for name, count in record["stats"].items())
            milliseconds = f"{record['seconds'] * 1000:.0f}"
            table.add_row(record["name"], record["function"], f"{before} to {after}", counts, milliseconds)
    console.print(table)


def _print_base(manifest: Manifest, output: Path) -> None:
    """Print what lies in the base file, and what does not."""
    spec = manifest.base_file
    if spec is None:
        return
    # numpy is not imported for every verb.
    from irongrad.runtime.base_file import read_base
    from irongrad.runtime.parameter_archive import ALIGNMENT
    from irongrad.runtime.parameter_files import is_aligned

    path = output / spec.path
    shared = read_base(manifest, path)
    text = f"base {path}: {readable(sum(a.nbytes for a in shared.values()))} in {len(shared)} tensors"
    if left := [s.name for s in manifest.state if s.frozen and s.role in OF_BASE and s.name not in shared]:
        more = f" and {len(left) - 4} more" if left[4:] else ""
        text += f"; not in it, so in the artifact: {', '.join(left[:4])}{more}"
    console.print(text, highlight=False, soft_wrap=True)
    copied = sum(a.nbytes for a in shared.values() if not is_aligned(a))
    if copied and spec.format != "irpa":
        console.print(
            f"each process copies {readable(copied)} of it, because these tensors do not begin at a multiple of "
            f"{ALIGNMENT} bytes in the file. Processes share the whole of a base whose name ends in .irpa",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )


def _print_target(target: TargetSpec, summary: Mapping[str, Any], output: Path, *, is_half: bool) -> None:
    about = summary["targets"][target.name]
    if target.certificate is not None:
        note = (
            f"verified: {target.certificate.steps} steps against eager {target.certificate.oracle}, worst error "
            f"{target.certificate.worst:.0%} of what is allowed"
        )
    else:
        note = "not verified: it cannot run here; run 'irongrad verify' on the device"
    console.print(f"{output / target.file}: {about['bytes'] / 1024:.0f} KiB, {note}", highlight=False)
    print_unjudged(target.certificate.unjudged if target.certificate is not None else ())
    if is_half and target.architecture and not multiplies_bfloat16(target.architecture, target.features):
        console.print(
            f"{target.name} is for a CPU without instructions for bfloat16: products are computed in float32, so a "
            "step takes no less time than with --precision f32",
            style="yellow",
            highlight=False,
            soft_wrap=True,
        )
    for text in about.get("skipped", ()):
        console.print(f"not compared at {text}", highlight=False)
    counts = about["statistics"]
    each = ", ".join(f"{name} {dispatches}" for name, dispatches in counts["by_function"].items())
    console.print(
        f"dispatches: {counts['dispatches']} ({each}) of {counts['kernels']} kernels, on {target.device}",
        highlight=False,
    )
    shown = {name: f"{moved / 2**20:.1f}" for name, moved in counts["traffic"].items()}
    each = ", ".join(f"{name} {moved}" for name, moved in shown.items() if moved != "0.0")
    left_out = "; tensors of unknown sizes are left out" if counts["work"]["operations"] is None else ""
    console.print(f"MiB that kernels read and write: {each or 'less than 0.1'}{left_out}", highlight=False)
    for name, size in summary["predicted"].items():
        real = counts["transients"].get(name, 0)
        text = f"transient memory of {name}: {readable(real)}, {readable(size)} predicted"
        allowed = f", {readable(summary['limits'][name])} allowed" if name in summary["limits"] else ""
        console.print(text + allowed, highlight=False)
