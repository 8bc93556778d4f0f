"""`irongrad check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click
import msgspec
from rich.table import Table

from irongrad.cache.recordings import CommandPlace, Recording, command_place
from irongrad.cli.common import choice_options, console, json_option, precision_option, print_json, step_argument
from irongrad.cli.compile import load_step
from irongrad.cli.working import working

if TYPE_CHECKING:
    from irongrad.diagnostics.refusals import Refusal
    from irongrad.pipeline.check_step import Lowering, Report


@click.command(
    epilog="""\b
Example:
  irongrad check examples/digits.py:make_step
"""
)
@step_argument
@click.option("--target", default="llvm-cpu", show_default=True, help="What it would be compiled for.")
@precision_option
@choice_options("cache")
@json_option
@click.pass_context
def command(
    context: click.Context, source: str, target: str, precision: str | None, cache: bool, as_json: bool
) -> None:
    """Say whether the training step that FUNCTION in FILE returns can be compiled, within seconds.

    Lists every operator of forward, backward, update and evaluation with how it is lowered. For each operator that
    cannot be compiled, it shows the line, the reason and what to use instead. The exit code is 0 if there is none.
    """
    place = command_place(context.params) if cache else None
    recording = place.recorded() if place is not None else None
    reports = _checked(source, target, precision, place, quiet=as_json) if recording is None else {}
    described = msgspec.json.decode(recording.result) if recording is not None else _described(reports, target)
    if as_json:
        print_json(described.get("", {"steps": described}))
    else:
        for name, about in described.items():
            if name:
                console.rule(f"step {name}", align="left")
            _print_lowerings(about)
            if about["compiles"]:
                console.print(f"all of them can be compiled for {target}", style="green", highlight=False)
            else:
                _print_refused(reports[name])
    if error := next((report.error for report in reports.values() if report.error is not None), None):
        context.exit(error.exit_code)


def _checked(
    source: str, target: str, precision: str | None, place: CommandPlace | None, *, quiet: bool
) -> dict[str, Report]:
    """Check each step, by name; record the command at `place` if all can be compiled, and files alone decide that."""
    from irongrad.cache.tracer import Tracer

    tracer = Tracer()
    if place is not None:
        tracer.start()
    from torch._dynamo.utils import get_chromium_event_logger

    from irongrad.pipeline.check_step import check
    from irongrad.step.steps import named_steps
    from irongrad.targets import parse_target

    chosen = parse_target(target)
    get_chromium_event_logger()  # it draws a name for itself, in which the tracer would see a random number of the step
    with tracer.users_code(), working("checking every operator", quiet=quiet):
        steps = named_steps(load_step(source, precision))
        reports = {name: check(step, [chosen]) for name, step in steps.items()}
    trace = tracer.finish() if place is not None else None
    if place is not None and trace is not None and all(report.error is None for report in reports.values()):
        place.record(Recording("", trace, msgspec.json.encode(_described(reports, target))))
    return reports


def _described(reports: Mapping[str, Report], target: str) -> dict[str, Any]:
    """The JSON that `--json` prints for each report."""
    return {name: _as_json(report, target) for name, report in reports.items()}


def _as_json(report: Report, target: str) -> dict[str, Any]:
    error = report.error and report.error.described()
    verdict = {"target": target, "compiles": error is None, "operators": _counts(report.lowerings)}
    return {**verdict, **asdict(replace(report, error=None)), "error": error}


def _counts(lowerings: tuple[Lowering, ...]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for lowering in lowerings:
        counts[lowering.phase] += lowering.count
    return dict(counts)


def _print_lowerings(about: Mapping[str, Any]) -> None:
    """Print a table of the operators of a report, from its JSON; nothing if none was found."""
    if not about["lowerings"]:
        return
    table = Table("phase", "operator", "calls", "lowered as", box=None)
    phases = [row["phase"] for row in about["lowerings"]]
    for row, previous in zip(about["lowerings"], ["", *phases], strict=False):
        style = "bold red" if row["how"] == "refused" else ""
        phase, name = row["phase"] if row["phase"] != previous else "", row["operator"].removesuffix(".default")
        table.add_row(phase, name, str(row["count"]), row["how"], style=style)
    console.print(table)
    counts = ", ".join(f"{n} {phase}" for phase, n in about["operators"].items())
    console.print(f"{counts} operators", highlight=False)


def _print_refused(report: Report) -> None:
    assert report.error is not None
    console.print("it cannot be compiled; 'irongrad compile' says:", style="red", highlight=False)
    console.print(f"  {report.error}\n  see {report.error.section}", highlight=False, soft_wrap=True)
    if more := [r for r in report.refusals if not _is_said(r, str(report.error))]:
        console.print("these cannot be compiled either:", style="red", highlight=False)
        for refusal in more:
            console.print(f"  {refusal}", highlight=False, soft_wrap=True)


def _is_said(refusal: Refusal, message: str) -> bool:
    """Whether an error's message names the line and the reason of a refusal."""
    from irongrad.diagnostics.refusals import UNKNOWN

    at_line = refusal.line == UNKNOWN or refusal.line in message
    return at_line and refusal.reason.removeprefix("cannot be compiled: ") in message
