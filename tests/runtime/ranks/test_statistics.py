"""BatchNorm by the statistics of all ranks' batches: ranks train as one process with all samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import irongrad as ig
from irongrad.distributed.probe import measured_step
from irongrad.runtime import Session
from irongrad.runtime.errors import UserError
from irongrad.runtime.golden import read_golden
from irongrad.runtime.manifest import GOLDEN
from tests.fixtures.ranks import Ranks, exchanging

pytest.importorskip("mpi4py", reason="the extra mpi is not installed")

WORKER = Path(__file__).parent / "worker.py"
SGD: dict[str, Any] = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)}


def convolutions(norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> tuple[nn.Module, ...]:
    """Layers for rows of 16 numbers: a picture, normalised by `norm`, and then by nn.BatchNorm1d."""
    picture = nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3, padding=1), norm(4), nn.ReLU(), nn.Flatten()
    return *picture, nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Tanh()


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Buckets for batches of up to 4, and a function of any size: ranks run different ones."""
    sizes = {"dynamic": {"x": {0: "B"}, "y": {0: "B"}}, "buckets": {"B": [4]}, "bucket_fallback": "dynamic"}
    compiled = {"sync_batch_norm": True, "entry_points": ["train_step", "eval_step"]}
    return exchanging(
        tmp_path_factory.mktemp("statistics") / "sized",
        compiled,
        layers=convolutions(),
        clip_grad_norm=0.5,
        **sizes,
        **SGD,
    )


@pytest.mark.parametrize("count", [2, 3])
def test_uneven_batches_train_as_one_process_with_all_samples(count: int, sized: Path, ranks: Ranks) -> None:
    found = ranks(count, WORKER, "uneven", sized)
    assert len({f["digest"] for f in found}) == 1
    for one in found:
        assert one["gap"] < 5e-6
        assert all(abs(loss - alone) < 2e-6 for loss, alone in one["losses"])


def test_a_refusal_of_one_rank_leaves_all_states_as_they_were(sized: Path, ranks: Ranks) -> None:
    for found in ranks(2, WORKER, "refused", sized):
        assert found["error"]
        assert found["same"]
        assert found["goes_on"]


def test_the_others_go_on_without_a_killed_rank(sized: Path, ranks: Ranks) -> None:
    (found,) = ranks(2, WORKER, "lost", sized, "--with-ft", "ulfm")
    assert "a rank is gone" in found["error"]
    assert found["same"]


def test_micro_batches_a_loss_scale_and_clipping(tmp_path: Path, ranks: Ranks) -> None:
    for name, batch in (("part", 8), ("whole", 16)):
        entries = ["train_step", "grad_step", "apply_step"]
        exchanging(
            tmp_path / name,
            {"sync_batch_norm": True, "entry_points": entries},
            layers=convolutions(),
            batch=batch,
            accumulate=2,
            clip_grad_norm=0.5,
            loss_scale=torch.amp.GradScaler("cpu"),
            **SGD,
        )
    found = ranks(2, WORKER, "together", tmp_path)
    assert len({f["digest"] for f in found}) == 1
    manifest = Session(tmp_path / "part").manifest
    assert manifest.statistics == {"": (36, 132, 128, 32)}
    for one in found:
        assert max(one["gaps"]) < 5e-6
        assert all(abs(loss - alone) < 2e-6 for loss, alone in one["losses"])
        # 10 training steps and 2 gradients, each of two micro-batches; and 11 updates.
        assert one["calls"] == [12 * 2 * 4 + 11 * len(manifest.exchange[""]), 13]


def test_layers_of_sync_batch_norm_alone(tmp_path: Path, ranks: Ranks) -> None:
    artifact = exchanging(
        tmp_path / "layers",
        {"shard": "optimizer", "entry_points": ["train_step", "train_steps", "eval_step"]},
        layers=convolutions(nn.SyncBatchNorm),
    )
    assert Session(artifact).manifest.statistics == {"": (36, 32)}
    found = ranks(2, WORKER, "steps", artifact)
    assert len({f["digest"] for f in found}) == 1
    assert all(f["losses"] == pytest.approx(f["single"]) for f in found)


def test_a_plan_is_refused(sized: Path) -> None:
    session = Session(sized)
    with pytest.raises(UserError, match="wait for the statistics of BatchNorm"):
        measured_step(session, read_golden(sized / GOLDEN), "gradients")


def test_without_communicate_it_is_batch_norm(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.SyncBatchNorm(3), nn.Linear(3, 2))
    step = ig.TrainStep(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        inputs={"x": torch.randn(4, 3), "y": torch.randn(4, 2)},
    )
    artifact = ig.compile(step, tmp_path / "plain", entry_points=["train_step"])
    assert Session(artifact.directory).manifest.statistics == {}
