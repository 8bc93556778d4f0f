"""What each rank of a test runs: `mpirun python worker.py TASK ARTIFACT OUTPUT`; it writes `OUTPUT/<rank>.json`."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from irongrad.runtime import Session, load
from irongrad.runtime.errors import IronGradError, RankLostError
from irongrad.runtime.ranks.owners import owners, shard_sizes

WORLD = MPI.COMM_WORLD
ARTIFACT, OUTPUT = Path(sys.argv[2]), Path(sys.argv[3])
Batch = dict[str, np.ndarray]


def batch(seed: int, size: int = 8, features: int = 8) -> Batch:
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((size, features)).astype(np.float32), "y": rng.integers(0, 4, size)}


def attached() -> Session:
    session = Session(ARTIFACT)
    session.attach(WORLD)
    return session


def digest(session: Session) -> str:
    state = session.state()
    return hashlib.sha256(b"".join(state[n].tobytes() for n in sorted(state))).hexdigest()


def gap(session: Session, other: Session) -> float:
    mine, theirs = session.state(), other.state()
    return max(float(np.abs(mine[n] - theirs[n]).max()) for n in mine if mine[n].dtype == np.float32)


def uneven() -> dict[str, Any]:
    """Ranks with batches of 3, 4, … samples, and beside them one process with all samples."""
    session, alone, losses = attached(), Session(ARTIFACT), []
    for step in range(20):
        parts = [batch(100 * step + rank, 3 + rank) for rank in range(WORLD.size)]
        loss = session.train_step(**parts[WORLD.rank])
        together = {n: np.concatenate([p[n] for p in parts]) for n in parts[0]}
        losses.append([loss, alone.train_step(**together)])
    return {"losses": losses, "gap": gap(session, alone), "digest": digest(session)}


def accumulated() -> dict[str, Any]:
    """Equal batches, and beside them one process that accumulates them."""
    session, alone, losses = attached(), Session(ARTIFACT), []
    names = session.manifest.gradients
    for step in range(10):
        parts = [batch(100 * step + rank) for rank in range(WORLD.size)]
        loss = session.train_step(**parts[WORLD.rank])
        losses.append([loss, float(np.mean([alone.grad_step(**part) for part in parts]))])
        alone.apply_step()
    mine, theirs = session.state(), alone.state()
    gap = max(float(np.abs(mine[n] - theirs[n]).max()) for n in names)
    return {"losses": losses, "gap": gap, "digest": digest(session), "traffic": session.traffic.__dict__}


def statistics() -> dict[str, Any]:
    """BatchNorm's statistics after a step: the mean of those of one process for each batch."""
    session = attached()
    parts = [batch(rank) for rank in range(WORLD.size)]
    session.train_step(**parts[WORLD.rank])
    found = session.state()["1.running_mean"]
    each = []
    for part in parts:
        alone = Session(ARTIFACT)
        alone.train_step(**part)
        each.append(alone.state()["1.running_mean"])
    return {"gap": float(np.abs(found - np.mean(each, axis=0)).max()), "digest": digest(session)}


def together() -> dict[str, Any]:
    """Ranks with a part of each batch, and beside them one process with an artifact for whole batches.

    A batch has two micro-batches. Each rank has the same part of both.
    """
    session, alone, losses = Session(ARTIFACT / "part"), Session(ARTIFACT / "whole"), []
    session.attach(WORLD)
    for step in range(10):
        parts = [batch(100 * step + rank) for rank in range(WORLD.size)]
        halves = [{n: np.split(a, 2) for n, a in part.items()} for part in parts]
        whole = {n: np.concatenate([h[n][i] for i in range(2) for h in halves]) for n in parts[0]}
        losses.append([session.train_step(**parts[WORLD.rank]), alone.train_step(**whole)])
    gaps = [gap(session, alone)]
    for step in range(2):
        parts = [batch(1000 + step + rank) for rank in range(WORLD.size)]
        halves = [{n: np.split(a, 2) for n, a in part.items()} for part in parts]
        alone.grad_step(**{n: np.concatenate([h[n][i] for i in range(2) for h in halves]) for n in parts[0]})
        session.grad_step(**parts[WORLD.rank])
    session.apply_step()
    alone.apply_step()
    gaps.append(gap(session, alone))
    calls = session.traffic.calls, session.traffic.steps
    return {"losses": losses, "gaps": gaps, "digest": digest(session), "calls": calls}


