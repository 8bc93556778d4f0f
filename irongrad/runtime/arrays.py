"""What arrays are called in type hints."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

# Of any shape and dtype.
Array: TypeAlias = np.ndarray[Any, Any]
