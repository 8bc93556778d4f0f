"""What a session does when a loss or the state becomes NaN or infinite."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, Literal, TypeAlias

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import NonFiniteError, UserError

# `warn` goes on after a warning, `stop` raises an error, `ignore` says nothing.
OnNonFinite: TypeAlias = Literal["warn", "stop", "ignore"]
CHOICES: tuple[OnNonFinite, ...] = ("warn", "stop", "ignore")

_SHOWN = 4


class NonFiniteWarning(UserWarning):
    """A loss or the state is NaN or infinite."""


class NonFiniteCheck:
    """Reports values that are NaN or infinite; a loss is reported once, until losses are finite again."""

    def __init__(self, policy: OnNonFinite) -> None:
        """
        Raises:
            UserError: there is no such policy.
        """
        if policy not in CHOICES:
            raise UserError(f"on_nonfinite is {policy!r}; it must be {', '.join(map(repr, CHOICES))}")
        self.policy = policy
        self._reported = False

    def losses(self, entry: str, losses: Array, first: int = 0) -> None:
        """Report the first loss that is NaN or infinite.

        Args:
            entry: the name of the entry point.
            losses: one loss, or those of several steps.
            first: the number of the first of these steps in a call of `train_steps`.

        Raises:
            NonFiniteError: there is one, and the policy is to stop.
        """
        if self.policy == "ignore":
            return
        if losses.ndim == 0 and isfinite(losses):  # nearly every call of `train_step`
            self._reported = False
            return
        bad = np.flatnonzero(~np.isfinite(np.asarray(losses, np.float64).reshape(-1)))
        if not bad.size:
            self._reported = False
            return
        value = np.asarray(losses).reshape(-1)[bad[0]]
        where = f" of step {first + int(bad[0])}" if np.ndim(losses) else ""
        text = f"{entry}: the loss{where} is {value}, so the state may hold NaN or infinite values now"
        if self.policy == "stop":
            raise NonFiniteError(f"{text}. Restore the last checkpoint, and go on with a lower learning rate")
        if not self._reported:
            warnings.warn(text, NonFiniteWarning, stacklevel=_caller())
        self._reported = True

    def state(self, names: Iterable[str], what: str) -> None:
        """Report tensors of the state that became NaN or infinite.

        Args:
            names: their names.
            what: what happens, or is left undone, for the message.

        Raises:
            NonFiniteError: there is one, and the policy is to stop.
        """
        listed = list(names)
        if not listed or self.policy == "ignore":
            return
        more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
        text = f"the state is NaN or infinite in {', '.join(listed[:_SHOWN])}{more}; {what}"
        if self.policy == "stop":
            raise NonFiniteError(text)
        warnings.warn(text, NonFiniteWarning, stacklevel=_caller())


def nonfinite_names(state: Mapping[str, Any]) -> list[str]:
    """Return the names of the tensors that hold a NaN or an infinite value, in order."""
    return [name for name, value in state.items() if not is_finite(np.asarray(value))]


def is_finite(value: Array) -> bool:
    """Return whether no element is NaN or infinite; whole numbers are finite."""
    if value.dtype.kind in "biu":
        return True
    # bfloat16 of ml_dtypes has the kind V.
    return bool(np.isfinite(value.astype(np.float32) if value.dtype.kind == "V" else value).all())


def _caller() -> int:
    """The stack level of the first caller outside of this package, for `warnings.warn`."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("irongrad."):
        level, frame = level + 1, frame.f_back
    return level
