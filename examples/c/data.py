"""Write the training digits as raw batches for train.c: python data.py digits.bin"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from digits import BATCH, load_digits


def main(path: Path) -> None:
    """Write each whole batch: x float32 [32, 1, 8, 8], then y int64 [32]."""
    train, _ = load_digits()
    with path.open("wb") as file:
        for start in range(0, len(train["x"]) - BATCH + 1, BATCH):
            for name in ("x", "y"):
                file.write(train[name][start : start + BATCH].tobytes())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
