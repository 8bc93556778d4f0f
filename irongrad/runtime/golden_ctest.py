"""A plan of golden checks as files that CTest runs, with no Python."""

from __future__ import annotations

import re
from pathlib import Path, PurePath

import numpy as np

from irongrad.runtime import checkpoint
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.golden_plan import Plan
from irongrad.runtime.manifest import Manifest

# The error on a machine without the device. A target that never ran on the compiling machine is skipped there.
_NO_DEVICE = "creating (driver for )?device '"


def write_files(plan: Plan, manifest: Manifest, directory: Path) -> None:
    """Write the plan's arrays and checkpoints below `directory`.

    Raises:
        ArtifactError: a name of the artifact leads out of `directory`.
    """
    for name in (*plan.arrays, *plan.states):
        if not (directory / name).resolve().is_relative_to(directory.resolve()):
            raise ArtifactError(f"the artifact names the file {name!r}, which is outside of {directory}")
    for name, array in plan.arrays.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".npy":
            np.save(path, array)
        else:
            array.tofile(path)
    for name, state in plan.states.items():
        checkpoint.write(directory / name, state, manifest, finite=True)


def ctest_script(plan: Plan, artifact: PurePath, prefix: str, base: PurePath | None = None) -> str:
    """Return the plan as the text of a `CTestTestfile.cmake`.

    A file that includes it may set the script's variables first; the script only sets their defaults.

    Args:
        plan: the plan.
        artifact: the artifact's directory, relative to the script's directory.
        prefix: the prefix of all test names.
        base: the artifact's base file, relative to the script's directory; None if it has none.
    """
    defaults = {
        "IRONGRAD_ARTIFACT": artifact.as_posix(),
        **({} if base is None else {"IRONGRAD_BASE": base.as_posix()}),
        "IRONGRAD_GOLDEN": ".",
        "IRONGRAD_RUN_MODULE": "iree-run-module",
        "IRONGRAD_TEST_PREFIX": prefix,
    }
    lines = ["# Made by 'irongrad golden': 'ctest' in this directory runs it, with no Python."]
    for name, value in defaults.items():
        lines += [f"if(NOT DEFINED {name})", f"  set({name} {_quoted(value)})", "endif()"]
    for check in plan.checks:
        name = _quoted(f"${{IRONGRAD_TEST_PREFIX}}{check.name}")
        arguments = " ".join(_quoted(a) for a in ("${IRONGRAD_RUN_MODULE}", *check.command[1:]))
        lines.append(f"add_test({name} {arguments})")
        properties = {"LABELS": f"irongrad;{check.target}"}
        if check.refusal:
            properties["PASS_REGULAR_EXPRESSION"] = re.sub(r"([][().*+?^$|\\;])", r"\\\1", check.refusal)
        if check.optional:
            properties["SKIP_REGULAR_EXPRESSION"] = _NO_DEVICE
        listed = " ".join(f"{k} {_quoted(v)}" for k, v in properties.items())
        lines.append(f"set_tests_properties({name} PROPERTIES {listed})")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
