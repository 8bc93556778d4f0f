"""The checkpoints of a training run: the latest, the best, and the last few."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from irongrad.runtime.arguments import as_path, check_whole
from irongrad.runtime.atomic_files import atomic_link
from irongrad.training.average import MovingAverage
from irongrad.training.position import Position
from irongrad.training.sync import Sync

if TYPE_CHECKING:
    from irongrad.runtime.session import Session


@dataclass(frozen=True)
class Checkpoints:
    """Which checkpoints a training run writes.

    `path` has the latest state. The others lie beside it: `NAME.best.SUFFIX`, and `NAME.step-N.SUFFIX` after N steps. A
    run with moving averages also writes `NAME.ema.SUFFIX`: the latest state with the averages as its parameters.

    Attributes:
        path: the file of the latest state.
        every: the number of steps from one checkpoint to the next; one is also written after each epoch and at the end.
        last: the number of checkpoints `NAME.step-N.SUFFIX` to keep; older ones of the run are removed.
        best: whether the state of the best evaluation is kept; with averages it has them as its parameters.
    """

    path: str | os.PathLike[str]
    every: int | None = None
    last: int = 0
    best: bool = False

    def __post_init__(self) -> None:
        as_path(self.path, "a checkpoint")
        for name, value, least in (("every", self.every, 1), ("last", self.last, 0)):
            if value is not None:
                check_whole(f"checkpoints: {name}", value, least)


class Saver:
    """Writes the checkpoints of a run.

    If each rank holds a part of the optimizer's state, all ranks call `save`, and the first one writes.
    """

    def __init__(
        self, session: Session, wanted: Checkpoints, average: MovingAverage | None, sync: Sync | None = None
    ) -> None:
        self._session, self._wanted, self._average, self._sync = session, wanted, average, sync
        self.path = as_path(wanted.path, "a checkpoint")
        self._writes = sync is None or sync.rank == 0

    @property
    def best(self) -> Path:
        """The file of the best state."""
        return _beside(self.path, "best")

    def save(self, position: Position, *, latest: bool, best: bool) -> list[Path]:
        """Write the state as the latest checkpoint, as the best, or as both; return the files that are new.

        Raises:
            NonFiniteError: the state became NaN or infinite, and the session was told to stop then.
            OSError: a file cannot be written; an old one is unchanged.
        """
        evaluated = [self.best] if best else []
        if self._average is not None:
            evaluated += [_beside(self.path, "ema")] if latest else []
            self._save_averages(evaluated)
        elif best and not latest:
            self._session.save(self.best, about=position.about)
        if not latest:
            return evaluated
        beside = {**({} if self._average is None else self._average.tensors)}
        beside |= {} if self._sync is None else self._sync.tensors
        self._session.save(self.path, about=position.about, beside=beside)
        written = [self.path, *evaluated]
        if best and self._average is None:
            self._named(self.path, self.best)
        if self._wanted.last:
            written.append(self._named(self.path, _beside(self.path, f"step-{position.step}")))
            self._prune(position.step)
        return written

    def _save_averages(self, paths: Sequence[Path]) -> None:
        """Write the state with the averages as its parameters. No run goes on from there, so it records no place."""
        assert self._average is not None
        if paths:
            with self._average.in_place():
                self._session.save(paths[0])
            for path in paths[1:]:
                self._named(paths[0], path)

    def _named(self, old: Path, new: Path) -> Path:
        """Give a checkpoint a second name, which the next save of the first leaves alone."""
        if self._writes:
            atomic_link(old, new)
        return new

    def _prune(self, step: int) -> None:
        """Remove all numbered checkpoints but the newest; those of later steps are of another run, and stay."""
        if not self._writes:
            return
        pattern = re.compile(re.escape(self.path.stem) + r"\.step-(\d+)" + re.escape(self.path.suffix))
        found = [(int(m[1]), p) for p in self.path.parent.iterdir() if (m := pattern.fullmatch(p.name))]
        for _, path in sorted(item for item in found if item[0] <= step)[: -self._wanted.last]:
            path.unlink(missing_ok=True)


def _beside(path: Path, word: str) -> Path:
    return path.with_name(f"{path.stem}.{word}{path.suffix}")
