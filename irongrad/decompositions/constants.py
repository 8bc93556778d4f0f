"""Tables that are known when a decomposition is traced."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


def constant(values: Any, dtype: torch.dtype) -> torch.Tensor:
    """A constant of the graph.

    Made outside of every mode: under tracing, `torch.tensor` leaves in-place operators on the constant in the graph.
    """
    with _disable_current_modes():
        return torch.tensor(values, dtype=dtype)
