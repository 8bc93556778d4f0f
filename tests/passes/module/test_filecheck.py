"""Each pass over IREE's module on small modules: `*/*.mlir` here, with `// RUN:` and `// CHECK:` lines.

The lines are those of LLVM's FileCheck (https://llvm.org/docs/CommandGuide/FileCheck.html), which the package
`filecheck` reads. A RUN line is an `irongrad` command, run in this process; `%s` is the file. `not irongrad` expects a
failure, and the CHECK lines match the error. With the line `// UNCHANGED` the command must print the module of the file
unchanged, comments aside.
"""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from filecheck.finput import FInput
from filecheck.matcher import Matcher
from filecheck.options import Options
from filecheck.parser import Parser, pattern_for_opts

from irongrad.cli.main import cli
from irongrad.mlir.walk import parsed
from irongrad.pipeline.iree.phases import module_passes
from irongrad.runtime.errors import IronGradError

HERE = Path(__file__).parent
CASES = sorted(HERE.glob("*/*.mlir"))
_RUN = re.compile(r"^// RUN: (not )?irongrad (.+)$", re.MULTILINE)
_UNCHANGED = "\n// UNCHANGED\n"


def run_case(file: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether every command of `file` prints what its CHECK lines match."""
    monkeypatch.setattr("sys.stdout", io.StringIO())  # filecheck prints a mismatch
    text = file.read_text()
    for fails, command in _RUN.findall(text):
        arguments = [str(file) if part == "%s" else part for part in shlex.split(command)]
        succeeded, output = _run(arguments)
        options = Options(match_filename=str(file))
        parser = Parser(options, io.StringIO(text), *pattern_for_opts(options))
        if succeeded == bool(fails) or Matcher(options, FInput("-", output), parser).run() != 0:
            return False
        if _UNCHANGED in text and output.strip() != _printed(text).strip():
            return False
    return True


def _run(arguments: list[str]) -> tuple[bool, str]:
    """Whether a command succeeds, and its output or its error."""
    try:
        result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    except IronGradError as error:
        return False, f"error: {error}"
    return result.exit_code == 0, result.output


def _printed(text: str) -> str:
    with parsed(text.encode()) as module:
        return str(module)


@pytest.mark.parametrize("file", CASES, ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_the_output_of_the_pass_matches_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = file.read_text()
    assert text.startswith("// "), "no title"
    commands = [command for _, command in _RUN.findall(text)]
    assert commands, "no RUN line"
    assert all(f"--pass {file.parent.name.replace('_', '-')}" in command.replace("'", "") for command in commands)
    assert "CHECK" in text
    assert run_case(file, monkeypatch), f"{file} does not match; run its RUN line by hand"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("util.return [[X]], [[OWN]]", "util.return [[OWN]]"),
        ("// RUN: irongrad", "// RUN: not irongrad"),
        ("\n// RUN", "\n// UNCHANGED\n// RUN"),
        ("--pass drop-barriers", "--pass update-early"),
    ],
    ids=["another output", "no error", "a change", "another pass"],
)
def test_a_case_that_does_not_match_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    right = (HERE / "drop_barriers" / "held_values.mlir").read_text()
    (tmp_path / "right.mlir").write_text(right)
    assert run_case(tmp_path / "right.mlir", monkeypatch)
    assert old in right
    (tmp_path / "wrong.mlir").write_text(right.replace(old, new))
    assert not run_case(tmp_path / "wrong.mlir", monkeypatch)


def test_every_pass_has_a_case() -> None:
    assert {name.replace("-", "_") for name in module_passes()} == {f.parent.name for f in CASES}
