"""Samples in many .npz or .npy files, larger than memory, in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import GuardError
from irongrad.runtime.manifest import EntryPoint, Manifest
from irongrad.training.inputs import check_samples, training_entry
from irongrad.training.mapped_rows import MappedRows
from irongrad.training.means import Batch
from irongrad.training.numpy_files import MappedArray, find_in_npy, find_in_npz
from irongrad.training.sources import Shuffled

# The number of shards whose samples are mixed, and which are open.
_MIXED = 8


class Shards(Shuffled):
    """Samples in files that are mapped into memory: `Arrays` for data that is larger than memory.

    The order is that of `Arrays` if there are at most 8 shards. Of more, the seed and the epoch decide the order of the
    shards, and 8 at a time are mixed. So a file is read in one part of an epoch only.
    """

    def __init__(self, rows: MappedRows, batch: int, *, accumulate: int = 1, seed: int = 0) -> None:
        """
        Args:
            rows: the samples, from `map_shards`.
            batch: the number of samples in a call of the step.
            accumulate: the number of calls in one step.
            seed: the seed of the order of the samples.

        Raises:
            GuardError: there are fewer samples than a step takes.
            UserError: a number is out of its range.
        """
        self._mapped = rows
        self._shards = len(rows.starts) - 1
        self._orders: dict[tuple[int, int], Array] = {}
        super().__init__(rows.samples, batch, accumulate, seed)

    @property
    def order(self) -> Mapping[str, int]:
        """As for arrays in memory; and the number of shards, where the order depends on it."""
        return {**super().order, **({"shards": self._shards} if self._shards > _MIXED else {})}

    def _rows(self, epoch: int, start: int, stop: int) -> Array:
        groups = self._groups(epoch)
        sizes = [sum(self._size(shard) for shard in group) for group in groups]
        ends = np.cumsum(sizes)
        parts = []
        for number in range(int(np.searchsorted(ends, start, "right")), len(groups)):
            begin = int(ends[number]) - sizes[number]
            if begin >= stop:
                break
            order = self._order_of(epoch, number, sizes[number])[max(start - begin, 0) : stop - begin]
            parts.append(self._numbers(groups[number], order))
        return np.concatenate(parts)

    def _numbers(self, group: Sequence[int], order: Array) -> Array:
        """The numbers of samples, among all shards, from their numbers within a group."""
        ends = np.cumsum([self._size(shard) for shard in group])
        place = np.searchsorted(ends, order, "right")
        begins = self._mapped.starts[np.asarray(group)]
        lengths = np.diff(ends, prepend=0)
        numbers: Array = begins[place] + order - (ends - lengths)[place]
        return numbers

    def _groups(self, epoch: int) -> list[Sequence[int]]:
        """The shards that are mixed with each other, in the order of the epoch."""
        if self._shards <= _MIXED:
            return [range(self._shards)]
        shards = np.random.default_rng((self.seed, epoch)).permutation(self._shards)
        return [shards[first : first + _MIXED].tolist() for first in range(0, self._shards, _MIXED)]

    def _order_of(self, epoch: int, number: int, size: int) -> Array:
        """The order of the samples of a group, numbered within it; those of the last two groups are kept."""
        key = (epoch, number)
        if key not in self._orders:
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            seed = key[:1] if self._shards <= _MIXED else (epoch, 1 + number)
            order = np.random.default_rng((self.seed, *seed)).permutation(size)
            self._orders[key] = order.astype(np.int32) if size < 1 << 31 else order
        return self._orders[key]

    def _size(self, shard: int) -> int:
        return int(self._mapped.starts[shard + 1] - self._mapped.starts[shard])

    def _read(self, rows: Array) -> Batch:
        return self._mapped.read(rows)


def map_shards(paths: Sequence[Path] | Mapping[str, Sequence[Path]], manifest: Manifest) -> MappedRows:
    """Map the files of a data set; only their headers are read.

    Args:
        paths: .npz files with one array per input; or, for each input by name, .npy files, of which those at the same
            place belong together.
        manifest: the manifest of the step (`session.manifest`).

    Raises:
        GuardError: a file cannot be mapped, or its arrays are not what the step takes or not like those of the others.
    """
    entry = training_entry(manifest)
    names = [s.name for s in entry.inputs]
    shards: list[dict[str, MappedArray]] = []
    for label, shard in _found(paths, names):
        check_samples(shard, entry, label)
        if shards:
            _check_alike(shard, shards[0], entry, label)
        shards.append(shard)
    if not shards:
        raise GuardError("there are no files of samples")
    files = 1 if not isinstance(paths, Mapping) else len(names)
    return MappedRows(shards, opened=2 * _MIXED * files)


def _found(
    paths: Sequence[Path] | Mapping[str, Sequence[Path]], names: Sequence[str]
) -> list[tuple[str, dict[str, MappedArray]]]:
    """The arrays of each shard, and what to call the shard in a message."""
    if not isinstance(paths, Mapping):
        return [(str(path), find_in_npz(path, names)) for path in paths]
    if set(paths) != set(names):
        given, wanted = ", ".join(paths), ", ".join(names)
        raise GuardError(f"there are files for the inputs {given}, and the step takes {wanted}")
    if len({len(files) for files in paths.values()}) > 1:
        counts = ", ".join(f"{name}: {len(files)}" for name, files in paths.items())
        raise GuardError(f"the inputs have different numbers of files ({counts})")
    rows = zip(*(paths[name] for name in names), strict=True)
    return [(str(row[0]), {n: find_in_npy(path) for n, path in zip(names, row, strict=True)}) for row in rows]


def _check_alike(
    shard: Mapping[str, MappedArray], first: Mapping[str, MappedArray], entry: EntryPoint, label: str
) -> None:
    """Refuse samples of other sizes than those of the first shard: a batch has samples of several shards."""
    for spec in entry.inputs:
        here, there = shard[spec.name], first[spec.name]
        if here.shape[1:] != there.shape[1:]:
            raise GuardError(
                f"{label}: the samples of {spec.name} are {list(here.shape[1:])}, and {list(there.shape[1:])} in "
                f"{there.path}; pad them to one size"
            )


def matching(patterns: Sequence[str], inputs: Sequence[str]) -> list[Path] | dict[str, list[Path]]:
    """Return the files that patterns match, each pattern's in the order of their names.

    Args:
        patterns: paths with wildcards; or `NAME=PATTERN` for each input, for .npy files.
        inputs: the names of the inputs.

    Raises:
        GuardError: a pattern matches no file, or a file is matched twice.
    """
    named: dict[str, list[Path]] = {}
    plain: list[Path] = []
    for pattern in patterns:
        name, separator, rest = pattern.partition("=")
        is_named = bool(separator) and name in inputs and not os.path.exists(pattern)
        files = _files(rest if is_named else pattern)
        if is_named:
            named.setdefault(name, []).extend(files)
        else:
            plain += files
    if named and plain:
        raise GuardError(f"{plain[0]} is for all inputs, and others are for one; give NAME=FILES for each input")
    for files in (plain, *named.values()):
        if twice := [p for p in files if files.count(p) > 1]:
            raise GuardError(f"{twice[0]} is given twice")
    return named or plain


def _files(pattern: str) -> list[Path]:
    if os.path.exists(pattern):
        return [Path(pattern)]
    found = sorted(glob.glob(pattern, recursive=True))
    if not found and not glob.has_magic(pattern):
        return [Path(pattern)]  # its reader says what is wrong with it
    if not found:
        raise GuardError(f"no file matches {pattern}")
    return [Path(path) for path in found]
