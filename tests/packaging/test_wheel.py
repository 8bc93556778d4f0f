"""The wheel stands alone: without the compiler's extra it trains from an artifact, on every supported Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.11", "3.12", "3.13")

PROGRAM = """
import sys
import numpy as np
import irongrad
import irongrad.runtime

session = irongrad.runtime.load(sys.argv[1])
x = np.linspace(-1, 1, 48, dtype=np.float32).reshape(6, 8)
y = np.arange(6) % 4
losses = [session.train_step(x=x, y=y) for _ in range(5)]
assert losses[-1] < losses[0], losses
assert "torch" not in sys.modules
print(irongrad.__version__, *losses)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    ignored = shutil.ignore_patterns(".venv", ".git", "build", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")
    shutil.copytree(ROOT, sources, ignore=ignored)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder / "dist"), str(sources)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    (found,) = (folder / "dist").glob("*.whl")
    return found


def interpreter(version: str) -> str | None:
    """A Python of this version that runs; None where there is none."""
    folders = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin"))
    for candidate in [shutil.which(f"python{version}"), *(str(f / "python") for f in folders)]:
        if candidate is None:
            continue
        ask = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        said = subprocess.run(ask, capture_output=True, text=True, check=False)
        if said.stdout.strip() == version:
            return candidate
    return None


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_trains_without_the_compiler(version: str, wheel: Path, mlp_artifact: Path, tmp_path: Path) -> None:
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    subprocess.run([python, "-m", "venv", str(tmp_path / "env")], check=True)
    own = str(tmp_path / "env" / "bin" / "python")
    subprocess.run([own, "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    command = [own, "-W", "error", "-c", PROGRAM, str(mlp_artifact)]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    installed = subprocess.run([own, "-m", "pip", "list"], capture_output=True, text=True, check=True).stdout.lower()
    assert "torch" not in installed
    assert "numpy" in installed
