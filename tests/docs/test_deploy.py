"""Every command of docs/deploy.md runs, in order, in one empty directory, and prints the output in the guide.

A fenced block is `python` (written to the file that its first line names), `sh` (run), or `text` (the output of the
commands before it, with `…` for anything). `sh fails` must fail. `sh cuda` needs an NVIDIA GPU; without one, it must
fail with the message that there is none.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from irongrad.runtime.devices import devices_of

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "deploy.md"
BOARD = Path(sys.prefix) / "aarch64"  # where scripts/test installs IREE's runtime for aarch64

NO_GPU = ("no CUDA device was found", "libcuda.so")  # the messages of IronGrad and of iree-run-module


@dataclass(frozen=True)
class Block:
    """A fenced block of the guide: its kind, its line in the guide, and its text."""

    kind: str
    line: int
    text: str


def blocks_of(markdown: str) -> list[Block]:
    found = re.finditer(r"^```(\S[^\n]*)\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL)
    return [Block(m.group(1), markdown[: m.start()].count("\n") + 1, m.group(2)) for m in found]


def matches(pattern: str, text: str) -> bool:
    anything = ".*".join(map(re.escape, pattern.strip().split("…")))
    return re.search(rf"^{anything}$", text, re.MULTILINE | re.DOTALL) is not None


class Reader:
    """Runs the blocks of the guide. After `irongrad compile`, PyTorch can no longer be imported."""

    def __init__(self, place: Path, scratch: Path, wheels: Path) -> None:
        self.place = place
        self.printed = ""
        self._exports = scratch / "exports.sh"
        self._hidden = scratch / "hidden"
        self._hidden.mkdir()
        for module in ("torch", "torch_mlir"):
            (self._hidden / f"{module}.py").write_text("raise ImportError('this machine has no PyTorch')\n")
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = {
            **os.environ,
            "PATH": path,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        self._exports.write_text(f"cd {shlex.quote(str(place))}\n")

    def do(self, block: Block) -> None:
        match block.kind.split():
            case ["python"]:
                name = block.text.partition("\n")[0].removeprefix("# ")
                (self.place / name).write_text(block.text)
            case ["sh"]:
                code = self._run(block.text)
                if code != 0 and "DATA_LOSS" in self.printed:  # Mesa lost the device: see tests/targets/test_vulkan.py
                    code = self._run(block.text)
                assert code == 0, self.printed
            case ["sh", "fails"]:
                assert self._run(block.text) != 0, self.printed
            case ["sh", "cuda"]:
                code = self._run(block.text)
                if devices_of("cuda"):
                    assert code == 0, self.printed
                else:
                    assert code != 0
                    assert any(message in self.printed for message in NO_GPU), self.printed
            case ["text"]:
                assert matches(block.text, self.printed), self.printed
            case _:
                raise AssertionError(f"a block of unknown kind {block.kind!r}")

    def _run(self, text: str) -> int:
        """Run shell commands in the directory and with the exported variables that the commands before left."""
        kept = shlex.quote(str(self._exports))
        script = f"set -eu\n. {kept}\n{text}\nexport -p >{kept}\nprintf 'cd %q\\n' \"$PWD\" >>{kept}\n"
        result = subprocess.run(
            ["bash", "-c", script], env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        self.printed = result.stdout.decode()
        if "irongrad compile" in text:
            before = self._environment.get("PYTHONPATH", "")
            with self._exports.open("a") as exports:
                exports.write(f"export PYTHONPATH={shlex.quote(f'{self._hidden}{os.pathsep}{before}')}\n")
        return result.returncode


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


def test_every_command_of_the_guide_runs(reader):
    blocks = blocks_of(GUIDE.read_text())
    assert {b.kind for b in blocks} == {"python", "sh", "sh fails", "sh cuda", "text"}
    for block in blocks:
        try:
            reader.do(block)
        except AssertionError as error:
            raise AssertionError(f"docs/deploy.md, line {block.line}: {error}") from error


def test_all_indented_or_fenced_code_is_run():
    text = re.sub(r"^```.*?^```$", "", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert "```" not in text
    assert not re.search(r"^    ", text, re.MULTILINE)


@pytest.mark.parametrize(
    "block",
    [
        Block("sh", 1, "irongrad no-such-verb"),
        Block("sh", 1, "false\ntrue"),
        Block("sh fails", 1, "true"),
        Block("sh cuda", 1, "irongrad verify no-such-artifact --device cuda"),
        Block("text", 1, "what nothing printed"),
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
