"""The proximal term of FedProx: mu / 2 * ||w - w_global||^2, added to the loss of each local step.

Li et al., "Federated optimization in heterogeneous networks", MLSys 2020, arXiv:1812.06127.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import UserError
from irongrad.runtime.manifest import SCALE
from irongrad.runtime.session import Session


@dataclass(frozen=True)
class Proximal:
    """Adds the gradient of the term, mu * (w - w_global), to the gradients of a step before they are clipped and used.

    So the term needs no artifact of its own: any that accumulates gradients will do.

    Attributes:
        mu: the weight of the term.
        anchor: the parameters that the server sent, by name.
    """

    mu: float
    anchor: Mapping[str, Array]

    def __call__(self, session: Session) -> None:
        """Change the accumulated gradients of a session."""
        sums, count = session.gradients()
        state = session.state({*sums, SCALE})
        # Accumulated gradients are those of the scaled loss, and there are `count` of them in each sum.
        weight = np.float32(self.mu * count * float(state.get(SCALE, 1.0)))
        session.load_gradients({n: g + weight * (state[n] - self.anchor[n]) for n, g in sums.items()}, count)


def proximal(mu: Any, anchor: Mapping[str, Array], session: Session) -> Proximal | None:
    """Return the proximal term that a server asks for; None if its weight is 0.

    Raises:
        UserError: the weight is no number of 0 or more, or the artifact does not accumulate gradients.
    """
    if isinstance(mu, bool) or not isinstance(mu, int | float) or not (isfinite(mu) and mu >= 0):
        raise UserError(f"the server's proximal-mu is {mu!r:.60}: it must be a number of 0 or more")
    if mu == 0:
        return None
    needed = ("grad_step", "apply_step", "export_gradients", "import_gradients")
    if missing := [name for name in needed if session.manifest.entry_point(name) is None]:
        raise UserError(f"the server asks for FedProx, and the artifact was compiled without {', '.join(missing)}")
    return Proximal(float(mu), anchor)
