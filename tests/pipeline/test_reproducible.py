"""The same step compiles to the same bytes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch

from irongrad.diagnostics.portable_paths import absolute, portable
from irongrad.diagnostics.toolchain_errors import toolchain_error
from irongrad.passes import DEFAULT_LEVEL, parse_passes, passes_at, spelled
from irongrad.runtime.manifest_file import read_manifest

NET = """
import torch
from torch import nn

import irongrad as ig


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 4)
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.first(x)) * self.scale))


def make_step():
    torch.manual_seed(0)
    model = Net()
    return ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        inputs={"x": torch.randn(6, 8), "y": torch.randint(0, 4, (6,))},
    )
"""

COMPILE = """
import sys
import irongrad as ig
from irongrad.pipeline.driver import build
from irongrad.pipeline.options import make_options
output, folder, before = sys.argv[1:]
sys.path.insert(0, folder)
import net
for _ in range(int(before)):
    build(net.make_step(), make_options(output, entry_points=("predict",), stop_after="assemble"))
ig.compile(net.make_step(), output, entry_points=("train_step",))
"""


def compiled(folder: Path, output: str, directory: Path, seed: str, before: int) -> dict[str, str]:
    """Compile after `before` other steps in the same process; return the hash of each file of the artifact."""
    folder.mkdir(parents=True)
    directory.mkdir(exist_ok=True)
    (folder / "net.py").write_text(NET)
    command = [sys.executable, "-c", COMPILE, output, str(folder), str(before)]
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    subprocess.run(command, cwd=directory, env=environment, check=True, capture_output=True)
    files = (directory / output).iterdir()
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def test_another_process_in_another_directory_makes_the_same_bytes(tmp_path):
    first = compiled(tmp_path / "a", "out", tmp_path / "a", "1", before=0)
    second = compiled(tmp_path / "b" / "deep", str(tmp_path / "elsewhere"), tmp_path / "c", "2", before=1)
    assert first == second
    assert len(first) == 6
    for name in first:
        assert str(tmp_path).encode() not in (tmp_path / "elsewhere" / name).read_bytes()
    assert read_manifest(tmp_path / "elsewhere").passes == tuple(map(spelled, passes_at(DEFAULT_LEVEL)))


def test_a_file_is_named_as_it_is_imported():
    assert portable(torch.nn.modules.linear.__file__) == "torch/nn/modules/linear.py"
    assert portable(torch.nn.__file__) == "torch/nn/__init__.py"
    assert portable("/somewhere/of/mine.py") == "mine.py"
    assert portable("<eval_with_key>.12 from /tmp/x") == "<eval_with_key>"
    assert absolute("mine.py") == "/somewhere/of/mine.py"
    assert absolute("never/seen.py") == "never/seen.py"


def test_passes_are_spelled_as_they_are_parsed():
    passes = parse_passes("dce,fold,rematerialise{max_memory=50%},multi-tensor")
    assert parse_passes(",".join(map(spelled, passes))) == passes


def test_an_error_at_a_portable_location_names_the_whole_path(tmp_path):
    source = tmp_path / "some.py"
    source.write_text("x = y.frobnicate()\n")
    output = f'{portable(str(source))}:1:0: error: out of cheese loc("{portable(str(source))}":1:0)'
    result = subprocess.CompletedProcess(["tool"], 1, "", output)
    error = toolchain_error("tool", result, source)
    assert f"the operator comes from {source}:1: x = y.frobnicate()" in str(error)
