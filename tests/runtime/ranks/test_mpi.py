"""Ranks over MPI: real processes that mpirun starts, on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from irongrad.runtime import Session
from irongrad.runtime.errors import UserError
from tests.fixtures.ranks import Ranks, exchanging

pytest.importorskip("mpi4py", reason="the extra mpi is not installed")

WORKER = Path(__file__).parent / "worker.py"


@pytest.mark.parametrize("count", [2, 3])
def test_uneven_batches_train_as_one_process_with_all_samples(count: int, sized: Path, ranks: Ranks) -> None:
    found = ranks(count, WORKER, "uneven", sized)
    assert len({f["digest"] for f in found}) == 1
    for one in found:
        assert one["gap"] < 2e-6
        assert all(abs(loss - alone) < 1e-6 for loss, alone in one["losses"])


def test_equal_batches_train_as_accumulated_ones_with_clipping(plain: Path, ranks: Ranks) -> None:
    found = ranks(2, WORKER, "accumulated", plain)
    assert len({f["digest"] for f in found}) == 1
    for one in found:
        assert one["gap"] == 0
        assert all(abs(loss - alone) < 1e-6 for loss, alone in one["losses"])
        buckets = Session(plain).manifest.exchange[""]
        assert len(buckets) > 2
        assert one["traffic"]["calls"] == 10 * len(buckets)
        assert one["traffic"]["nbytes"] == 10 * sum(buckets)


def test_statistics_of_batch_norm_are_averaged(tmp_path: Path, ranks: Ranks) -> None:
    found = ranks(2, WORKER, "statistics", exchanging(tmp_path / "norm", layers=(nn.BatchNorm1d(16), nn.Tanh())))
    assert len({f["digest"] for f in found}) == 1
    assert all(f["gap"] < 1e-7 for f in found)


def test_steps_in_one_call_train_as_single_ones(plain: Path, ranks: Ranks) -> None:
    found = ranks(2, WORKER, "several", plain)
    assert len({f["digest"] for f in found}) == 1
    assert len({f["accumulated"] for f in found}) == 1
    assert all(f["gap"] == 0 and f["losses"] == pytest.approx(f["single"]) for f in found)


def test_micro_batches_and_a_loss_scale(tmp_path: Path, ranks: Ranks) -> None:
    options = {"accumulate": 2, "loss_scale": torch.amp.GradScaler("cpu"), "precision": "bf16"}
    found = ranks(2, WORKER, "several", exchanging(tmp_path / "scaled", **options))
    assert len({f["digest"] for f in found}) == 1
    assert all(f["gap"] == 0 for f in found)


def test_dropout_differs_between_ranks_and_is_the_same_in_every_run(tmp_path: Path, ranks: Ranks) -> None:
    found = ranks(2, WORKER, "noise", exchanging(tmp_path / "noise", layers=(nn.Dropout(0.5),)))
    (first, second), (other, _) = (f["runs"] for f in found)
    assert first == second
    assert first[1] == other[1]
    assert first[0] == other[0]  # the mean over both ranks
    assert first[0][0] != first[2][0]  # which is not the loss of one of them


def test_a_refusal_of_one_rank_is_one_of_all(plain: Path, ranks: Ranks) -> None:
    one, two = (f["found"] for f in ranks(2, WORKER, "refusals", plain))
    assert all(same for found in (one, two) for _, same in found.values())
    assert one["value"][0].startswith("GuardError: rank 1 refuses this step: train_step: y: every value must be in")
    assert two["value"][0].startswith("GuardError: train_step: y: every value must be in")
    assert "rank 0 refuses this step: train_step: x element type mismatch" in two["dtype"][0]
    assert "rank 0 refuses this step: train_step: the input 'y' is missing" in two["missing"][0]
    for name in ("rate", "steps"):
        assert "rank 1 makes another call than rank 0" in one[name][0]
        assert "rank 0 makes another call than rank 1" in two[name][0]
    assert "rank 1 refuses this step: train_steps: y: every value must be in" in one["later"][0]
    assert "call grad_step first" in one["empty"][0]
    assert "call grad_step first" in two["empty"][0]


@pytest.mark.parametrize("count", [2, 3])
def test_the_others_go_on_without_a_killed_rank(count: int, plain: Path, ranks: Ranks) -> None:
    found = ranks(count, WORKER, "lost", plain, "--with-ft", "ulfm")
    assert len({f["digest"] for f in found}) == 1
    for one in found:
        assert "a rank is gone" in one["error"]
        assert one["seconds"] < 5  # 0.02 to 0.1 on a machine that does nothing else
        assert one["same"]


def test_ranks_with_different_artifacts_are_refused(plain: Path, sized: Path, tmp_path: Path, ranks: Ranks) -> None:
    (tmp_path / "both").mkdir()
    for number, artifact in enumerate((plain, sized)):
        (tmp_path / "both" / str(number)).symlink_to(artifact)
    one, two = ranks(2, WORKER, "artifacts", tmp_path / "both")
    assert one["error"].startswith("rank 1 has another artifact than rank 0")
    assert two["error"].startswith("rank 0 has another artifact than rank 1")


def test_an_artifact_that_exchanges_nothing_cannot_be_attached(mlp_artifact: Path) -> None:
    with pytest.raises(UserError, match="compile it with --communicate"):
        Session(mlp_artifact).attach(object())


def test_iree_still_opens_no_device_under_mpirun() -> None:
    """Once this fails, `without_launcher` in irongrad/runtime/devices.py can go."""
    program = "import iree.runtime as rt; rt.get_device('local-sync')"
    environment = {**os.environ, "OMPI_COMM_WORLD_SIZE": "2"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "MPI runtime library not available" in done.stderr
