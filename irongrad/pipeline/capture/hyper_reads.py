"""Refuse a forward or an `after_step` that reads a hyperparameter of an optimizer.

`optimizer.param_groups[0]["lr"]` is a Python number, which a trace keeps. But each call of a compiled step may have
another learning rate, and verification compares steps at that of the optimizer.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from irongrad.diagnostics.source_lines import here, is_of_a_model
from irongrad.runtime.errors import CaptureError
from irongrad.step.hyperparameters import hyperparameters


class _Watched(dict[str, Any]):
    """A parameter group whose hyperparameters a model may not read.

    Attributes:
        free: the keys of these.
    """

    free: Collection[str] = ()

    def __getitem__(self, key: str) -> Any:
        self._check(key, sys._getframe(1))
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or `default`."""
        self._check(key, sys._getframe(1))
        return super().get(key, default)

    def _check(self, key: str, reader: FrameType) -> None:
        if key in self.free and is_of_a_model(reader.f_code.co_filename):
            raise CaptureError(
                f"{here()}\n  the step reads {key!r} of the optimizer outside of the update. A compiled step would "
                "keep its number, and each call may have another. Give the number as an input of the step, or to "
                "after_step as a parameter with a default"
            )


@contextmanager
def hyper_reads_refused(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[None]:
    """While open, a read of a hyperparameter of `optimizers` in the code of a model raises CaptureError."""
    keys = {(hyper.group, hyper.key) for hyper in hyperparameters(optimizers)}
    before = [(optimizer.param_groups, [*optimizer.param_groups]) for optimizer in optimizers]
    number = 0
    for groups, own in before:
        for place, group in enumerate(own):
            groups[place] = watched = _Watched(group)
            watched.free = frozenset(key for of, key in keys if of == number)
            number += 1
    try:
        yield
    finally:
        for groups, own in before:
            groups[:] = own
