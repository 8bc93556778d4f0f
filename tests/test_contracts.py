"""The import contracts of pyproject.toml hold, and each of them can fail."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# For each contract: a file, and an import that breaks it there.
BREACHES = {
    "rooms": ("irongrad/graph/nodes.py", "from irongrad.passes import manager"),
    "stages": ("irongrad/pipeline/capture/capture.py", "from irongrad.pipeline.iree import compile"),
    "passes": ("irongrad/passes/base.py", "from irongrad.passes.graph import dead_code"),
    "apart": ("irongrad/passes/module/share_kernels.py", "from irongrad.passes.module import drop_barriers"),
    "circles": ("irongrad/sizes/symbols.py", "from irongrad.sizes import expressions, dimensions, limits, constraints"),
    "deployed": ("irongrad/runtime/errors.py", "import torch"),
}


def lint(folder: Path, contract: str) -> subprocess.CompletedProcess[str]:
    """Check one contract on the package in `folder`."""
    # lint-imports puts the working directory in front of the installed package.
    program = "import sys; from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", program, "--no-logo", "--no-cache", "--contract", contract]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the package and its contracts."""
    shutil.copytree(ROOT / "irongrad", tmp_path / "irongrad", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    return tmp_path


@pytest.mark.parametrize("contract", BREACHES)
def test_a_contract_holds_until_an_import_breaks_it(contract: str, copied: Path) -> None:
    before = lint(copied, contract)
    assert before.returncode == 0, before.stdout
    name, breach = BREACHES[contract]
    file = copied / name
    # Inside a function, and for types alone: both count.
    file.write_text(f"{file.read_text()}\n\ndef _breach() -> None:\n    {breach}\n")
    after = lint(copied, contract)
    assert after.returncode == 1, after.stdout
    assert "BROKEN" in after.stdout


def test_every_contract_has_a_breach() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    ids = [line.partition('"')[2].rstrip('"') for line in text.splitlines() if line.startswith('id = "')]
    assert ids == list(BREACHES)


def test_an_import_of_the_compiler_in_the_runtime_is_refused(tmp_path: Path) -> None:
    """import-linter cannot tell `iree.compiler` from `iree`, so ruff holds this one."""
    file = tmp_path / "irongrad" / "runtime" / "opens.py"
    file.parent.mkdir(parents=True)
    file.write_text('"""A file."""\n\nimport iree.compiler\n\nprint(iree.compiler)\n')
    shutil.copyfile(ROOT / "pyproject.toml", tmp_path / "pyproject.toml")
    ruff = [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "TID251", "irongrad"]
    found = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "TID251" in found.stdout
