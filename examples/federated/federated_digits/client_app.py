"""The client: it trains on the digits in the file that its node's configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from irongrad.integrations import flower
from irongrad.training import Arrays, InOrder

BATCH = 32


def arrays(node: Mapping[str, Any], prefix: str) -> dict[str, np.ndarray]:
    """Return this node's `x` and `y` from its file, where their names begin with `prefix`."""
    with np.load(node["data"]) as file:
        return {name: file[f"{prefix}{name}"] for name in ("x", "y")}


app = flower.client(
    lambda node: node["artifact"],
    lambda node: Arrays(arrays(node, "train_"), BATCH),
    held_out=lambda node: InOrder(arrays(node, "held_out_"), BATCH, partial=False),
    epochs=1,
)
