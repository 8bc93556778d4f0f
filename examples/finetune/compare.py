"""The held-out accuracy of an exported adapter in PEFT, beside that of the artifact that trained it.

python compare.py ARTIFACT CHECKPOINT ADAPTER
"""

from __future__ import annotations

import sys

import minilm
import news
import numpy as np
import torch
from peft import PeftModel

from irongrad.runtime import load


def main(artifact: str, checkpoint: str, adapter: str) -> None:
    """Print both accuracies, and the largest difference of a logit."""
    _, held_out = news.tokens()
    model = PeftModel.from_pretrained(minilm.classifier(), adapter).eval()
    hits: list[tuple[np.ndarray, np.ndarray]] = []
    furthest = 0.0
    with load(artifact, checkpoint=checkpoint) as session, torch.no_grad():
        rows = next(s.shape[0] for s in session.entry("predict").inputs)
        assert isinstance(rows, int)
        for start in range(0, len(held_out["labels"]) - rows + 1, rows):
            part = {name: array[start : start + rows] for name, array in held_out.items()}
            labels = part.pop("labels")
            found = session.predict(**part)
            compiled = found if isinstance(found, np.ndarray) else found["logits"]
            peft = model(**{name: torch.from_numpy(array) for name, array in part.items()}).logits.numpy()
            furthest = max(furthest, float(np.abs(compiled - peft).max()))
            hits.append((compiled.argmax(-1) == labels, peft.argmax(-1) == labels))
    ours, theirs = np.concatenate(hits, axis=1)
    print(f"accuracy on held-out news: {ours.mean():.1%} compiled, {theirs.mean():.1%} in PEFT")
    print(f"largest difference of a logit: {furthest:.0e}")


if __name__ == "__main__":
    main(*sys.argv[1:])
