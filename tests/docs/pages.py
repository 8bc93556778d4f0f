"""Pages whose blocks are run, in order, in one empty directory.

A fenced block is `python` (written to the file that its first line names), `sh` (run), or `text` (the output of the
commands before it, with `…` for anything). In `text about` a number stands for any number. `sh fails` must fail.
`sh cuda` needs an NVIDIA GPU; without one, it must fail with the message that there is none. `sh torch` runs where
PyTorch still is.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from irongrad.runtime.devices import devices_of

NO_GPU = ("no CUDA device was found", "libcuda.so")  # the messages of IronGrad and of iree-run-module


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: its kind, its line on the page, and its text."""

    kind: str
    line: int
    text: str


def blocks_of(markdown: str) -> list[Block]:
    found = re.finditer(r"^```(\S[^\n]*)\n(.*?)^```$", markdown, re.MULTILINE | re.DOTALL)
    return [Block(m.group(1), markdown[: m.start()].count("\n") + 1, m.group(2)) for m in found]


def matches(pattern: str, text: str, numbers: bool = True) -> bool:
    """Whether a part of `text` is `pattern`. Without `numbers`, a number in it stands for any number."""
    anything = ".*".join(map(re.escape, pattern.strip().split("…")))
    if not numbers:
        anything = re.sub(r"\d+(?:(?:,|\\\.)\d+)*", r"[\\d.,]+", anything)
    return re.search(rf"^{anything}$", text, re.MULTILINE | re.DOTALL) is not None


class Reader:
    """Runs the blocks of a page. After `irongrad compile`, PyTorch can no longer be imported."""

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
            case ["text", "about"]:
                assert matches(block.text, self.printed, numbers=False), self.printed
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


def run(page: Path, place: Path, scratch: Path, wheels: Path | None = None) -> None:
    """Run every block of a page. Without `wheels`, installations are left out: the packages are installed."""
    readers = {}
    for name in ("device", "torch"):
        (scratch / name).mkdir(parents=True)
        readers[name] = Reader(place, scratch / name, wheels or scratch)
    reader = readers["device"]
    for block in blocks_of(page.read_text()):
        if wheels is None and block.text.startswith("pip install"):
            continue
        if not block.kind.startswith("text"):  # a text is the output of the block before it
            reader = readers["torch" if block.kind == "sh torch" else "device"]
        try:
            reader.do(replace(block, kind=block.kind.removesuffix(" torch")))
        except AssertionError as error:
            raise AssertionError(f"{page.name}, line {block.line}: {error}") from error


def check_that_all_code_is_run(page: Path) -> None:
    """Fail if a page has code outside of the blocks that `run` runs."""
    rest = re.sub(r"^```\S[^\n]*\n.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert "```" not in rest
    assert not re.search(r"^    ", rest, re.MULTILINE)
