"""Every command of docs/finetune.md runs, in order, in one directory, and prints the output in the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.pages import check_that_all_code_is_run, run

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "finetune.md"


@pytest.mark.slow
def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "examples").symlink_to(ROOT / "examples")
    run(PAGE, place, tmp_path / "scratch")


def test_all_code_of_the_page_is_run() -> None:
    check_that_all_code_is_run(PAGE)
