"""Divide the digits among clients: `split.py DIRECTORY [CLIENTS]` writes `client0.npz` and so on."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from digits import load_digits


def main(directory: Path, clients: int = 2) -> None:
    """Give each client training and held-out digits of its own."""
    directory.mkdir(parents=True, exist_ok=True)
    parts = dict(zip(("train_", "held_out_"), load_digits(), strict=True))
    for client in range(clients):
        own = {f"{part}{n}": a[client::clients] for part, arrays in parts.items() for n, a in arrays.items()}
        np.savez(directory / f"client{client}.npz", **own)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
