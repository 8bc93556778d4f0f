"""Samples in many mapped files: their order, resuming, bounded memory, and what is refused."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from irongrad.runtime import Session
from irongrad.runtime.errors import GuardError
from irongrad.training import Arrays, Checkpoints, InOrder, Shards, map_shards, matching, restore, train
from irongrad.training.events import Stepped
from irongrad.training.numpy_files import find_in_npz

Arrays_ = dict[str, np.ndarray]


@pytest.fixture
def arrays() -> Arrays_:
    """125 samples, of which x[0] is the number."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((125, 8)).astype(np.float32)
    x[:, 0] = np.arange(125)
    return {"x": x, "y": rng.integers(0, 4, 125)}


def split(arrays: Arrays_, folder: Path, count: int) -> list[Path]:
    """Write shards of different lengths, one of them empty."""
    cuts = np.sort(np.random.default_rng(1).integers(0, 125, count - 2))
    bounds = [0, *cuts, 125, 125]
    paths = [folder / f"shard-{n:02}.npz" for n in range(count)]
    for path, start, stop in zip(paths, bounds[:-1], bounds[1:], strict=True):
        np.savez(path, **{n: a[start:stop] for n, a in arrays.items()}, unused=np.zeros(3))
    return paths


def seen(source: Any, epoch: int, start: int = 0) -> list[int]:
    return [int(n) for parts in source.epoch(epoch, start) for part in parts for n in part["x"][:, 0]]


def test_the_order_of_a_few_shards_is_that_of_one_file(session: Session, arrays: Arrays_, tmp_path: Path) -> None:
    ours = Shards(map_shards(split(arrays, tmp_path, 8), session.manifest), 6, seed=3)
    whole = Arrays(arrays, 6, seed=3)
    assert ours.order == whole.order
    for epoch in range(3):
        pairs = zip(ours.epoch(epoch, 0), whole.epoch(epoch, 0), strict=True)
        for (mine,), (theirs,) in pairs:
            for name, value in theirs.items():
                np.testing.assert_array_equal(mine[name], value)
                assert mine[name].dtype == value.dtype


def test_many_shards_are_shuffled_within_and_across(session: Session, arrays: Arrays_, tmp_path: Path) -> None:
    paths = split(arrays, tmp_path, 30)
    ours = Shards(map_shards(paths, session.manifest), 5, accumulate=5, seed=3)
    orders = [seen(ours, epoch) for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(125))
        assert sum(b == a + 1 for a, b in pairwise(order)) < 20
    assert orders[0] != orders[1] != orders[2]
    again = Shards(map_shards(paths, session.manifest), 5, accumulate=5, seed=3)
    assert seen(again, 1, 2) == orders[1][50:]  # alone, from the middle
    assert seen(Shards(map_shards(paths, session.manifest), 5, accumulate=5, seed=4), 0) != orders[0]


@pytest.mark.parametrize("count", [3, 30])
def test_a_run_over_shards_resumes_to_the_bit(mlp_artifact: Path, arrays: Arrays_, tmp_path: Path, count: int) -> None:
    paths, state = split(arrays, tmp_path, count), tmp_path / "state.safetensors"

    def run(session: Session, steps: int, **options: Any) -> list[float]:
        losses: list[float] = []
        train(
            session, Shards(map_shards(paths, session.manifest), 6, seed=2), steps=steps,
            callbacks=[lambda e: losses.append(e.loss) if isinstance(e, Stepped) else None], **options,
        )  # fmt: skip
        return losses

    whole = run(Session(mlp_artifact), 45)
    first = run(Session(mlp_artifact), 27, checkpoints=Checkpoints(state))
    session = Session(mlp_artifact)
    assert first + run(session, 45, start=restore(session, state)) == whole


def test_every_kind_of_file_gives_the_same_arrays(session: Session, arrays: Arrays_, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=arrays["x"].astype(">f4"), y=np.asfortranarray(arrays["y"]))
    np.savez(tmp_path / "b.npz", x=np.asfortranarray(arrays["x"]), y=arrays["y"].astype(">i8"))
    for name, array in arrays.items():
        np.save(tmp_path / f"{name}-0.npy", array)
        np.save(tmp_path / f"{name}-1.npy", np.asfortranarray(array))
    npy = matching([f"x={tmp_path}/x-*.npy", f"y={tmp_path}/y-*.npy"], ["x", "y"])
    for files in (matching([f"{tmp_path}/*.npz"], ["x", "y"]), npy):
        rows = map_shards(files, session.manifest)
        batches = list(InOrder(rows, 50, partial=True))
        assert [len(b["x"]) for b in batches] == [50] * 5
        for name, array in arrays.items():
            both = np.concatenate([b[name] for b in batches])
            np.testing.assert_array_equal(both, np.concatenate([array, array]))
            assert both.dtype == array.dtype


