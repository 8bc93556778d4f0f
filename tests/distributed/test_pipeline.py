"""Pipelines on real ranks give what one process gives."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import irongrad as ig
from irongrad.distributed.one_forward_one_backward import BACKWARD, FORWARD, one_forward_one_backward
from irongrad.distributed.pipeline import stages_of
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest_file import read_manifest

PIPELINED = ("grad_step", "apply_step")
PROGRAM = Path(__file__).with_name("stages.py")


@pytest.mark.parametrize(("stages", "count"), [*itertools.product((2, 3, 4), (1, 2, 3, 8))])
def test_every_stage_runs_each_micro_batch_once_and_keeps_few(stages: int, count: int):
    for stage in range(stages):
        order = one_forward_one_backward(stage, stages, count)
        kinds = [FORWARD] if stage == stages - 1 else [FORWARD, BACKWARD]
        for kind in kinds:
            assert [number for k, number in order if k == kind] == list(range(count))
        kept = [*itertools.accumulate(1 if kind == FORWARD else -1 for kind, _ in order)]
        assert stage == stages - 1 or max(kept) <= min(stages - stage, count)


@pytest.mark.parametrize(("stages", "count"), [*itertools.product((2, 3, 4), (1, 3, 8))])
def test_no_stage_waits_for_a_call_that_waits_for_it(stages: int, count: int):
    """Every stage runs its next call as soon as what it needs is there; all of them end."""
    waiting = {stage: one_forward_one_backward(stage, stages, count) for stage in range(stages)}
    done: set[tuple[int, int, int]] = set()
    while any(waiting.values()):
        ready = []
        for stage, calls in waiting.items():
            if not calls:
                continue
            kind, number = calls[0]
            behind = (stage + 1, FORWARD if stage + 1 == stages - 1 else BACKWARD, number)
            needed = (stage - 1, FORWARD, number) if kind == FORWARD else behind
            if needed in done or needed[0] < 0:
                ready.append(stage)
        assert ready, waiting
        for stage in ready:
            done.add((stage, *waiting[stage].pop(0)))


def make_step(model: nn.Module) -> ig.TrainStep:
    torch.manual_seed(1)
    inputs = {"x": torch.randn(4, 6), "y": torch.randint(0, 3, (4,))}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return ig.TrainStep(model, F.cross_entropy, optimizer, inputs, clip_grad_norm=0.3)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages; the first has dropout, and buffers that its forward changes."""
    torch.manual_seed(0)
    first = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Tanh())
    model = nn.Sequential()
    model.add_module("first", first)
    model.add_module("second", nn.Linear(8, 3))
    place = {"first": "llvm-cpu", "second": "llvm-cpu"}
    return ig.compile(make_step(model), tmp_path_factory.mktemp("pipeline") / "a", place=place).directory


def test_two_ranks_give_what_one_process_gives_bit_for_bit(artifact, ranks):
    pytest.importorskip("mpi4py", reason="the extra mpi is not installed")
    found = ranks(2, PROGRAM, "trains", artifact)
    for rank in found:
        assert rank["losses"] == pytest.approx(rank["alone"], rel=1e-6)
        assert rank["eval"][0] == rank["eval"][1]
        assert rank["different"] == []
        assert rank["after"] < 1e-6
    assert [rank["in_flight"] for rank in found] == [2, 1]
    assert [rank["stage"] for rank in found] == ["first", "second"]


def test_a_refusal_of_one_rank_is_that_of_all(artifact, ranks):
    pytest.importorskip("mpi4py", reason="the extra mpi is not installed")
    first, second = ranks(2, PROGRAM, "refuses", artifact)
    assert "y: every value must be in [0, 2]" in second["said"][0]
    assert first["said"][0].startswith("another rank refuses the step: grad_step: y: every value must be in")
    assert first["said"][1:] == second["said"][1:]
    assert "different hyperparameters" in first["said"][1]
    assert "there are no micro-batches" in first["said"][2]
    assert first["changed"] == second["changed"] == []
    assert first["losses"][0] == second["losses"][0]


def test_ranks_and_parts_must_be_as_many(artifact, ranks):
    pytest.importorskip("mpi4py", reason="the extra mpi is not installed")
    for rank in ranks(1, PROGRAM, "opens", artifact):
        assert "has 2 parts, and there are 1 ranks" in rank["said"]


def test_a_model_that_goes_back_to_an_earlier_part_is_refused(tmp_path):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    place = {"0+2": "llvm-cpu", "1": "llvm-cpu"}
    directory = ig.compile(make_step(model), tmp_path / "a", place=place, entry_points=PIPELINED).directory
    with pytest.raises(ArtifactError, match=r"the parts are no stages of a pipeline: a step runs 0\+2 → 1 → 0\+2 → 1"):
        stages_of(read_manifest(directory))


def test_an_artifact_without_parts_is_refused(mlp_artifact):
    with pytest.raises(ArtifactError, match="has no parts; compile it with place, one part for each rank"):
        stages_of(read_manifest(mlp_artifact))