def refused() -> dict[str, Any]:
    """The second rank refuses a step, before the first has the statistics that it waits for."""
    session, good = attached(), batch(WORLD.rank)
    session.train_step(**good)
    before, error = digest(session), ""
    try:
        session.train_step(**good if WORLD.rank == 0 else {**good, "y": good["y"] + 50})
    except IronGradError as refusal:
        error = str(refusal)
    same = digest(session) == before
    session.train_step(**good)
    return {"error": error, "same": same, "goes_on": digest(session) != before}


def steps() -> dict[str, Any]:
    """`train_steps`, and beside it single steps."""
    session, other = attached(), attached()
    batches = [batch(100 * step + WORLD.rank) for step in range(4)]
    losses = session.train_steps(**{n: np.stack([b[n] for b in batches]) for n in batches[0]})
    single = [other.train_step(**b) for b in batches]
    return {"losses": losses.tolist(), "single": single, "digest": digest(session)}


def several() -> dict[str, Any]:
    """`train_steps`, and gradients that are accumulated between the exchanges, give what single steps give."""
    session, other = attached(), attached()
    batches = [batch(100 * step + WORLD.rank) for step in range(6)]
    losses = session.train_steps(**{n: np.stack([b[n] for b in batches]) for n in batches[0]})
    single = [other.train_step(**b) for b in batches]
    accumulating = attached()
    for b in batches[:2]:
        accumulating.grad_step(**b)
    accumulating.apply_step()
    found = {"losses": losses.tolist(), "single": single, "gap": gap(session, other), "digest": digest(session)}
    return found | {"accumulated": digest(accumulating)}


def noise() -> dict[str, Any]:
    """Dropout of the same batch on every rank, twice from the start."""
    runs = []
    for _ in range(2):
        session = attached()
        alone = Session(ARTIFACT)
        own = [alone.grad_step(**batch(0)) for _ in range(3)]
        runs.append([[session.train_step(**batch(0)) for _ in range(3)], digest(session), own])
    return {"runs": runs}


def refusals() -> dict[str, Any]:
    """Calls that one rank, or all of them, refuse."""
    session, good = attached(), batch(WORLD.rank)
    first = WORLD.rank == 0
    stacked = {n: np.stack([a] * 3) for n, a in good.items()}
    far = {n: a.copy() for n, a in stacked.items()}
    far["y"][2] = 99
    calls: dict[str, Callable[[], Any]] = {
        "value": lambda: session.train_step(**good if first else {**good, "y": good["y"] + 50}),
        "dtype": lambda: session.train_step(**{**good, "x": good["x"].astype(np.float64)} if first else good),
        "missing": lambda: session.train_step(**{"x": good["x"]} if first else good),
        "rate": lambda: session.train_step(lr=0.1 if first else 0.2, **good),
        "steps": lambda: session.train_steps(**{n: a[: 2 + WORLD.rank] for n, a in stacked.items()}),
        "later": lambda: session.train_steps(**stacked if first else far),
        "empty": lambda: session.apply_step(),
    }
    session.train_step(**good)
    found = {}
    for name, call in calls.items():
        before = digest(session)
        try:
            call()
            found[name] = ["", digest(session) == before]
        except IronGradError as error:
            found[name] = [f"{type(error).__name__}: {error}", digest(session) == before]
    session.train_step(**good)
    return {"found": found, "digest": digest(session)}


