"""The one reader of safetensors files: it agrees with the library, and refuses what readers read differently."""

from __future__ import annotations

import json
import os
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from irongrad.runtime import Session
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.safetensors_file import metadata, read_arrays

ARRAYS = {
    "float32": np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3),
    "bfloat16": np.arange(4).astype(ml_dtypes.bfloat16),
    "int64": np.array(-7, np.int64),
    "bool": np.array([True, False]),
    "empty": np.zeros((0, 3), np.float16),
}


def with_header(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_it_reads_what_the_library_writes(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(safetensors.numpy.save(ARRAYS, metadata={"note": "hello"}))
    found, header = read_arrays(path)
    assert header.metadata == {"note": "hello"}
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(found[name], array)
        assert found[name].dtype == array.dtype


def entry(shape=(2,), place=(0, 8), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(place)}


DAMAGED = {
    "empty": b"",
    "short": b"1234",
    "no JSON": with_header(b"{"),
    "no table": with_header([1]),
    "longer header than file": struct.pack("<Q", 1 << 42) + b"{}",
    "nested": with_header(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "no UTF-8": with_header(b'{"\xff": 1}'),
    "twice": with_header(b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)),
    "no dtype": with_header({"a": {"shape": [2], "data_offsets": [0, 8]}}, bytes(8)),
    "unknown dtype": with_header({"a": entry(dtype="F7")}, bytes(8)),
    "negative": with_header({"a": entry((-2,))}, bytes(8)),
    "fraction": with_header({"a": entry((2.0,))}, bytes(8)),
    "truth": with_header({"a": entry((True,), (0, 4))}, bytes(4)),
    "size": with_header({"a": entry((3,))}, bytes(8)),
    "huge": with_header({"a": entry((1 << 40,), (0, 4 << 40))}, bytes(8)),
    "gap": with_header({"a": entry(place=(4, 12))}, bytes(12)),
    "overlap": with_header({"a": entry(), "b": entry(place=(4, 12))}, bytes(12)),
    "too long": with_header({"a": entry()}, bytes(9)),
    "too short": with_header({"a": entry()}, bytes(7)),
    "metadata": with_header({"__metadata__": {"a": 1}, "a": entry()}, bytes(8)),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_damaged_files_are_refused_in_words(data, tmp_path, mlp_artifact):
    path = tmp_path / "file"
    path.write_bytes(data)
    for read in (read_arrays, Session(mlp_artifact).restore, lambda p: Session(mlp_artifact, checkpoint=p)):
        with pytest.raises(ArtifactError, match="is not a readable safetensors file"):
            read(path)


def test_every_flipped_bit_of_a_checkpoint_is_found(session, tmp_path):
    path = tmp_path / "state.safetensors"
    session.save(path)
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    before = session.state()
    for place in rng.integers(0, 8 * len(good), 300):
        data = bytearray(good)
        data[place // 8] ^= 1 << (place % 8)
        path.write_bytes(data)
        for read in (session.restore, lambda p: Session(session.directory, checkpoint=p)):
            try:
                read(path)
            except ArtifactError:
                continue
            # A bit of the checksum's own name: the file is as one from elsewhere, and its tensors are whole.
            assert place < 8 * 1000
            for name, value in session.state().items():
                np.testing.assert_array_equal(value, before[name])


def test_a_file_from_elsewhere_needs_no_checksum(session, tmp_path):
    path = tmp_path / "state"
    path.write_bytes(safetensors.numpy.save(session.state()))
    session.restore(path)
    Session(session.directory, checkpoint=path)


@pytest.mark.parametrize("name", ["state", "state.bin", "state.irpa.bak", "ü.safetensors", ".hidden"])
def test_a_checkpoint_may_have_any_name(session, batches, tmp_path, name):
    session.train_step(**batches[0])
    session.save(tmp_path / name)
    other = Session(session.directory, checkpoint=tmp_path / name)
    other.restore(tmp_path / name)
    for key, value in session.state().items():
        np.testing.assert_array_equal(other.state()[key], value)


@pytest.mark.parametrize("name", ["irongrad/steps", "optimizer/step/0.weight"])
def test_a_count_below_zero_is_refused(session, tmp_path, name):
    state = session.state()
    state[name] = np.full_like(state[name], -1)
    path = tmp_path / "state.safetensors"
    path.write_bytes(safetensors.numpy.save(state, metadata=metadata(state.items(), {})))
    for read in (session.restore, lambda p: Session(session.directory, checkpoint=p)):
        with pytest.raises(ArtifactError, match=f"{name} is -1.*cannot be below 0"):
            read(path)
    with pytest.raises(ArtifactError, match="cannot be below 0"):
        session.load_state(state)


def test_a_pipe_is_refused_at_once(session, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for read in (read_arrays, session.restore, lambda p: Session(session.directory, checkpoint=p)):
        with pytest.raises(ArtifactError, match="it is no file"):
            read(tmp_path / "pipe")
