"""Child processes that `fork` made: each test forks in a process of its own, which must end in time."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

_PROGRAM = """
import os, sys
import numpy as np
from irongrad.runtime import load
from irongrad.runtime.errors import UserError

directory, file, device, own = sys.argv[1:]
batch = dict(np.load(file))
session = load(directory, device=device)
first = session.train_step(**batch)

def outcome(call):
    try:
        return call()
    except UserError as error:
        return "spawn" in str(error)

if os.fork() == 0:
    inherited = outcome(lambda: session.train_step(**batch))
    opened = outcome(lambda: load(directory, device=own).train_step(**batch))
    print(repr((inherited, opened == first if not isinstance(opened, bool) else opened)), flush=True)
    session = None
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
assert session.train_step(**batch) != first
"""


def in_child(artifact: Path, batch: dict[str, np.ndarray], tmp_path: Path, device: str, own: str) -> str:
    """Run the program above; return what the child says: (the inherited session, a session of its own)."""
    np.savez(tmp_path / "batch.npz", **batch)
    command = [sys.executable, "-c", _PROGRAM, artifact, tmp_path / "batch.npz", device, own]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_child_cannot_use_threads_that_stayed_in_the_parent(mlp_artifact, batches, tmp_path):
    assert in_child(mlp_artifact, batches[0], tmp_path, "local-task", "local-task") == "(True, True)\n"


def test_a_child_can_use_a_device_without_threads(mlp_artifact, batches, tmp_path):
    out = in_child(mlp_artifact, batches[0], tmp_path, "local-sync", "local-task")
    assert "True)" in out
    assert not out.startswith("(True")  # the inherited session trained, and returned its loss


def test_a_child_opens_another_device(mlp_artifact, batches, tmp_path):
    assert in_child(mlp_artifact, batches[0], tmp_path, "local-task", "local-sync") == "(True, True)\n"


@pytest.mark.parametrize("device", ["local-task", "local-sync"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_multiprocessing(mlp_artifact, batches, tmp_path, method, device):
    program = textwrap.dedent("""
        import multiprocessing, sys
        import numpy as np
        from irongrad.runtime import load
        from irongrad.runtime.errors import UserError

        def work(directory, file, device):
            try:
                return load(directory, device=device).train_step(**dict(np.load(file)))
            except UserError as error:
                return "spawn" in str(error)

        if __name__ == "__main__":
            directory, file, method, device = sys.argv[1:]
            first = work(directory, file, device)
            with multiprocessing.get_context(method).Pool(2) as pool:
                found = pool.starmap(work, [(directory, file, device)] * 4)
            assert set(found) == ({True} if (method, device) == ("fork", "local-task") else {first}), found
        """)
    (tmp_path / "program.py").write_text(program)
    np.savez(tmp_path / "batch.npz", **batches[0])
    command = [sys.executable, tmp_path / "program.py", mlp_artifact, tmp_path / "batch.npz", method, device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
