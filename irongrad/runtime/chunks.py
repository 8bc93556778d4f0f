"""`train_steps` in chunks, so that Ctrl-C is noticed while it trains.

Python notices Ctrl-C between two calls of the module only. One call of 300,000 steps would run to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import iree.runtime as ireert
import numpy as np

from irongrad.runtime.arguments import as_array
from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import GuardError
from irongrad.runtime.manifest import EARLY, EntryPoint, Manifest, TensorSpec
from irongrad.runtime.module import Module

# The seconds that a chunk should take: a person does not wait that long after Ctrl-C.
_SECONDS = 0.25
# The steps of the first chunk, when nothing is known about their time.
_FIRST = 16


class Pace:
    """The number of steps that fit into a chunk, measured as chunks run."""

    def __init__(self) -> None:
        self.steps = _FIRST
        self._sizes: list[tuple[int, ...]] = []

    def begin(self, values: Sequence[Any]) -> None:
        """Forget what was measured for steps of other sizes: a larger batch takes longer."""
        sizes = [tuple(getattr(v, "shape", ())[1:]) for v in values]
        if sizes != self._sizes:
            self.steps, self._sizes = _FIRST, sizes

    def chunks(self, count: int) -> Iterator[slice]:
        """Yield the chunks of `count` steps; the caller runs each before it takes the next."""
        start = 0
        while start < count:
            stop = min(start + self.steps, count)
            begun = time.monotonic()
            yield slice(start, stop)
            seconds = max(time.monotonic() - begun, 1e-6)
            self.steps = max(1, int((stop - start) * _SECONDS / seconds))
            start = stop


def train_steps(
    module: Module,
    manifest: Manifest,
    values: Sequence[Any],
    pace: Pace,
    report: Callable[[Array, int], None],
) -> list[Array]:
    """Run `train_steps`, in chunks if it takes long; return the losses, and the values beside them.

    A refused call leaves the state unchanged: a value that the step may refuse is looked for before the first chunk,
    or the state before the first chunk is kept, if only the module can tell.

    Args:
        module: the loaded module.
        manifest: the artifact's manifest.
        values: the stacked inputs and hyperparameters.
        pace: how many steps a chunk takes; it is updated.
        report: called with the losses of each chunk, and the number of its first step.

    Raises:
        GuardError: the module refuses an argument.
    """
    entry = manifest.entry_point("train_steps")
    assert entry is not None
    pace.begin(values)
    count = _step_count(values, module.is_local)
    if count is None or count <= pace.steps or _refused(entry, values) or (undo := _undo(module, manifest)) is None:
        outputs = module.call(entry, values)
        report(outputs[0], 0)
        return outputs
    arrays = [v.to_host() if isinstance(v, ireert.DeviceArray) else as_array(v) for v in values]
    parts: list[list[Array]] = []
    for part in pace.chunks(count):
        try:
            outputs = module.call(entry, [a[part] for a in arrays])
        except GuardError:
            undo()
            raise
        report(outputs[0], part.start)
        parts.append(outputs)
    return [np.concatenate(columns) for columns in zip(*parts, strict=True)]


def _step_count(values: Sequence[Any], local: bool) -> int | None:
    """The number of steps that stacked arguments hold; None if they differ, or are on a device of its own memory."""
    if not local and any(isinstance(v, ireert.DeviceArray) for v in values):
        return None
    shapes = [getattr(v, "shape", ()) for v in values]
    counts: set[int | None] = {shape[0] if shape else None for shape in map(tuple, shapes)}
    return counts.pop() if len(counts) == 1 else None


def _refused(entry: EntryPoint, values: Sequence[Any]) -> bool:
    """Whether the module will refuse a value for the range of its input."""
    return any(leaves_range(spec, value) for spec, value in zip(entry.inputs, values, strict=False))


def leaves_range(spec: TensorSpec, value: Any) -> bool:
    """Whether the module will refuse a value of an input for its range."""
    if spec.minimum is None or spec.maximum is None:
        return False
    array = value.to_host() if isinstance(value, ireert.DeviceArray) else as_array(value)
    outside = (array < spec.minimum) | (array > spec.maximum)
    return bool((outside if spec.exempt is None else outside & (array != spec.exempt)).any())


def _undo(module: Module, manifest: Manifest) -> Callable[[], object] | None:
    """Return a function that puts the state back, if a later chunk may be refused; None if the state cannot be kept.

    A later chunk can be refused for a computed index, or for a limit that depends on the sizes of the call.
    """
    entries = {e.name: e for e in manifest.entry_points}
    limited = any(s.limits for s in entries["train_steps"].inputs)
    if not limited and not any(i.how == EARLY for i in manifest.indices):
        return lambda: None
    if not {"export_state", "import_state"} <= entries.keys():
        return None
    before = module.run(entries["export_state"], ())
    return lambda: module.run(entries["import_state"], before)
