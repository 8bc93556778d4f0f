"""Small agreements between the ranks of a run."""

from __future__ import annotations

import numpy as np

from irongrad.runtime.ranks.communicator import Communicator, as_bytes, as_text

_TEXT = 80


def agreed_reason(ranks: Communicator, reason: str | None) -> str | None:
    """Return why the run shall stop, if any rank has a reason; that of the lowest such rank."""
    texts = ranks.gather(as_bytes(reason or "", _TEXT))
    return next((as_text(row) for row in texts if row.any()), None)


def all_have(ranks: Communicator, has: bool) -> bool:
    """Whether every rank has something."""
    return bool(ranks.gather(np.array([has], np.int64)).all())
