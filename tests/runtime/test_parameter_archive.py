"""Parameter archives hold each value once, no repeated value, and what IREE's own tools read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import iree.runtime as ireert
import ml_dtypes
import numpy as np
import pytest

from irongrad.runtime.initial_state import initial_state
from irongrad.runtime.manifest_file import read_manifest
from irongrad.runtime.parameter_archive import ALIGNMENT, write_archive
from irongrad.runtime.parameter_files import read_parameters

VALUES = np.arange(1000, dtype=np.float32)


def entries(path: Path) -> dict[str, ireert.ParameterIndexEntry]:
    index = ireert.ParameterIndex()
    index.load(str(path), format="irpa")
    return dict(index.items())


@pytest.mark.parametrize(
    "array",
    [
        VALUES,
        np.zeros((20, 30), np.float32),
        np.full(7, -0.0, np.float32),
        np.full(7, np.nan, np.float64),
        np.full(9, 2.5, np.float16),
        np.full(9, 1.5, ml_dtypes.bfloat16),
        np.full((3, 3), 1.5, np.float32),
        np.full(5, 1, np.int64),
        np.full(5, -1, np.int64),
        np.array(0, np.int64),
        np.array(3.0, np.float32),
        np.ones(4, bool),
        np.zeros((0, 3), np.float32),
        np.array([0] * 63 + [1], np.uint8),
        np.array([1, 2] * 40 + [1], np.uint8),
        VALUES.reshape(10, 100).T,
    ],
    ids=lambda a: f"{a.dtype}{list(a.shape)}",
)
def test_every_array_comes_back_to_the_bit(tmp_path, array):
    write_archive(tmp_path / "a.irpa", {"before": VALUES, "ä/1.weight": array, "after": VALUES[:3]})
    read = read_parameters(tmp_path / "a.irpa")
    assert list(read) == ["before", "ä/1.weight", "after"]
    assert read["ä/1.weight"].tobytes() == array.tobytes()
    assert read["after"].tobytes() == VALUES[:3].tobytes()


def test_a_repeated_value_takes_no_space(tmp_path):
    write_archive(tmp_path / "a.irpa", {f"zeros{i}": np.zeros(10**6, np.float32) for i in range(10)})
    assert (tmp_path / "a.irpa").stat().st_size < 2000


def test_equal_tensors_are_stored_once(tmp_path):
    write_archive(tmp_path / "one.irpa", {"a": VALUES})
    write_archive(tmp_path / "many.irpa", {"a": VALUES, "b": VALUES + 1, "c": VALUES.copy(), "d": VALUES.copy()})
    size = (tmp_path / "many.irpa").stat().st_size - (tmp_path / "one.irpa").stat().st_size
    assert size < 1.2 * VALUES.nbytes
    assert read_parameters(tmp_path / "many.irpa")["d"].tobytes() == VALUES.tobytes()
    assert read_parameters(tmp_path / "many.irpa")["b"].tobytes() == (VALUES + 1).tobytes()


def test_data_is_aligned_so_that_iree_can_use_it_in_place(tmp_path):
    write_archive(tmp_path / "a.irpa", {f"t{i}": VALUES[: i + 1] for i in range(20)})
    for entry in entries(tmp_path / "a.irpa").values():
        assert not entry.is_file or entry.file_storage[1] % ALIGNMENT == 0


def test_an_empty_archive_is_read(tmp_path):
    write_archive(tmp_path / "a.irpa", {})
    assert read_parameters(tmp_path / "a.irpa") == {}


def test_others_may_read_the_file(tmp_path):
    write_archive(tmp_path / "a.irpa", {"a": VALUES})
    assert (tmp_path / "a.irpa").stat().st_mode & 0o044


def test_irees_tool_reads_it(tmp_path):
    write_archive(tmp_path / "a.irpa", {"data": VALUES, "same": VALUES, "ones": np.ones(8, np.float32)})
    command = ["iree-dump-parameters", f"--parameters=state={tmp_path / 'a.irpa'}"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "3 entries, 8032 total bytes" in shown


def test_an_artifact_holds_the_parameters_alone(mlp_artifact):
    state = initial_state(mlp_artifact)
    sizes = {s.name: state[s.name].nbytes for s in read_manifest(mlp_artifact).state}
    parameters = sum(size for name, size in sizes.items() if not name.startswith(("optimizer/", "irongrad/")))
    assert sum(sizes.values()) > 2.5 * parameters
    assert (mlp_artifact / "state.irpa").stat().st_size < parameters + 200 * len(sizes)
