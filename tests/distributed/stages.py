"""What each rank of a pipeline runs: `mpirun python stages.py TASK ARTIFACT OUTPUT`; it writes `OUTPUT/<rank>.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from irongrad.distributed import Pipeline
from irongrad.runtime import Session
from irongrad.runtime.errors import IronGradError

ARTIFACT, OUTPUT = Path(sys.argv[2]), Path(sys.argv[3])
COUNT, STEPS = 6, 4


def batches(step: int, count: int = COUNT) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(step)
    return [{"x": rng.standard_normal((4, 6), np.float32), "y": rng.integers(0, 3, 4)} for _ in range(count)]


def one_process() -> tuple[list[float], Session]:
    """The same micro-batches in one process, with the same kernels."""
    session, losses = Session(ARTIFACT), []
    for step in range(STEPS):
        losses.append(float(np.mean([session.grad_step(**batch) for batch in batches(step)], dtype=np.float32)))
        session.apply_step(lr=0.01 * (step + 1))
    return losses, session


def trains() -> dict[str, Any]:
    pipeline = Pipeline(ARTIFACT, MPI.COMM_WORLD)
    losses = [pipeline.train_step(batches(step), lr=0.01 * (step + 1)) for step in range(STEPS)]
    state = pipeline.state()
    alone, session = one_process()
    path = OUTPUT.parent / "pipeline.safetensors"
    pipeline.save(path)
    MPI.COMM_WORLD.Barrier()
    resumed = Pipeline(ARTIFACT, MPI.COMM_WORLD, checkpoint=path)
    session.train_step(**batches(9, 1)[0])
    resumed.train_step(batches(9, 1))
    return {
        "losses": losses,
        "alone": alone,
        "eval": [pipeline.eval_step(**batches(0)[0]), one_process()[1].eval_step(**batches(0)[0])],
        "different": [n for n, value in one_process()[1].state().items() if not np.array_equal(value, state[n])],
        "after": max(float(np.abs(v - resumed.state()[n]).max()) for n, v in session.state().items()),
        "in_flight": pipeline.most_in_flight,
        "stage": pipeline.stages[pipeline.stage],
    }


def refuses() -> dict[str, Any]:
    """The last rank refuses a step, then the ranks differ, and then they go on."""
    pipeline = Pipeline(ARTIFACT, MPI.COMM_WORLD)
    before, said = pipeline.state(), []
    wrong = batches(0)
    if MPI.COMM_WORLD.rank == MPI.COMM_WORLD.size - 1:
        wrong[-1]["y"] = wrong[-1]["y"] + 3
    for given, hypers in ((wrong, {}), (batches(0), {"lr": 0.1 * (1 + MPI.COMM_WORLD.rank)}), ([], {})):
        try:
            pipeline.train_step(given, **hypers)
        except IronGradError as error:
            said.append(str(error))
    after = pipeline.state()
    changed = [n for n in before if not np.array_equal(before[n], after[n])]
    losses = [pipeline.train_step(batches(0)), Session(ARTIFACT).grad_step(**batches(0)[0])]
    return {"said": said, "changed": changed, "losses": losses}


def opens() -> dict[str, Any]:
    try:
        Pipeline(ARTIFACT, MPI.COMM_WORLD)
    except IronGradError as error:
        return {"said": str(error)}
    return {"said": ""}


if __name__ == "__main__":
    found = {"trains": trains, "refuses": refuses, "opens": opens}[sys.argv[1]]()
    (OUTPUT / f"{MPI.COMM_WORLD.rank}.json").write_text(json.dumps(found))
