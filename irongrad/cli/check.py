"""`irongrad check`."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from irongrad.cli.common import console, json_option, precision_option, print_json, step_argument
from irongrad.cli.compile import load_step

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
@json_option
@click.pass_context
def command(context: click.Context, source: str, target: str, precision: str | None, as_json: bool) -> None:
    """Say whether the training step that FUNCTION in FILE returns can be compiled, within seconds.

    Lists every operator of forward, backward, update and evaluation with how it is lowered. For each operator that
    cannot be compiled, it shows the line, the reason and what to use instead. The exit code is 0 if there is none.
    """
    from irongrad.pipeline.check_step import check
    from irongrad.step.steps import named_steps
    from irongrad.targets import parse_target

    chosen = parse_target(target)
    reports = {name: check(step, [chosen]) for name, step in named_steps(load_step(source, precision)).items()}
    if as_json:
        found = {name: _as_json(report, target) for name, report in reports.items()}
        print_json(found.get("", {"steps": found}))
    else:
        for name, report in reports.items():
            if name:
                console.rule(f"step {name}", align="left")
            _print(report, target)
    if error := next((report.error for report in reports.values() if report.error is not None), None):
        context.exit(error.exit_code)


def _as_json(report: Report, target: str) -> dict[str, Any]:
    error = report.error and report.error.described()
    verdict = {"target": target, "compiles": error is None, "operators": _counts(report.lowerings)}
    return {**verdict, **asdict(replace(report, error=None)), "error": error}


def _counts(lowerings: tuple[Lowering, ...]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for lowering in lowerings:
        counts[lowering.phase] += lowering.count
    return dict(counts)


def _print(report: Report, target: str) -> None:
    table = Table("phase", "operator", "calls", "lowered as", box=None)
    phases = [row.phase for row in report.lowerings]
    for row, previous in zip(report.lowerings, ["", *phases], strict=False):
        style = "bold red" if row.how == "refused" else ""
        name = row.operator.removesuffix(".default")
        table.add_row(row.phase if row.phase != previous else "", name, str(row.count), row.how, style=style)
    console.print(table)
    counts = ", ".join(f"{n} {phase}" for phase, n in _counts(report.lowerings).items())
    console.print(f"{counts} operators", highlight=False)
    if report.error is None:
        console.print(f"all of them can be compiled for {target}", style="green", highlight=False)
        return
    console.print("it cannot be compiled; 'irongrad compile' says:", style="red", highlight=False)
    console.print(f"  {report.error}\n  see {report.error.section}", highlight=False, soft_wrap=True)
    if more := [r for r in report.refusals if not _is_said(r, str(report.error))]:
        console.print("these cannot be compiled either:", style="red", highlight=False)
        for refusal in more:
            console.print(f"  {refusal}", highlight=False, soft_wrap=True)


def _is_said(refusal: Refusal, message: str) -> bool:
    """Whether an error's message names the line and the reason of a refusal."""
    return refusal.line in message and refusal.reason.removeprefix("cannot be compiled: ") in message
