"""`irongrad verify`."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.table import Table

from irongrad.cli.common import (
    base_option,
    console,
    device_option,
    directory_argument,
    error_console,
    json_option,
    print_json,
    print_unjudged,
    target_option,
)
from irongrad.cli.working import working
from irongrad.runtime import Session
from irongrad.runtime.errors import VerificationError
from irongrad.runtime.golden import read_goldens
from irongrad.runtime.integrity import check_files
from irongrad.runtime.manifest import SIGNATURE, Certificate, TargetSpec
from irongrad.runtime.manifest_file import write_manifest
from irongrad.runtime.report import Report
from irongrad.runtime.verification import signed, verify


@click.command(
    epilog="""\b
Example:
  irongrad verify build/digits --device vulkan
"""
)
@directory_argument
@click.option("--rows", default=10, show_default=True, help="How many of the worst values to show.")
@base_option
@target_option
@device_option
@json_option
def command(
    directory: Path, rows: int, base: Path | None, target: str | None, device: str | None, as_json: bool
) -> None:
    """Run the golden steps of the artifact in DIRECTORY and compare with the float64 oracle; needs no PyTorch.

    If everything agrees, the manifest gets a record of the device, its driver, the versions, the date and the worst
    error.
    """
    session = Session(directory, target=target, device=device, base=base, verifying=True, on_nonfinite="ignore")
    check_files(session.manifest, directory, tuple(session.manifest.golden_files.values()))
    with working("comparing with eager float64", quiet=as_json):
        report = verify(session, read_goldens(directory, session.manifest))
    record = signed(report, session.device)
    worst = sorted(report.comparisons, key=lambda c: -c.ratio)[:rows]
    if as_json:
        table = [asdict(c) | {"ratio": c.ratio} for c in worst]
        result = {"passed": report.passed, "target": session.target.name, "compared": len(report.comparisons)}
        tightness = {"tightness": asdict(report.tightness), "unjudged": report.unjudged_values}
        print_json(result | tightness | {"record": asdict(record), "worst": table})
    else:
        _print(report, record, rows)
    if not report.passed:
        raise VerificationError(f"{directory} is wrong on {session.device}: see the table")
    _sign(session, report, record)
    if (directory / SIGNATURE).exists():
        error_console.print(f"warning: the record changed the manifest, so sign {directory} again", highlight=False)


def _print(report: Report, record: Certificate, rows: int) -> None:
    table = Table("entry point", "value", "error", "allowed", "ratio", box=None)
    for c in sorted(report.comparisons, key=lambda c: -c.ratio)[:rows]:
        style = "bold red" if c.ratio > 1 else ""
        table.add_row(c.entry_point, c.key, f"{c.error:.3g}", f"{c.allowed:.3g}", f"{c.ratio:.2f}", style=style)
    console.print(table)
    wrong = sum(c.ratio > 1 for c in report.comparisons)
    verdict = "passed" if report.passed else f"{wrong} wrong"
    device = f"{record.device}, {record.name}" if record.name else record.device
    calls = f"{report.steps} steps" if report.steps else "one call"
    console.print(
        f"{len(report.comparisons)} values of {calls}, oracle {report.oracle}, on {device}: {verdict}",
        style="green" if report.passed else "red",
        highlight=False,
    )
    tight = report.tightness
    console.print(
        f"{tight.elements:,} elements; errors are {tight.error_median:.1%} of their tolerances at the median and "
        f"{tight.error_largest:.1%} at most; tolerances are {tight.tolerance_median:.2g} of their values at the median "
        f"and {tight.tolerance_largest:.2g} at most",
        highlight=False,
    )
    print_unjudged(report.unjudged_values)


def _sign(session: Session, report: Report, record: Certificate) -> None:
    """Write the record to the manifest; it replaces an older one for the same device and driver.

    Each part of a placed step gets a record of its own device.
    """
    records = {session.target.name: record}
    if session.manifest.placement is not None:
        records = {t.name: signed(report, t.device) for t in session.manifest.targets}
    targets = tuple(_signed(t, records[t.name]) if t.name in records else t for t in session.manifest.targets)
    write_manifest(replace(session.manifest, targets=targets), session.directory)


def _signed(target: TargetSpec, record: Certificate) -> TargetSpec:
    same = (record.device, record.name, record.driver)
    others = [c for c in target.verified if (c.device, c.name, c.driver) != same]
    return replace(target, verified=(*others, record))
