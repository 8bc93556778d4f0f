"""Sharpness-aware minimisation: the gradient at a worse point nearby (Foret et al., 2021, arXiv:2010.01412)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from irongrad.runtime.errors import CaptureError


@dataclass(frozen=True)
class SAM:
    """The first of SAM's two passes, which moves the parameters along the gradient; the second differentiates there.

    `TrainStep.optimizer` is the base optimizer. The step's loss is that of the first pass, its gradient that of the
    second. A forward runs twice in a step, so BatchNorm counts a batch twice, as in the two passes of a script.

    Attributes:
        rho: the length of the move.
        adaptive: whether the move is scaled by the parameters (Kwon et al., 2021, arXiv:2102.11600).

    Raises:
        CaptureError: `rho` is no positive number.
    """

    rho: float = 0.05
    adaptive: bool = False

    def __post_init__(self) -> None:
        if not (isinstance(self.rho, int | float) and math.isfinite(self.rho) and self.rho > 0):
            raise CaptureError(f"SAM's rho is {self.rho!r}; it must be a positive number")

    def moved(
        self, parameters: Mapping[str, torch.Tensor], gradients: Sequence[torch.Tensor | None]
    ) -> dict[str, torch.Tensor]:
        """The parameters after the move; the gradient goes through them as if they were the parameters."""
        known = {n: g for n, g in zip(parameters, gradients, strict=True) if g is not None}
        scales = {n: parameters[n].detach().abs() if self.adaptive else None for n in known}
        weighted = [g if (s := scales[n]) is None else g * s for n, g in known.items()]
        norm = torch.stack([w.norm(p=2) for w in weighted]).norm(p=2)
        length = self.rho / (norm + 1e-12)
        found: dict[str, torch.Tensor] = {}
        for name, gradient in known.items():
            scale = scales[name]
            move = gradient * length if scale is None else gradient * scale * scale * length
            found[name] = parameters[name] + move.detach().to(gradient.dtype)
        return found
