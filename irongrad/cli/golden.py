"""`irongrad golden`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from irongrad.cli.common import (
    base_option,
    console,
    device_option,
    directory_argument,
    error_console,
    json_option,
    print_json,
)
from irongrad.runtime.atomic_files import atomic_write
from irongrad.runtime.base_file import base_of
from irongrad.runtime.errors import UserError
from irongrad.runtime.golden_ctest import ctest_script, write_files
from irongrad.runtime.golden_plan import ARTIFACT, BASE, FILES, Plan, make_plan
from irongrad.runtime.golden_whole import whole_goldens
from irongrad.runtime.initial_state import initial_state
from irongrad.runtime.integrity import check_files
from irongrad.runtime.manifest import INITIAL_STATE
from irongrad.runtime.manifest_file import read_manifest

CTEST_FILE = "CTestTestfile.cmake"


@click.command(
    epilog="""\b
Example:
  irongrad golden build/digits -o build/digits.golden
  ctest --test-dir build/digits.golden
"""
)
@directory_argument
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Where to write the files.")
@click.option("--target", help="Check only this one of the artifact's targets; all by default.")
@base_option
@device_option
@json_option
def command(
    directory: Path, output: Path, target: str | None, base: Path | None, device: str | None, as_json: bool
) -> None:
    """Unpack the golden values of the artifact in DIRECTORY for tools without Python.

    Writes inputs and expected results as .npy files (raw .bin where iree-run-module needs it), and checkpoints of the
    state before each later step. A CTestTestfile.cmake runs every entry point on them with iree-run-module.
    The artifact has only samples of tensors of more than 4096 elements; the rest comes from running it here.
    """
    manifest = read_manifest(directory)
    check_files(manifest, directory, (*manifest.golden_files.values(), INITIAL_STATE))
    names = [t.name for t in manifest.targets]
    if target is not None and target not in names:
        raise UserError(f"{directory} has no target {target!r}; it has {', '.join(names)}")
    goldens, reason = whole_goldens(directory, manifest, base)
    plan = make_plan(manifest, goldens, initial_state(directory, base), target=target, device=device)
    write_files(plan, manifest, output)
    # Relative, so that all of them can be copied to another machine side by side.
    shared = base_of(manifest, directory, base)
    beside = None if shared is None else _from(output, shared)
    script = ctest_script(plan, _from(output, directory), f"{directory.resolve().name}.", beside)
    atomic_write(output / CTEST_FILE, script.encode())
    if reason:
        error_console.print(
            "large tensors are not checked, nor steps after the first: the artifact has samples of them only, and "
            f"the whole tensors come from running it. {reason}",
            style="yellow",
            highlight=False,
        )
    if as_json:
        print_json(_report(plan, directory, shared, output))
        return
    count = len(plan.arrays) + len(plan.states)
    console.print(f"{output}: {count} files for {len(plan.checks)} checks", highlight=False)
    console.print(f"run them with: ctest --test-dir {output}", highlight=False, soft_wrap=True)


def _from(directory: Path, path: Path) -> Path:
    return Path(os.path.relpath(path.resolve(), directory.resolve()))


def _report(plan: Plan, directory: Path, base: Path | None, output: Path) -> dict[str, object]:
    roots = {ARTIFACT: str(directory), BASE: str(base), FILES: str(output)}

    def placed(argument: str) -> str:
        for name, path in roots.items():
            argument = argument.replace(name, path)
        return argument

    return {
        "output": output,
        "files": sorted([*plan.arrays, *plan.states, CTEST_FILE]),
        "checks": [
            {"name": c.name, "target": c.target, "command": [placed(a) for a in c.command], "refusal": c.refusal}
            for c in plan.checks
        ],
    }
