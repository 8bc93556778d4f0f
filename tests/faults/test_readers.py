"""Hostile files: no reader lets an error out that is not ours, or takes much memory."""

from __future__ import annotations

import importlib.util
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from irongrad.cache.store import Store
from irongrad.runtime import Session
from tests.faults.readers import READERS, accepts

# Texts and numbers that break parsers.
_HOSTILE = (b"", b"\x00" * 8, b"\xff" * 8, b"[" * 3000, b'{"a":' * 3000, b"-1", b"1e999", b"NaN", b"null", b"../../x")


@pytest.fixture(scope="module")
def seeds(mlp_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A good file for every reader."""
    folder = tmp_path_factory.mktemp("seeds")
    Session(mlp_artifact).save(folder / "safetensors")
    shutil.copy(mlp_artifact / "manifest.json", folder / "manifest")
    shutil.copy(mlp_artifact / "golden.safetensors", folder / "golden")
    with (folder / "npz").open("wb") as file:
        np.savez_compressed(file, x=np.zeros((3, 4)), y=np.arange(3))
    with (folder / "npy").open("wb") as file:
        np.save(file, np.arange(12.0).reshape(3, 4))
    weight = helper.make_tensor("w", TensorProto.FLOAT, [4, 2], np.linspace(0, 1, 8))
    given, made = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [3, s]) for n, s in (("x", 4), ("out", 2)))
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["out"])]
    graph = helper.make_graph(nodes, "g", [given], [made], [weight])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), folder / "onnx")
    (folder / "bundle").write_text('{"format_version": 1, "programs": {"train_step": {"file": "a"}}, "state": []}')
    store = Store(folder / "store", 1 << 20)
    store.put("thing", "ab" * 32, {"a": b"first" * 20})
    shutil.copy(next(p for p in (folder / "store").rglob("ab" * 32)), folder / "cache")
    return {name: folder / name for name in READERS}


def mutated(good: bytes, rng: random.Random) -> bytes:
    """A file with a few bytes changed, removed, repeated or replaced by what breaks parsers."""
    data = bytearray(good)
    for _ in range(rng.randint(1, 4)):
        place, length = rng.randrange(len(data) + 1), rng.choice((1, 1, 4, 16))
        match rng.randrange(4):
            case 0:
                data[place : place + length] = rng.randbytes(length)
            case 1:
                del data[place : place + length]
            case 2:
                data[place:place] = rng.choice(_HOSTILE)
            case 3:
                data[place:place] = data[place : place + 64]
    return bytes(data)


@pytest.mark.parametrize("name", READERS)
def test_mutated_files_are_read_or_refused(seeds, tmp_path, name):
    good, rng = seeds[name].read_bytes(), random.Random(0)
    if name not in ("cache", "bundle"):
        assert accepts(name, good, tmp_path)
    for _ in range(60 if name == "onnx" else 400):
        accepts(name, mutated(good, rng), tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs the package atheris")
@pytest.mark.parametrize("name", READERS)
def test_100_000_fuzzed_files_are_read_or_refused(seeds, name):
    command = [sys.executable, "-m", "tests.faults.readers", name, seeds[name], "100000"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    assert "100000 inputs" in done.stdout
