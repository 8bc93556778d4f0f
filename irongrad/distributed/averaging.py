"""What ranks, or clients of a federation, average; and the outer optimizer of DiLoCo.

Douillard et al., "DiLoCo: Distributed low-communication training of language models", arXiv:2311.08105.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from irongrad.runtime.arrays import Array
from irongrad.runtime.errors import ArtifactError, UserError
from irongrad.runtime.manifest import Manifest, Role, StateSpec


def averaged(manifest: Manifest) -> tuple[StateSpec, ...]:
    """Return the tensors that become a mean: parameters and buffers of floats that training changes.

    Raises:
        UserError: one of them is not of float32.
    """
    floats = [s for s in manifest.state if not s.frozen and s.dtype.startswith(("float", "bfloat"))]
    found = tuple(s for s in floats if s.role in (Role.PARAMETER, Role.BUFFER))
    if other := [s for s in found if s.dtype != "float32"]:
        raise UserError(f"{other[0].name} is of {other[0].dtype}; only parameters of float32 can be averaged")
    return found


@dataclass(frozen=True)
class Nesterov:
    """The outer optimizer of DiLoCo: `torch.optim.SGD` with `nesterov=True`. The defaults are the paper's.

    Attributes:
        rate: its learning rate.
        momentum: its momentum.
    """

    rate: float = 0.7
    momentum: float = 0.9

    def step(self, change: Array, momentum: Array) -> tuple[Array, Array]:
        """Return what to add to the parameters, and the new momentum.

        Args:
            change: the mean change of the parameters in a round, float32: a gradient with the opposite sign.
            momentum: that after the round before, of the same shape and dtype; zeros in the first round.
        """
        momentum = np.float32(self.momentum) * momentum + change
        return np.float32(self.rate) * (change + np.float32(self.momentum) * momentum), momentum


def check_momentum(momentum: Mapping[str, Array], specs: Iterable[StateSpec]) -> None:
    """Refuse the momentum in a checkpoint if it is not one of `averaged` tensors.

    Raises:
        ArtifactError: it is that of other tensors.
    """
    if {n: a.shape for n, a in momentum.items()} != {s.name: s.shape for s in specs}:
        raise ArtifactError("the outer momentum in the checkpoint is that of other parameters; take only its state")
