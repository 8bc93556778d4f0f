"""Compile one model of the zoo and print the outcome as a line of JSON: one.py NAME DIRECTORY."""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from zoo import MODELS

import irongrad as ig
from irongrad.runtime.errors import IronGradError


def outcome(name: str, directory: Path) -> dict[str, Any]:
    """Compile the model, verified against eager float64 over two or three training steps."""
    torch.manual_seed(0)
    step = MODELS[name]()
    parameters = sum(p.numel() for p in step.model.parameters())
    start = time.perf_counter()
    try:
        artifact = ig.compile(step, directory / "artifact", entry_points=["train_step", "predict"], cache=False)
    except IronGradError as error:
        return {"name": name, "verdict": type(error).__name__, "detail": str(error), "parameters": parameters}
    seconds = time.perf_counter() - start
    target = artifact.manifest.targets[0]
    assert target.certificate is not None
    oracle = target.certificate.oracle
    return {
        "name": name,
        "verdict": "agrees" if oracle == "float64" else f"agrees with {oracle} only",
        "steps": target.certificate.steps,
        "parameters": parameters,
        "seconds": seconds,
        "kib": artifact.manifest.files[target.file].size / 1024,
        "worst": target.certificate.worst,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(json.dumps(outcome(sys.argv[1], Path(sys.argv[2]))))
