"""Ranks over torch.distributed with gloo: two processes, as torchrun starts them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import irongrad as ig
from irongrad.runtime.errors import UserError

WORKER = """
import json, os, pathlib, signal, sys
import numpy as np
import torch.distributed as dist
import irongrad as ig
from irongrad.runtime import Session
from irongrad.runtime.errors import GuardError, RankLostError

def batch(seed):
    rng = np.random.default_rng(seed)
    return {"x": rng.standard_normal((8, 8)).astype(np.float32), "y": rng.integers(0, 4, 8)}

dist.init_process_group("gloo")
artifact = pathlib.Path(sys.argv[1])
rank, session, alone = dist.get_rank(), Session(artifact), Session(artifact)
session.attach(ig.TorchCommunicator())
for step in range(10):
    parts = [batch(100 * step + r) for r in range(2)]
    session.train_step(**parts[rank])
    for part in parts:
        alone.grad_step(**part)
    alone.apply_step()
mine, theirs = session.state(), alone.state()
gap = max(float(np.abs(mine[n] - theirs[n]).max()) for n in session.manifest.gradients)
refused = ""
try:
    session.train_step(x=batch(0)["x"][:, : 8 - rank], y=batch(0)["y"])
except GuardError as error:
    refused = str(error)
found = {"gap": gap, "refused": refused, "lost": ""}
if rank == 1:
    print(json.dumps(found), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    session.train_step(**batch(0))
except RankLostError as error:
    found["lost"] = str(error)
print(json.dumps(found), flush=True)
os._exit(0)  # gloo's threads wait for the lost rank
"""


def test_two_processes_train_as_one_that_accumulates(plain: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-c", WORKER, str(plain)]
    ranks = [
        subprocess.Popen(
            command, env={**shared, "RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for r in range(2)
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    zero, one = (json.loads(out.splitlines()[-1]) if out else pytest.fail(err) for out, err in said)
    assert zero["gap"] == one["gap"] == 0.0
    assert "rank 1 refuses this step: train_step: x" in zero["refused"]
    assert "x" in one["refused"]
    assert "a rank is gone" in zero["lost"]


def test_without_a_process_group_the_message_says_how_to_make_one() -> None:
    with pytest.raises(UserError, match="init_process_group"):
        ig.TorchCommunicator()
