"""`irongrad rebuild`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from irongrad.cli.common import base_option, console, directory_argument, json_option, print_json
from irongrad.cli.working import working
from irongrad.runtime.manifest import Manifest, TargetSpec
from irongrad.runtime.manifest_file import read_manifest


@click.command(
    epilog="""\b
Example:
  irongrad rebuild build/digits
  irongrad rebuild build/digits --target llvm-cpu:cpu=x86-64-v3
"""
)
@directory_argument
@click.option(
    "--target", "targets", multiple=True, help="What to compile for; the artifact's targets by default. Repeatable."
)
@base_option
@json_option
def command(directory: Path, targets: tuple[str, ...], base: Path | None, as_json: bool) -> None:
    """Compile the artifact in DIRECTORY again, from the portable module in it, with the IREE that is installed.

    Needs neither the model nor its code. The result is verified against the artifact's golden values before it replaces
    the old one. State, golden values and checkpoints stay valid.
    """
    from irongrad.pipeline.rebuild import rebuild

    before = read_manifest(directory)
    with working("compiling and verifying", quiet=as_json):
        after = rebuild(directory, targets, base).manifest
    rows = [_row(t, before, after) for t in after.targets if not targets or t.asked in targets]
    if as_json:
        print_json({"output": directory, "targets": rows})
        return
    for row in rows:
        old = f", IREE {row['compiler_before']} before" if row["compiler_before"] else ", a new target"
        same = ", the same bytes" if row["same"] else ""
        worst = row["worst"]
        note = f"verified, worst error {worst:.0%} of what is allowed" if worst is not None else "not verified"
        console.print(f"{row['name']}: IREE {row['compiler']}{old}{same}; {note}", highlight=False, soft_wrap=True)


def _row(target: TargetSpec, before: Manifest, after: Manifest) -> dict[str, Any]:
    old = next((t for t in before.targets if t.name == target.name), None)
    return {
        "name": target.name,
        "compiler": target.compiler,
        "compiler_before": old.compiler if old is not None else None,
        "same": before.files.get(target.file) == after.files[target.file],
        "worst": target.certificate.worst if target.certificate is not None else None,
    }
