"""The array type for type hints."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

# Any shape and dtype.
Array: TypeAlias = np.ndarray[Any, Any]
