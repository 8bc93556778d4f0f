"""The array type for type hints."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

# Any shape and dtype.
Array: TypeAlias = np.ndarray[Any, Any]

_SHOWN = 4  # values of an array in a message


def shown_values(array: Array) -> str:
    """Return the values of an array as text; of many, the first few."""
    flat = array.reshape(-1)
    first = ", ".join(map(str, flat[:_SHOWN].tolist()))
    if array.ndim == 0:
        return first
    return f"[{first}, …]" if flat.size > _SHOWN else f"[{first}]"
