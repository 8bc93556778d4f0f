"""Every command of docs/finetune.md runs, in order, in one directory, and prints the output in the page.

The blocks are those of docs/deploy.md (`test_deploy.py`), and `sh torch`, which runs where PyTorch is. The installation
is left out: the package is installed.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_deploy import Block, Reader, blocks_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "finetune.md"


@pytest.mark.slow
def test_every_command_of_the_page_runs(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "examples").symlink_to(ROOT / "examples")
    readers = {}
    for name in ("device", "torch"):
        (tmp_path / name).mkdir()
        readers[name] = Reader(place, tmp_path / name, tmp_path)
    reader = readers["device"]
    for block in blocks_of(PAGE.read_text()):
        if block.text.startswith("pip install"):
            continue
        if block.kind != "text":  # a text is the output of the block before it
            reader = readers["torch" if block.kind == "sh torch" else "device"]
        try:
            reader.do(Block("sh", block.line, block.text) if block.kind == "sh torch" else block)
        except AssertionError as error:
            raise AssertionError(f"docs/finetune.md, line {block.line}: {error}") from error


def test_all_code_of_the_page_is_run() -> None:
    kinds = {block.kind for block in blocks_of(PAGE.read_text())}
    assert kinds == {"sh", "sh torch", "python", "text"}
    rest = re.sub(r"^```.*?^```$", "", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert "```" not in rest
    assert not re.search(r"^    ", rest, re.MULTILINE)
