"""Where a training run stands: recorded in each checkpoint, so that a resumed run goes on as the first would have."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import isnan
from typing import TYPE_CHECKING, Any

from irongrad.runtime.arguments import as_path
from irongrad.runtime.arrays import Array
from irongrad.runtime.checkpoint import AVERAGE, OUTER
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import steps_of
from irongrad.runtime.safetensors_file import opened

if TYPE_CHECKING:
    from irongrad.runtime.session import Session

# What a checkpoint says about the run that wrote it.
_RECORD = "training"


@dataclass(frozen=True)
class Position:
    """A place in a training run.

    Attributes:
        step: the number of steps so far.
        epoch: the number of whole epochs so far; None if only the number of steps is known.
        batch: the number of steps so far in the epoch that has begun.
        order: what the order of the samples depends on beside the epoch, such as the seed; empty if the data does not
            say.
        best: the best value of an evaluation so far; None if there was none.
        reference: the value that an evaluation must improve, so that training goes on; None if there was no evaluation.
        waited: the number of evaluations since then.
        name: the name of the step, among several over one state.
        outer: the momentum of an outer optimizer, by the parameter's name; none without one.
        averages: the moving averages of the trained parameters, by the parameter's name; none without averages.
    """

    step: int = 0
    epoch: int | None = None
    batch: int = 0
    order: Mapping[str, int] | None = None
    best: float | None = None
    reference: float | None = None
    waited: int = 0
    name: str = ""
    outer: Mapping[str, Array] = field(default_factory=dict, repr=False, compare=False)
    averages: Mapping[str, Array] = field(default_factory=dict, repr=False, compare=False)

    @property
    def about(self) -> dict[str, Any]:
        """The record in a checkpoint's metadata."""
        record = asdict(replace(self, averages={}, outer={}))
        return {_RECORD: {n: v for n, v in record.items() if n not in ("averages", "outer")}}


def position_of(session: Session) -> Position:
    """The position of a session that no record tells about: its number of updates."""
    return Position(step=int(session.state()[steps_of(session.step_name)]), name=session.step_name)


def read_position(path: str | os.PathLike[str], session: Session) -> Position | None:
    """Read where the run stood that wrote the checkpoint at `path`.

    Returns:
        The position. None if the checkpoint has no record: `session.save` or another step wrote it.

    Raises:
        ArtifactError: the file is missing or damaged, or its record is.
    """
    with opened(as_path(path, "a checkpoint")) as file:
        record = file.header.about.get(_RECORD)
        averages, outer = (
            {n.removeprefix(prefix): file.array(n) for n in file.header.tensors if n.startswith(prefix)}
            for prefix in (AVERAGE, OUTER)
        )
    if record is None or (isinstance(record, dict) and record.get("name") != session.step_name):
        return None
    try:
        return replace(_checked(Position(**record)), averages=averages, outer=outer)
    except (TypeError, ValueError):
        raise ArtifactError(f"{path}: its record of the training run is damaged; take only its state") from None


def restore(session: Session, path: str | os.PathLike[str]) -> Position:
    """Restore the state in a checkpoint, and return where the run stood that wrote it, for `train(start=...)`.

    Raises:
        ArtifactError: the file is missing, damaged, or of another model or optimizer; the state is unchanged.
    """
    position = read_position(path, session)
    session.restore(path)
    return position_of(session) if position is None else position


def _checked(position: Position) -> Position:
    counts = [position.step, position.batch, position.waited, *([] if position.epoch is None else [position.epoch])]
    numbers = [v for v in (position.best, position.reference) if v is not None]
    order = position.order
    whole = all(type(n) is int and n >= 0 for n in (*counts, *(order or {}).values()))
    if not whole or not all(type(v) is float and not isnan(v) for v in numbers):
        raise ValueError
    return replace(position, order=None if order is None else dict(order))
