"""Reading .npz files: the arrays that are asked for, within the memory that is free."""

from __future__ import annotations

import io
import tracemalloc
import zipfile

import numpy as np
import pytest

from irongrad.runtime.errors import GuardError
from irongrad.training import numpy_files
from irongrad.training.numpy_files import read_npz

ARRAYS = {
    "x": np.arange(12, dtype=np.float32).reshape(3, 4),
    "y": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "none": np.zeros((0, 3)),
    "scalar": np.array(3.0),
    "big": np.arange(4, dtype=">i4"),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_it_reads_what_numpy_writes(save, tmp_path):
    save(tmp_path / "data.npz", **ARRAYS)
    found = read_npz(tmp_path / "data.npz", list(ARRAYS))
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype.newbyteorder("=")


def test_only_the_arrays_that_are_asked_for_are_read(tmp_path):
    np.savez_compressed(tmp_path / "data.npz", x=ARRAYS["x"], bomb=np.zeros(200_000_000, np.uint8))
    tracemalloc.start()
    try:
        assert list(read_npz(tmp_path / "data.npz", ["x"])) == ["x"]
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_an_array_that_does_not_fit_is_refused_before_it_is_read(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "data.npz", x=np.zeros(1_000_000))
    monkeypatch.setattr(numpy_files, "_free_memory", lambda: 1_000_000)
    with pytest.raises(GuardError, match=r"x has 7.7MiB, and 976.6KiB of memory are free"):
        read_npz(tmp_path / "data.npz", ["x"])


def npy(header: bytes, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


HUGE = b"{'descr': '<f8', 'fortran_order': False, 'shape': (549755813888,)}\n"
DAMAGED = {
    "empty": b"",
    "a header of 4 TB": npy(HUGE),
    "too short": npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (9,)}\n", bytes(8)),
    "negative": npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (-9,)}\n", bytes(8)),
    "objects": npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}\n", bytes(8)),
    "no dtype": npy(b"{'descr': 'what', 'fortran_order': False, 'shape': (1,)}\n", bytes(8)),
    "no dictionary": npy(b"1" * 60, bytes(8)),
    "nested": npy(b"(" * 5000 + b")" * 5000),
    "another version": b"\x93NUMPY\x09\x00" + bytes(100),
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_arrays_are_refused_in_words(content, tmp_path):
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", content)
    with pytest.raises(GuardError, match="cannot be read as an .npz file"):
        read_npz(path, ["x"])


def test_every_byte_range_of_a_file_may_be_damaged(tmp_path):
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=np.arange(100.0))
    good, path = buffer.getvalue(), tmp_path / "data.npz"
    rng = np.random.default_rng(0)
    for start in range(0, len(good), 2):
        path.write_bytes(good[:start] + rng.bytes(4) + good[start + 4 :])
        try:
            found = read_npz(path, ["x"])
        except GuardError:
            continue
        np.testing.assert_array_equal(found["x"], np.arange(100.0))


def test_other_files_are_refused_in_words(tmp_path):
    np.save(tmp_path / "x.npy", ARRAYS["x"])
    with pytest.raises(GuardError, match=r"it is one array \(.npy\)"):
        read_npz(tmp_path / "x.npy", ["x"])
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "x.npy" / "below"):
        with pytest.raises(GuardError, match="cannot be read"):
            read_npz(path, ["x"])
    np.savez(tmp_path / "data.npz", **ARRAYS)
    with pytest.raises(GuardError, match="has the arrays x, y, none, scalar, big; the step also needs z"):
        read_npz(tmp_path / "data.npz", ["x", "z"])


def test_an_array_that_occurs_twice_is_refused(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.zeros(3))
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("x.npy", npy(b"{'descr': '<f8', 'fortran_order': False, 'shape': (1,)}\n", bytes(8)))
    with pytest.raises(GuardError, match="it has an array twice"):
        read_npz(path, ["x"])
