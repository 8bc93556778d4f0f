"""Modules that exchange gradients: what they send, and how they run alone. tests/runtime/ranks runs them on ranks."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import irongrad as ig
from irongrad.graph.step_graph import Value
from irongrad.pipeline.assemble.exchange import Bucket, buckets_of
from irongrad.runtime import Session
from irongrad.runtime.commands import run_module
from irongrad.runtime.errors import UserError
from tests.conftest import make_mlp_step


@pytest.fixture(scope="module")
def exchanging(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exchange") / "mlp"
    ig.compile(make_mlp_step(), directory, communicate=True, bucket_size="500B")
    return directory


def test_alone_it_trains_as_a_step_that_exchanges_nothing(exchanging: Path, mlp_artifact: Path, batches) -> None:
    with Session(exchanging) as one, Session(mlp_artifact) as other:
        for batch in batches:
            assert one.train_step(**batch) == pytest.approx(other.train_step(**batch), abs=1e-6)
        for batch in batches[:2]:
            one.grad_step(**batch)
            other.grad_step(**batch)
        assert one.apply_step() == other.apply_step() == len(batches) + 1
        mine, theirs = one.state(), other.state()
    for name, array in mine.items():
        np.testing.assert_allclose(array, theirs[name], rtol=1e-4, atol=1e-5, err_msg=name)


def test_it_runs_without_python(exchanging: Path, tmp_path: Path) -> None:
    """IREE 3.13.0 miscompiles a fallback without barriers in silence; this would fail."""
    batch = {"x": np.full((6, 8), 0.5, np.float32), "y": np.ones(6, np.int64)}
    for name, array in batch.items():
        np.save(tmp_path / f"{name}.npy", array)
    files = {name: tmp_path / f"{name}.npy" for name in batch}
    command = run_module(Session(exchanging).manifest, exchanging, "train_step", inputs=files, device="local-sync")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with Session(exchanging) as session:
        loss = session.train_step(**batch)
    assert float(done.stdout.split("f32=")[1].split()[0]) == pytest.approx(loss, abs=1e-5)


def test_the_manifest_tells_the_bytes_of_each_bucket(exchanging: Path) -> None:
    session = Session(exchanging)
    sizes = session.manifest.exchange[""]
    exchanged = [s for s in session.manifest.state if s.name in session.manifest.gradients or "running" in s.name]
    assert sum(sizes) == 4 * (sum(int(np.prod(s.shape)) for s in exchanged) + 1)  # and the loss
    assert len(sizes) == 3


KINDS = st.sampled_from(["tensor<3xf32>", "tensor<2x5xf32>", "tensor<f32>", "tensor<7xf64>", "tensor<40xf32>"])


@given(st.lists(KINDS, min_size=1, max_size=12), st.integers(1, 200))
def test_buckets_hold_everything_once_and_in_order(kinds: list[str], limit: int) -> None:
    values = {Value("gradient", str(i)): kind for i, kind in enumerate(kinds)}
    buckets = buckets_of(values, limit)
    assert sorted(int(v.name) for b in buckets for v in b.members) == list(range(len(kinds)))
    for element in ("f32", "f64"):
        mine = [v for b in buckets if b.element == element for v in b.members]
        assert mine == [v for v, kind in values.items() if kind.endswith(f"{element}>")]
    assert all(b.nbytes <= limit or len(b.members) == 1 for b in buckets)


def test_the_size_of_a_bucket() -> None:
    bucket = Bucket({Value("gradient", "a"): "tensor<2x5xf16>", Value("gradient", "b"): "tensor<f16>"})
    assert (bucket.size, bucket.nbytes, bucket.kind) == (11, 22, "tensor<11xf16>")


@pytest.mark.parametrize("size", ["0", "50%", "many"])
def test_a_size_that_is_none_is_refused(size: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"bucket_size is|is no amount of memory"):
        ig.compile(make_mlp_step(), tmp_path / "a", communicate=True, bucket_size=size)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, 4)

    def forward(self, x: torch.Tensor, *, hidden: torch.Tensor) -> torch.Tensor:
        return self.cell(x, hidden)


def test_values_that_are_carried_from_call_to_call_are_refused(tmp_path: Path) -> None:
    model = Remembers()
    step = ig.TrainStep(
        model=model,
        loss=lambda output, y: ((output - y).square().mean(), {"hidden": output}),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        inputs={"x": torch.randn(2, 4), "y": torch.randn(2, 4)},
        carry={"hidden": torch.zeros(2, 4)},
    )
    with pytest.raises(UserError, match="'hidden' is carried from call to call"):
        ig.compile(step, tmp_path / "a", communicate=True)


def test_a_step_in_pieces_is_refused(tmp_path: Path) -> None:
    step = dataclasses.replace(make_mlp_step(), between=("y",))
    with pytest.raises(UserError, match="leave out between"):
        ig.compile(step, tmp_path / "a", communicate=True)
