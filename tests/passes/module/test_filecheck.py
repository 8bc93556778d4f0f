"""Each pass over IREE's module on small modules: `*.mlir` beside this file, with `// RUN:` and `// CHECK:` lines.

The lines are those of LLVM's FileCheck (https://llvm.org/docs/CommandGuide/FileCheck.html), which the package
`filecheck` reads. A RUN line is an `irongrad` command, run in this process; `%s` is the file.
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
from irongrad.pipeline.iree.phases import module_passes

HERE = Path(__file__).parent
CASES = sorted(HERE.glob("*/*.mlir"))
_RUN = re.compile(r"^// RUN: irongrad (.+)$", re.MULTILINE)


def run_case(file: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run every command of `file` and match what it prints; the matcher's exit status, 0 for a match."""
    monkeypatch.setattr("sys.stdout", io.StringIO())  # filecheck prints what does not match
    for command in _RUN.findall(file.read_text()):
        arguments = [str(file) if part == "%s" else part for part in shlex.split(command)]
        result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        options = Options(match_filename=str(file))
        with file.open() as checks:
            parser = Parser(options, checks, *pattern_for_opts(options))
            if status := Matcher(options, FInput("-", result.output), parser).run():
                return status
    return 0


@pytest.mark.parametrize("file", CASES, ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_the_pass_makes_what_the_file_says(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _RUN.findall(file.read_text()), "no RUN line"
    assert "CHECK" in file.read_text()
    assert run_case(file, monkeypatch) == 0, f"{file} does not match; run its RUN line by hand"


def test_a_case_that_does_not_match_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = tmp_path / "wrong.mlir"
    wrong.write_text((HERE / "drop_barriers" / "held_values.mlir").read_text().replace("%[[X]], %[[OWN]]", "%[[OWN]]"))
    assert run_case(wrong, monkeypatch) != 0


def test_every_pass_has_a_case() -> None:
    assert {name.replace("-", "_") for name in module_passes()} == {f.parent.name for f in CASES}
