"""`irongrad verify`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.table import Table

from irongrad.cli.common import console, device_option, directory_argument, json_option, print_json, target_option
from irongrad.runtime import Session, load
from irongrad.runtime.errors import VerificationError
from irongrad.runtime.golden import read_golden
from irongrad.runtime.manifest import GOLDEN, Certificate, check_files, write_manifest
from irongrad.runtime.verification import Report, verify


@click.command(
    epilog="""\b
Example:
  irongrad verify build/digits --device local-sync
"""
)
@directory_argument
@click.option("--rows", default=10, show_default=True, help="How many of the worst values to show.")
@target_option
@device_option
@json_option
def command(directory: Path, rows: int, target: str | None, device: str | None, as_json: bool) -> None:
    """Run the golden steps of the artifact in DIRECTORY and compare with the float64 oracle; needs no PyTorch."""
    session = load(directory, target=target, device=device)
    check_files(session.manifest, directory, (GOLDEN,))
    report = verify(session, read_golden(directory / GOLDEN))
    worst = sorted(report.comparisons, key=lambda c: -c.ratio)[:rows]
    if as_json:
        table = [asdict(c) | {"ratio": c.ratio} for c in worst]
        print_json({"passed": report.passed, "compared": len(report.comparisons), "worst": table})
    else:
        _print(report, rows)
    if not report.passed:
        raise VerificationError(f"{directory} is wrong on {device or session.target.device}: see the table")
    _record(session, report, device or session.target.device)


def _print(report: Report, rows: int) -> None:
    table = Table("entry point", "value", "error", "allowed", "ratio", box=None)
    for c in sorted(report.comparisons, key=lambda c: -c.ratio)[:rows]:
        style = "bold red" if c.ratio > 1 else ""
        table.add_row(c.entry_point, c.key, f"{c.error:.3g}", f"{c.allowed:.3g}", f"{c.ratio:.2f}", style=style)
    console.print(table)
    wrong = sum(c.ratio > 1 for c in report.comparisons)
    verdict = "[green]passed[/]" if report.passed else f"[red]{wrong} wrong[/]"
    console.print(f"{len(report.comparisons)} values of {report.steps} steps, oracle {report.oracle}: {verdict}")


def _record(session: Session, report: Report, device: str) -> None:
    """Keep the outcome in the manifest of a target that was not verified when it was compiled."""
    if session.target.certificate is not None:
        return
    worst = report.worst
    signed = Certificate(device, report.steps, worst.ratio, f"{worst.entry_point} {worst.key}", report.oracle)
    targets = tuple(
        replace(t, certificate=signed) if t.name == session.target.name else t for t in session.manifest.targets
    )
    write_manifest(replace(session.manifest, targets=targets), session.directory)
