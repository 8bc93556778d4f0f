"""A plan for many machines: the arithmetic, and one measured step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import irongrad as ig
from irongrad.cli.main import cli
from irongrad.distributed.plan import (
    MeasuredStep,
    Network,
    bandwidth_in,
    doubled,
    latency_in,
    with_gradients,
    with_local_steps,
)
from irongrad.runtime.errors import UserError

# Two buckets of a megabyte: one is there after 40 ms, one after 90 ms, and the update takes 10 ms.
STEP = MeasuredStep(0.1, ((0.04, 10**6), (0.09, 10**6)), round=0.0, trained=4 * 10**6, memory=10**8)


def test_an_exchange_that_ends_before_the_backward_costs_nothing() -> None:
    """On two machines a megabyte takes 1 ms of this link; the last bucket and its latencies are exposed."""
    found = with_gradients(STEP, Network(10**9, 1e-3), 2)
    assert found.exposed == pytest.approx(0.001 + 2 * 0.001)
    assert found.seconds == pytest.approx(0.103)
    assert found.nbytes == 2 * 10**6


def test_a_slow_link_carries_one_bucket_after_the_other() -> None:
    """Each takes 100 ms of the link: the first from 40 ms on, the second behind it."""
    found = with_gradients(STEP, Network(10**7, 1e-6), 2)
    assert found.seconds == pytest.approx(0.04 + 0.2 + 0.01, rel=1e-3)
    assert found.utilisation == pytest.approx(0.1 / 0.25, rel=1e-3)


def test_a_round_costs_its_computation_and_its_exchange() -> None:
    """A rounded change is added once for each rank: twice the work of two ranks for four."""
    step = MeasuredStep(0.1, (), round=0.02, trained=4 * 10**6, memory=0)
    exact = with_local_steps(step, Network(4e6, 1e-9), 2, every=10)
    rounded = with_local_steps(step, Network(4e6, 1e-9), 4, every=10, form="bf16")
    assert exact.exposed == pytest.approx((1.0 + 0.02) / 10, rel=1e-6)
    assert rounded.exposed == pytest.approx((3 * 0.5 + 0.04) / 10, rel=1e-6)


def test_one_machine_exchanges_nothing() -> None:
    for found in (with_gradients(STEP, Network(1.0, 1.0), 1), with_local_steps(STEP, Network(1.0, 1.0), 1, 10)):
        assert (found.seconds, found.exposed, found.nbytes, found.utilisation) == (0.1, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(("seconds", "published"), [(103, 0.957), (382, 0.856), (469, 0.83)])
def test_rounds_of_intellect_1_leave_the_published_share_for_computing(seconds: float, published: float) -> None:
    """100 inner steps took 38 minutes, and an outer step the given seconds (INTELLECT-1, arXiv:2412.01152, table 3)."""
    step = MeasuredStep(38 * 60 / 100, (), round=0.0, trained=4 * 10**10, memory=0)
    network = Network(2 * step.trained / seconds, 1e-9)  # of very many machines, each sends twice the parameters
    found = with_local_steps(step, network, 10**6, every=100)
    assert found.utilisation == pytest.approx(published, abs=0.002)


@given(st.integers(2, 1000), st.floats(1e5, 1e10), st.floats(1e-6, 1.0))
def test_more_machines_and_slower_networks_are_never_faster(machines: int, bandwidth: float, latency: float) -> None:
    network = Network(bandwidth, latency)
    for predict in (with_gradients, lambda s, n, m: with_local_steps(s, n, m, 50, "int8")):
        found = predict(STEP, network, machines)
        assert STEP.seconds <= found.seconds <= predict(STEP, network, machines + 1).seconds
        assert found.seconds <= predict(STEP, Network(bandwidth / 2, latency * 2), machines).seconds


def test_quantities_are_read() -> None:
    assert bandwidth_in("1Gbit") == bandwidth_in("1000 Mbit/s") == 125e6
    assert latency_in("20ms") == pytest.approx(0.02)
    assert latency_in("50us") == latency_in("50µs") == pytest.approx(5e-5)
    assert list(doubled(6)) == [1, 2, 4, 6]


@pytest.mark.parametrize("text", ["", "fast", "1", "0Gbit", "-1Gbit", "1GB", "nanGbit", "1e3Gbit"])
def test_other_bandwidths_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no bandwidth"):
        bandwidth_in(text)


@pytest.mark.parametrize("text", ["20", "20min", "0ms", "ms"])
def test_other_latencies_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no latency"):
        latency_in(text)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact that exchanges nothing."""
    model = nn.Linear(2, 1)
    inputs = {"x": torch.randn(4, 2), "y": torch.randn(4, 1)}
    step = ig.TrainStep(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), inputs)
    return ig.compile(step, tmp_path_factory.mktemp("plan") / "alone", entry_points=["train_step"]).directory


def plan_of(directory: Path, *options: str) -> list[str]:
    return ["plan", str(directory), "--machines", "8", "--bandwidth", "1Gbit", "--latency", "1ms", *options]


def test_a_plan_is_made_from_one_measured_step(plain: Path) -> None:
    result = CliRunner().invoke(cli, plan_of(plain, "--json"), catch_exceptions=False)
    found = json.loads(result.output)
    assert [row["machines"] for row in found["predictions"]] == [1, 2, 4, 8]
    times = [ready for ready, _ in found["step"]["buckets"]]
    assert times == sorted(times)
    assert 0 < times[-1] <= found["step"]["seconds"]
    assert found["predictions"][-1]["exposed"] >= 6 * 0.001  # three latencies there, and three back


def test_a_plan_is_printed_as_a_table(plain: Path) -> None:
    result = CliRunner().invoke(cli, plan_of(plain, "--sync", "diloco:500:int8"), catch_exceptions=False)
    assert result.exit_code == 0
    assert "speed-up" in result.output
    assert "Assumed" in result.output


def test_an_artifact_that_exchanges_nothing_names_the_ways_out(alone: Path) -> None:
    with pytest.raises(UserError, match="--communicate, or plan --sync local:STEPS"):
        CliRunner().invoke(cli, plan_of(alone), catch_exceptions=False)
    assert CliRunner().invoke(cli, plan_of(alone, "--sync", "local:50"), catch_exceptions=False).exit_code == 0
