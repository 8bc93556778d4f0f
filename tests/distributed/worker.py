"""What each rank of a test runs: `mpirun python worker.py TASK ARTIFACT OUTPUT`; it writes `OUTPUT/<rank>.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

from irongrad.distributed import Gradients, LocalSteps, Nesterov, check_equal
from irongrad.distributed.compression import Rounded
from irongrad.runtime import Session
from irongrad.runtime.errors import IronGradError
from irongrad.runtime.ranks.mpi import MpiCommunicator

WORLD = MpiCommunicator(MPI.COMM_WORLD)
ARTIFACT, OUTPUT = Path(sys.argv[2]), Path(sys.argv[3])
ROUNDS, EVERY = 3, 4


def batch(step: int, rank: int, size: int = 8) -> dict[str, np.ndarray]:
    rng = np.random.default_rng((step, rank))
    return {"x": rng.standard_normal((size, 8)).astype(np.float32), "y": rng.integers(0, 4, size)}


def gap(state: dict[str, np.ndarray], other: dict[str, Any]) -> float:
    return max(float(np.abs(state[n] - np.asarray(other[n])).max()) for n in other)


def parameters(session: Session) -> dict[str, np.ndarray]:
    state = session.state()
    return {n: state[n] for n in session.manifest.gradients}


def mean_every_step() -> dict[str, Any]:
    """With SGD, the mean of the parameters after one step is a step with the mean of the gradients."""
    session, alone = Session(ARTIFACT), Session(ARTIFACT)
    sync = LocalSteps(WORLD, 1)
    sync.begin(session, {})
    for step in range(8):
        session.train_step(**batch(step, WORLD.rank))
        sync.after_step(step + 1, due=False)
        parts = [batch(step, rank) for rank in range(WORLD.size)]
        alone.train_step(**{n: np.concatenate([p[n] for p in parts]) for n in parts[0]})
    check_equal(session, WORLD)
    return {"gap": gap(parameters(session), parameters(alone)), "rounds": sync.rounds, "bytes": sync.nbytes}


def outer_steps() -> dict[str, Any]:
    """DiLoCo, and beside it one process with a session for each rank and torch's own SGD as the outer optimizer."""
    session = Session(ARTIFACT)
    sync = LocalSteps(WORLD, EVERY, Nesterov())
    sync.begin(session, {})
    for step in range(ROUNDS * EVERY):
        session.train_step(**batch(step, WORLD.rank))
        sync.after_step(step + 1, due=False)
    everyone = [Session(ARTIFACT) for _ in range(WORLD.size)]
    held = {n: torch.nn.Parameter(torch.from_numpy(a)) for n, a in parameters(everyone[0]).items()}
    outer = torch.optim.SGD(held.values(), lr=0.7, momentum=0.9, nesterov=True)
    for number in range(ROUNDS):
        for rank, one in enumerate(everyone):
            one.load_state(one.state() | {n: p.detach().numpy() for n, p in held.items()})
            for step in range(number * EVERY, (number + 1) * EVERY):
                one.train_step(**batch(step, rank))
        trained = [parameters(one) for one in everyone]
        for name, parameter in held.items():
            parameter.grad = parameter.detach() - torch.from_numpy(np.mean([t[name] for t in trained], axis=0))
        outer.step()
    found = gap(parameters(session), {n: p.detach().numpy() for n, p in held.items()})
    return {"gap": found, "rounds": sync.rounds, "momentum": sorted(sync.tensors)}


def rounded() -> dict[str, Any]:
    """Changes in fewer bytes; all ranks hold the same parameters all the same."""
    found = {}
    for form in ("bf16", "int8"):
        session = Session(ARTIFACT)
        sync = LocalSteps(WORLD, EVERY, None, Rounded(form))
        sync.begin(session, {})
        exact, other = LocalSteps(WORLD, EVERY), Session(ARTIFACT)
        exact.begin(other, {})
        for step in range(ROUNDS * EVERY):
            for one, how in ((session, sync), (other, exact)):
                one.train_step(**batch(step, WORLD.rank))
                how.after_step(step + 1, due=False)
        mine = np.concatenate([a.ravel() for a in parameters(session).values()])
        assert (WORLD.gather(mine) == mine).all()
        moved = gap(parameters(other), parameters(Session(ARTIFACT)))
        found[form] = [gap(parameters(session), parameters(other)) / moved, sync.nbytes / exact.nbytes]
    return found


def different() -> dict[str, Any]:
    """The second rank changes its state."""
    session = Session(ARTIFACT)
    sync = Gradients(WORLD)
    sync.begin(session, {})
    sync.after_step(1, due=True)
    state = session.state()
    if WORLD.rank == 1:
        state["2.bias"][0] = np.nextafter(state["2.bias"][0], np.float32(9))
        session.load_state(state)
    try:
        sync.after_step(2, due=True)
    except IronGradError as error:
        return {"error": str(error)}
    return {"error": ""}


(OUTPUT / f"{WORLD.rank}.json").write_text(json.dumps(globals()[sys.argv[1]]()))
