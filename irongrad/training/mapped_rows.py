"""Samples in many files, mapped into memory, of which few pages are resident at a time."""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import GuardError
from irongrad.training.numpy_files import MappedArray

# The bytes of mapped pages that may become resident before they are given back.
_RESIDENT = 128 << 20
# What a page that is read brings with it at most, where the system does not say what is resident. Linux maps a whole
# folio of its cache, of up to 2 MiB.
_AROUND = 2 << 20


class MappedRows:
    """The rows of arrays in files, numbered through all files. The files must not change meanwhile.

    Attributes:
        starts: the number of the first row of each shard, and the number of all rows at the end.
    """

    def __init__(self, shards: Sequence[Mapping[str, MappedArray]], opened: int) -> None:
        """
        Args:
            shards: the arrays of each shard by the input's name; their first dimension counts rows.
            opened: the number of files that may be open at a time.
        """
        self._shards, self._most = list(shards), opened
        counts = [next(iter(shard.values())).shape[0] for shard in self._shards]
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self._open: OrderedDict[Path, mmap.mmap] = OrderedDict()
        self._touched, self._before = 0, _resident_of_files() or 0

    @property
    def samples(self) -> int:
        """The number of rows."""
        return int(self.starts[-1])

    def read(self, rows: Array) -> dict[str, Array]:
        """Return the rows with these numbers, in this order, as new arrays.

        Raises:
            GuardError: a file cannot be read any more.
        """
        shards = np.searchsorted(self.starts, rows, "right") - 1
        first = self._shards[0]
        batch = {n: np.empty((len(rows), *a.shape[1:]), a.dtype) for n, a in first.items()}
        for shard in np.unique(shards):
            chosen = shards == shard
            inside = rows[chosen] - self.starts[shard]
            for name, array in self._shards[shard].items():
                batch[name][chosen] = array.of(self._mapped(array.path))[inside]
        self._touched += len(batch) * len(rows) * _AROUND
        if self._grown() > _RESIDENT:
            self._give_back()
        return batch

    def _mapped(self, path: Path) -> mmap.mmap:
        """The mapped file; of those that are open, that which was not read for longest is closed for a new one."""
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        try:
            with path.open("rb") as file:
                self._open[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise GuardError(f"{path} cannot be read: {error}") from None
        if len(self._open) > self._most:
            self._open.popitem(last=False)  # closed when no array refers to it any more
        return self._open[path]

    def _give_back(self) -> None:
        """Let the system take the pages of this process; the files' own cache keeps them while there is memory."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapped in self._open.values():
                mapped.madvise(mmap.MADV_DONTNEED)
        self._touched, self._before = 0, _resident_of_files() or 0

    def _grown(self) -> int:
        """The bytes of mapped pages that have become resident since they were given back, or an upper bound."""
        resident = _resident_of_files()
        return self._touched if resident is None else resident - self._before


def _resident_of_files() -> int | None:
    """The bytes of files that are resident in this process (proc(5)); None if the system does not say."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as counts:
            return int(counts.read().split()[2]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return None