def lost() -> dict[str, Any]:
    """The last rank is killed between two steps; the others go on."""
    session = attached()
    session.train_step(**batch(WORLD.rank))
    WORLD.Barrier()
    before = digest(session)
    if WORLD.rank == WORLD.size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        session.train_step(**batch(WORLD.rank))
        return {"error": ""}
    except RankLostError as error:
        seconds = time.monotonic() - begun
        same = digest(session) == before
        session.recover()
        loss = session.train_step(**batch(WORLD.rank))
        return {"error": str(error), "seconds": seconds, "same": same, "loss": loss, "digest": digest(session)}


def divided() -> dict[str, Any]:
    """Two sessions train alike: one holds a part of the optimizer's state, the other all of it."""
    whole, parts = Session(ARTIFACT / "whole"), Session(ARTIFACT / "shards")
    for session in (whole, parts):
        session.attach(WORLD)
    same = True
    for step in range(4):
        mine = batch(100 * step + WORLD.rank)
        same &= whole.train_step(**mine) == parts.train_step(**mine)
    batches = [batch(100 * step + WORLD.rank) for step in range(4, 7)]
    stacked = {n: np.stack([b[n] for b in batches]) for n in batches[0]}
    same &= bool((whole.train_steps(**stacked) == parts.train_steps(**stacked)).all())
    sizes = shard_sizes(parts.manifest)
    held = sum(s for s, r in zip(sizes, owners(sizes, WORLD.size), strict=True) if r == WORLD.rank)
    same &= digest(whole) == digest(parts)
    return {"same": same, "digest": digest(parts), "held": held, "rank": WORLD.rank}


def saved() -> dict[str, Any]:
    """Train and save; then go on with the same batch on every rank, so that the number of ranks does not matter."""
    session = Session(ARTIFACT / "shards")
    session.attach(WORLD)
    for step in range(3):
        session.train_step(**batch(100 * step + WORLD.rank))
    session.save(ARTIFACT / "state.safetensors")
    before = digest(session)
    for step in range(3):
        session.train_step(**batch(step))
    session.save(ARTIFACT / "after.safetensors")
    return {"digest": before, "after": digest(session)}


def resumed() -> dict[str, Any]:
    """Go on from the checkpoint that `saved` wrote."""
    session = load(ARTIFACT / "shards", checkpoint=ARTIFACT / "state.safetensors")
    session.attach(WORLD)
    before = digest(session)
    for step in range(3):
        session.train_step(**batch(step))
    other = load(ARTIFACT / "shards", checkpoint=ARTIFACT / "after.safetensors")
    return {"digest": before, "after": digest(session), "gap": gap(session, other)}


def reads_alone() -> dict[str, Any]:
    """The first rank reads the state, which all have to do together."""
    session = Session(ARTIFACT / "shards")
    session.attach(WORLD)
    try:
        session.state() if WORLD.rank == 0 else session.train_step(**batch(0))
    except IronGradError as error:
        session.train_step(**batch(0))
        return {"error": str(error)}
    return {"error": ""}


def lost_part() -> dict[str, Any]:
    """The second rank is killed, and its part of the optimizer's state with it."""
    session = Session(ARTIFACT / "shards")
    session.attach(WORLD)
    session.train_step(**batch(WORLD.rank))
    WORLD.Barrier()
    if WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = {}
    for name, call in (("error", lambda: session.train_step(**batch(0))), ("recover", session.recover)):
        try:
            call()
        except RankLostError as error:
            found[name] = str(error)
    return found


def artifacts() -> dict[str, Any]:
    """Every rank has an artifact of its own."""
    session = Session(ARTIFACT / str(WORLD.rank))
    try:
        session.attach(WORLD)
    except IronGradError as error:
        return {"error": str(error)}
    return {"error": ""}


def main() -> None:
    found = globals()[sys.argv[1]]()
    (OUTPUT / f"{WORLD.rank}.json").write_text(json.dumps(found))
    sys.stdout.flush()
    if sys.argv[1].startswith("lost"):
        os._exit(0)  # Open MPI 5.0.11 may hang in a normal exit after a rank was lost


main()
