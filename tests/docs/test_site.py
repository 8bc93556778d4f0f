"""The documentation builds as a site without a warning, whole and without a network."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
FACES = ("irongrad", "irongrad.runtime", "irongrad.training", "irongrad.distributed", "irongrad.integrations.flower")


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--config-file",
        str(root / "mkdocs.yml"),
        "--site-dir",
        str(site),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_no_page_loads_anything_from_a_network(site: Path) -> None:
    loads = re.compile(r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=\W?(?:https?:)?//[^>]*>")
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    assert {found[0] for page in pages for found in loads.finditer(page.read_text())} == set()
    assert "//unpkg.com" not in (site / "index.html").read_text()


def test_figures_are_drawn_when_the_site_is_built(site: Path) -> None:
    assert "<svg" in (site / "dev" / "system.html").read_text()
    assert not [page for page in site.rglob("*.html") if "```" in page.read_text() and "files" not in page.parts]


def test_every_verb_and_every_public_name_is_in_the_reference(site: Path) -> None:
    from irongrad.cli.main import VERBS

    page = (site / "reference" / "command_line.html").read_text()
    assert [verb for verb in VERBS if f'id="irongrad-{verb}"' not in page] == []
    told = {name for page in REFERENCE.glob("*.md") for name in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M)}
    public = {f"{face}.{name}" for face in FACES for name in importlib.import_module(face).__all__}
    assert public - told == {"irongrad.__version__"}


def test_broken_links_and_pages_outside_the_navigation_stop_the_build(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    for name in ("scripts", "irongrad"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs" / "lost.md").write_text("# Lost\n\n[a](gone.md) [b](memory.md#gone) [c](../gone.py)\n")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode == 1
    for problem in ('not included in the "nav"', "'gone.md'", "'#gone'", "gone.py"):
        assert problem in done.stderr
