"""Every block of docs/tutorial.md runs, in order, in one empty directory, and prints the output on the page."""

from __future__ import annotations

from pathlib import Path

from tests.docs.pages import check_that_all_code_is_run, run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"


def test_every_block_of_the_tutorial_runs(tmp_path: Path) -> None:
    (tmp_path / "place").mkdir()
    run(PAGE, tmp_path / "place", tmp_path / "scratch")


def test_all_code_of_the_tutorial_is_run() -> None:
    check_that_all_code_is_run(PAGE)
