"""The options of `ig.compile` and their flags."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

import irongrad as ig
from irongrad.cli.common import given_choices
from irongrad.cli.compile import command as compile_command
from irongrad.pipeline.choices import Choices, completed, declared
from irongrad.pipeline.options import make_options
from irongrad.runtime.errors import UserError


def test_every_choice_is_a_flag_with_the_same_default(tmp_path: Path):
    flags = {p.name: p for p in compile_command.params}
    for name, choice in declared().items():
        assert list(choice.flag[0].split("/")) == [*flags[name].opts, *flags[name].secondary_opts]
        assert flags[name].help == choice.help
    assert declared().keys() == Choices.__annotations__.keys()
    given = {n: p.get_default(click.Context(compile_command)) for n, p in flags.items() if n in declared()}
    assert completed(given_choices(given)) == completed({})


def test_every_choice_reaches_the_options(tmp_path: Path):
    needed = {
        name: {"communicate": True} for name in ("bucket_size", "shard", "sync_batch_norm")
    }  # without it, ranks share nothing
    needed["tune_seconds"] = {"tune": True}
    others = {
        "opt_level": 0,
        "passes": "dce",
        "disable_passes": ["dce"],
        "max_memory": "50%",
        "tune": True,
        "tune_seconds": 30,
        "route": "stablehlo",
        "entry_points": ["predict"],
        "communicate": True,
        "bucket_size": "1MiB",
        "shard": "optimizer",
        "sync_batch_norm": True,
        "place": {"0": "llvm-cpu", "1": "vulkan"},
        "base": tmp_path / "base.irpa",
        "dump_dir": tmp_path,
        "cache": False,
    }
    assert others.keys() == declared().keys()
    for name, value in others.items():
        plain = needed.get(name, {})
        assert make_options(tmp_path / "out", **plain, **{name: value}) != make_options(tmp_path / "out", **plain), name


def test_state_is_divided_only_among_ranks_that_exchange(tmp_path: Path):
    with pytest.raises(UserError, match="ranks that exchange gradients: add communicate"):
        make_options(tmp_path / "artifact", shard="optimizer")
    with pytest.raises(UserError, match="shard is 'parameters'; only the state of the optimizer can be divided"):
        make_options(tmp_path / "artifact", communicate=True, shard="parameters")


def test_a_time_to_measure_needs_tune(tmp_path: Path):
    with pytest.raises(UserError, match="tune_seconds says how long tune may measure: add tune"):
        make_options(tmp_path / "artifact", tune_seconds=30)


def test_compile_refuses_an_unknown_option(mlp_step: ig.TrainStep, tmp_path: Path):
    with pytest.raises(TypeError, match=r"compile\(\) got an unexpected keyword argument 'stop_after'"):
        ig.compile(mlp_step, tmp_path / "out", stop_after="capture")  # type: ignore[call-arg]


def test_a_budget_that_no_pass_would_meet_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="max_memory is met by the pass rematerialise, which is disabled"):
        make_options(tmp_path / "artifact", max_memory="50%", disable_passes=["rematerialise"])
