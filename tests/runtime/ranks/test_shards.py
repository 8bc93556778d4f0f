"""The optimizer's state divided among ranks: the numbers of every rank are those of ranks that each hold it whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from irongrad.runtime import Session
from irongrad.runtime.ranks.owners import owners, shard_sizes
from tests.fixtures.ranks import Ranks, exchanging

pytest.importorskip("mpi4py", reason="the extra mpi is not installed")

WORKER = Path(__file__).parent / "worker.py"


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_state_is_that_of_ranks_that_hold_it_whole(count: int, divided: Path, ranks: Ranks) -> None:
    found = ranks(count, WORKER, "divided", divided)
    assert len({f["digest"] for f in found}) == 1
    assert all(f["same"] for f in found)
    sizes = shard_sizes(Session(divided / "shards").manifest)
    for one in found:
        assert one["held"] == sum(s for s, r in zip(sizes, owners(sizes, count), strict=True) if r == one["rank"])


def test_parameters_that_arrive_land_in_the_buffers_of_the_state(divided: Path) -> None:
    (dump,) = (divided / "dump" / "09_compile").glob("*/*_scheduled.state-in-place.mlir")
    functions = dump.read_text().split("  util.func ")[1:]
    takers = [body for body in functions if body.startswith("private @taken.")]
    assert len(takers) == len(Session(divided / "shards").manifest.shards)
    assert not any("stream.resource.alloca" in body for body in takers)


def test_a_refusal_of_one_rank_leaves_all_states_as_they_were(divided: Path, ranks: Ranks) -> None:
    for found in ranks(2, WORKER, "refused", divided / "shards"):
        assert found["error"]
        assert found["same"]
        assert found["goes_on"]


def test_momentum_micro_batches_and_a_loss_scale(tmp_path: Path, ranks: Ranks) -> None:
    options = {"accumulate": 2, "loss_scale": torch.amp.GradScaler("cpu"), "precision": "bf16"}
    options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for name, more in (("whole", {"disable_passes": ["multi-tensor"]}), ("shards", {"shard": "optimizer"})):
        exchanging(tmp_path / name, {"entry_points": ["train_step", "train_steps"], **more}, **options)
    found = ranks(2, WORKER, "divided", tmp_path)
    assert len({f["digest"] for f in found}) == 1
    assert all(f["same"] for f in found)


def test_a_checkpoint_is_whole_and_goes_on_with_any_number_of_ranks(divided: Path, ranks: Ranks) -> None:
    saved = ranks(4, WORKER, "saved", divided)
    assert len({f["digest"] for f in saved} | {f["after"] for f in saved}) == 2
    for count in (1, 2, 3, 4):
        resumed = ranks(count, WORKER, "resumed", divided)
        assert {f["digest"] for f in resumed} == {saved[0]["digest"]}
        if count == 4:
            assert {f["after"] for f in resumed} == {saved[0]["after"]}
        for one in resumed:
            assert one["gap"] < 1e-6


def test_a_rank_that_reads_the_state_alone_is_told_so(divided: Path, ranks: Ranks) -> None:
    one, two = (f["error"] for f in ranks(2, WORKER, "reads_alone", divided))
    assert "rank 1 makes another call than rank 0" in one
    assert "rank 0 makes another call than rank 1" in two


def test_without_the_part_of_a_lost_rank_nothing_goes_on(divided: Path, ranks: Ranks) -> None:
    (found,) = ranks(2, WORKER, "lost_part", divided, "--with-ft", "ulfm")
    assert "a rank is gone" in found["error"]
    assert "begin again from the last checkpoint" in found["recover"]
