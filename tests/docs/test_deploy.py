"""Every command of docs/deploy.md runs, in order, in one empty directory, and prints the output in the guide."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

import pytest

from tests.docs.pages import Block, Reader, blocks_of, check_that_all_code_is_run, matches, run

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"
BOARD = Path(sys.prefix) / "aarch64"  # where scripts/test installs IREE's runtime for aarch64


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel of the files in `BOARD`, for pip without a network."""
    assert BOARD.is_dir(), "scripts/test installs IREE's runtime for aarch64 there"
    (about,) = BOARD.glob("*.dist-info")
    folder = tmp_path_factory.mktemp("wheels")
    tag = re.findall(r"^Tag: (\S+)$", (about / "WHEEL").read_text(), re.MULTILINE)[-1]
    with zipfile.ZipFile(folder / f"{about.stem}-{tag}.whl", "w") as wheel:
        for path in BOARD.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                wheel.write(path, path.relative_to(BOARD).as_posix())
    return folder


@pytest.fixture
def reader(tmp_path: Path, wheels: Path) -> Reader:
    place, scratch = tmp_path / "place", tmp_path / "scratch"
    place.mkdir()
    scratch.mkdir()
    return Reader(place, scratch, wheels)


def test_every_command_of_the_guide_runs(tmp_path: Path, wheels: Path) -> None:
    (tmp_path / "place").mkdir()
    assert {b.kind for b in blocks_of(GUIDE.read_text())} == {"python", "sh", "sh fails", "sh cuda", "text"}
    run(GUIDE, tmp_path / "place", tmp_path / "scratch", wheels)


def test_all_indented_or_fenced_code_is_run() -> None:
    check_that_all_code_is_run(GUIDE)


@pytest.mark.parametrize(
    "block",
    [
        Block("sh", 1, "irongrad no-such-verb"),
        Block("sh", 1, "false\ntrue"),
        Block("sh fails", 1, "true"),
        Block("sh cuda", 1, "irongrad verify no-such-artifact --device cuda"),
        Block("text", 1, "what nothing printed"),
        Block("text about", 1, "what nothing printed, 3 times"),
        Block("bash", 1, "true"),
    ],
    ids=lambda b: f"{b.kind}: {b.text.splitlines()[0]}",
)
def test_a_block_that_does_not_work_is_noticed(reader, block):
    with pytest.raises(AssertionError):
        reader.do(block)


def test_pytorch_is_gone_once_the_step_is_compiled(reader):
    reader.do(Block("sh", 1, "python -c 'import torch'"))
    reader.do(Block("sh", 1, "mkdir here; cd here; irongrad compile --help"))
    reader.do(Block("sh fails", 1, "python -c 'import torch'"))
    reader.do(Block("text", 1, "…this machine has no PyTorch"))
    reader.do(Block("sh", 1, "basename $PWD"))
    reader.do(Block("text", 1, "here"))


def test_an_ellipsis_stands_for_anything():
    assert matches("a…c", "first\na b c\nlast")
    assert matches("f32=1.…", "f32=1.234")
    assert not matches("f32=1.…", "f32=2.1")
    assert not matches("line", "another line")


def test_a_number_stands_for_any_number_where_the_page_says_so():
    assert matches("loss 1.78  1,024 samples/s", "loss 0.5  99 samples/s", numbers=False)
    assert not matches("loss 1.78", "loss nan", numbers=False)
    assert not matches("loss 1.78", "loss 0.5")