MEMORY = """
import sys
from pathlib import Path
import numpy as np
from irongrad.runtime import load
from irongrad.training import Prefetched, Shards, map_shards

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

session = load(sys.argv[1])
rows = map_shards(sorted(Path(sys.argv[2]).glob("*.npz")), session.manifest)
source = Shards(rows, 6)
if ahead := int(sys.argv[3]):
    source = Prefetched(source, ahead)
before = most = resident()
total = sum(rows.starts[-1:]) * 40
read = 0
for parts in source.epoch(0, 0):
    read += sum(a.nbytes for part in parts for a in part.values())
    most = max(most, resident())
print(most - before, total, read)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("count", "ahead"), [(1, 0), (12, 4)])
def test_memory_is_bounded(mlp_artifact: Path, tmp_path: Path, count: int, ahead: int) -> None:
    samples = 8_000_000 // count
    for number in range(count):
        x = np.ones((samples, 8), np.float32)
        np.savez(tmp_path / f"{number:02}.npz", x=x, y=np.zeros(samples, np.int64))
    script = MEMORY.replace("source.epoch(0, 0)", "(p for p, _ in zip(source.epoch(0, 0), range(40000)))")
    done = subprocess.run(
        [sys.executable, "-c", script, mlp_artifact, tmp_path, str(ahead)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    grown, total, read = map(int, done.stdout.split())
    assert total == samples * count * 40
    assert read == 40000 * 6 * 40
    # 128 MiB of the files and the batch that is read, and 12 bytes a sample of a group while its order is made.
    group = total // 40 * min(1, 8 / count)
    assert grown < (128 << 20) + (16 << 20) + 12 * group, f"{grown >> 20} MiB"
    assert total > 1.3 * grown


def test_few_files_are_open_at_a_time(session: Session, arrays: Arrays_, tmp_path: Path) -> None:
    paths = split(arrays, tmp_path, 120)
    rows = map_shards(paths, session.manifest)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 24, hard))
    try:
        assert sorted(seen(Shards(rows, 5), 0)) == list(range(125))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _write(folder: Path, number: int, **arrays: Any) -> None:
    np.savez(folder / f"{number}.npz", **{"x": np.zeros((9, 8), np.float32), "y": np.zeros(9, np.int64), **arrays})


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "compressed": (
        lambda f: np.savez_compressed(f / "1.npz", x=np.zeros((9, 8), np.float32), y=np.zeros(9, np.int64)),
        "x is compressed, and cannot be mapped; write the file with numpy.savez",
    ),
    "other dtype": (lambda f: _write(f, 1, y=np.zeros(9, np.int32)), r"1.npz: y is int32\[9\], the step takes int64"),
    "lengths": (lambda f: _write(f, 1, y=np.zeros(8, np.int64)), r"1.npz: the arrays have different numbers"),
    "missing": (lambda f: np.savez(f / "1.npz", x=np.zeros((9, 8), np.float32)), "the step also needs y"),
    "a single number": (lambda f: _write(f, 1, y=np.int64(3)), "y is a single number"),
    "objects": (lambda f: _write(f, 1, y=np.array([None] * 9)), "y holds Python objects"),
    "no archive": (lambda f: (f / "1.npz").write_bytes(b"PK"), "cannot be read as an .npz file"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_shards_that_cannot_be_used_are_refused(session: Session, tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    _write(tmp_path, 0)
    make(tmp_path)
    with pytest.raises(GuardError, match=message):
        map_shards(matching([f"{tmp_path}/*.npz"], ["x", "y"]), session.manifest)


def test_patterns_that_match_no_data_are_refused(session: Session, tmp_path: Path) -> None:
    _write(tmp_path, 0)
    np.save(tmp_path / "x.npy", np.zeros((9, 8), np.float32))
    names = ["x", "y"]
    for patterns, message in (
        ([f"{tmp_path}/*.np"], "no file matches"),
        ([f"{tmp_path}/0.npz", f"{tmp_path}/*.npz"], "0.npz is given twice"),
        ([f"{tmp_path}/0.npz", f"x={tmp_path}/x.npy"], "give NAME=FILES for each input"),
    ):
        with pytest.raises(GuardError, match=message):
            matching(patterns, names)
    with pytest.raises(GuardError, match="files for the inputs x, and the step takes x, y"):
        map_shards(matching([f"x={tmp_path}/x.npy"], names), session.manifest)
    with pytest.raises(GuardError, match="there are no files"):
        map_shards([], session.manifest)
    x = tmp_path / "x.npy"
    with pytest.raises(GuardError, match=r"different numbers of files \(x: 2, y: 1\)"):
        map_shards({"x": [x, x], "y": [x]}, session.manifest)


def test_a_file_that_vanished_is_refused(session: Session, arrays: Arrays_, tmp_path: Path) -> None:
    paths = split(arrays, tmp_path, 4)
    rows = map_shards(paths, session.manifest)
    for path in paths:
        path.unlink()
    with pytest.raises(GuardError, match=r"shard-\d+.npz cannot be read"):
        seen(Shards(rows, 5), 0)


def test_damaged_files_are_refused_or_lie_within_the_file(arrays: Arrays_, tmp_path: Path) -> None:
    """Nothing that a file says makes us read beyond its end, which would end the process (SIGBUS)."""
    path = tmp_path / "a.npz"
    np.savez(path, x=arrays["x"][:9], y=arrays["y"][:9])
    good, rng = path.read_bytes(), np.random.default_rng(0)
    refused = 0
    for number in range(600):
        data = bytearray(good)
        where = rng.integers(len(data))
        data[where] = rng.integers(256)
        if number % 3 == 0:  # a length in a header
            where = data.index(b"PK\x03\x04") + 26 + rng.integers(4)
            data[where] ^= 1 << rng.integers(8)
        if number % 7 == 0:
            del data[rng.integers(len(data)) :]
        path.write_bytes(data)
        try:
            found = find_in_npz(path, ["x", "y"])
        except GuardError:
            refused += 1
            continue
        size = path.stat().st_size
        assert all(0 <= a.start <= a.start + a.header.nbytes <= size for a in found.values())
    assert refused > 100
