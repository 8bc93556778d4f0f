"""`irongrad train`: schedules, steps, evaluation, checkpoints, logs and stops."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from irongrad.cli.train import command
from irongrad.cli.train_progress import Display
from irongrad.runtime import Session
from irongrad.runtime.errors import UserError
from irongrad.runtime.safetensors_file import read_arrays
from irongrad.training import schedules
from irongrad.training.events import Event, Started, Stepped


@pytest.fixture
def data(batches: list[dict[str, np.ndarray]], tmp_path: Path) -> Path:
    """120 samples: 20 steps of 6."""
    path = tmp_path / "data.npz"
    np.savez(path, **{n: np.concatenate([b[n] for b in batches]) for n in batches[0]})
    return path


def run(artifact: Path, data: Path, *arguments: object) -> dict[str, Any]:
    options = ["--data", str(data), "--json", *map(str, arguments)]
    result = CliRunner().invoke(command, [str(artifact), *options], catch_exceptions=False)
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def lines(path: Path, event: str) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["event"] == event]


SCHEDULES = {
    "constant": schedules.constant(0.01, warmup=5),
    "linear": schedules.linear(0.01, 40, warmup=5),
    "cosine": schedules.cosine(0.01, 40, warmup=5),
    "cosine:cycles=1.5,total=50": schedules.cosine(0.01, 50, warmup=5, cycles=1.5),
    "cosine-annealing:minimum=1e-4": schedules.cosine_annealing(0.01, 40, minimum=1e-4),
    "step:size=7,gamma=0.5": schedules.step(0.01, 7, gamma=0.5),
    "one-cycle:rise=0.25": schedules.one_cycle(0.01, 40, rise=0.25, momenta=("beta1",)),
}


@pytest.mark.parametrize("text", SCHEDULES)
def test_a_schedule_sets_the_rate_of_every_step(mlp_artifact: Path, data: Path, tmp_path: Path, text: str) -> None:
    expected, session = SCHEDULES[text], Session(mlp_artifact)
    warmup = ["--warmup", 5] if text.partition(":")[0] in ("constant", "linear", "cosine") else []
    paths = {n: tmp_path / n for n in ("log.jsonl", "state.safetensors")}
    options = ["--lr", 0.01, "--epochs", 2, "--log", paths["log.jsonl"], "--checkpoint", paths["state.safetensors"]]
    run(mlp_artifact, data, "--schedule", text, *warmup, *options)
    assert [line["lr"] for line in lines(paths["log.jsonl"], "stepped")] == [expected(n)["lr"] for n in range(40)]
    arrays = dict(np.load(data))
    for step in range(40):
        epoch, place = divmod(step, 20)
        rows = np.random.default_rng((0, epoch)).permutation(120)[place * 6 :][:6]
        session.train_step(**{n: a[rows] for n, a in arrays.items()}, **expected(step))
    saved, _ = read_arrays(paths["state.safetensors"])
    for name, value in session.state().items():
        np.testing.assert_array_equal(value, saved[name], err_msg=name)


REFUSED = {
    "--schedule cosine:total=19": "the schedule cosine ends after 19 steps, and training ends after 20",
    "--schedule cosin": "there is no schedule 'cosin'; there are constant, linear, cosine",
    "--schedule cosine:half=1": "there is no option 'half'; there are warmup, total, cycles",
    "--schedule cosine:total": "'total' is not OPTION=VALUE",
    "--schedule cosine:total=ten": "total must be a whole number, not 'ten'",
    "--schedule step": "give the number of steps of one rate, as in step:size=100",
    "--schedule step:size=3 --warmup 2": "the schedule step has no warm-up; constant, linear and cosine have one",
    "--schedule linear --warmup 21": "has 20 steps, and a warm-up of 21 is longer",
    "--warmup 3 --lr nan": "lr is nan: it must be a finite number",
    "--eval-every 3": "--eval-every needs --validation",
    "--patience 3": "--patience needs --validation",
    "--keep 3": "--keep needs --checkpoint",
    "--save-every 3": "--save-every needs --checkpoint",
    "--keep-best --validation DATA": "--keep-best needs --checkpoint",
    "--keep-best --checkpoint NEW": "--keep-best needs --validation",
    "--fresh": "--fresh needs --resume",
    "--validation DATA --monitor accuracy --checkpoint NEW --save-every 1": "no value 'accuracy'; the step returns",
    "--validation DATA --min-delta -1": "min_delta is -1.0: it must be a number of 0 or more",
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_options_that_mean_nothing_are_refused(mlp_artifact: Path, data: Path, arguments: str) -> None:
    words = arguments.replace("DATA", str(data)).replace("NEW", str(data.with_name("new"))).split()
    with pytest.raises(UserError, match=REFUSED[arguments]):
        run(mlp_artifact, data, *words)
    assert not data.with_name("new").exists()


def test_held_out_data_of_less_than_a_batch_are_refused(mlp_artifact: Path, data: Path, tmp_path: Path) -> None:
    """Their loss would be the mean of nothing."""
    np.savez(tmp_path / "few.npz", **{n: a[:5] for n, a in np.load(data).items()})
    with pytest.raises(UserError, match=r"few\.npz has 5 samples, fewer than one batch of 6"):
        run(mlp_artifact, data, "--validation", tmp_path / "few.npz")


def test_steps_end_and_resume_a_run_in_the_middle_of_an_epoch(mlp_artifact: Path, data: Path, tmp_path: Path) -> None:
    whole, rest = tmp_path / "whole.safetensors", tmp_path / "rest.safetensors"
    common = ("--seed", 3, "--schedule", "cosine:total=50", "--steps")
    run(mlp_artifact, data, *common, 50, "--checkpoint", whole)
    report = run(mlp_artifact, data, *common, 27, "--checkpoint", rest)
    assert [e["steps"] for e in report["epochs"]] == [20, 27]
    run(mlp_artifact, data, *common, 50, "--checkpoint", rest, "--resume", rest)
    assert whole.read_bytes() == rest.read_bytes()
    with pytest.raises(UserError, match=r"another order \(seed 3, .*this is seed 0"):
        run(mlp_artifact, data, "--resume", rest)
    report = run(mlp_artifact, data, "--resume", rest, "--fresh", "--schedule", "linear")
    assert report["epochs"][0]["steps"] == 20


def test_a_run_that_is_over_says_so(mlp_artifact: Path, data: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.safetensors"
    run(mlp_artifact, data, "--steps", 3, "--checkpoint", state)
    options = ["--data", str(data), "--steps", "2", "--resume", str(state)]
    shown = CliRunner().invoke(command, [str(mlp_artifact), *options])
    assert "nothing was left to train: the run is at step 3 already" in shown.output
    assert shown.exit_code == 0


def test_a_negative_rate_is_refused(mlp_artifact: Path, data: Path) -> None:
    """It would make the loss as large as it can, as PyTorch's optimizers refuse to."""
    shown = CliRunner().invoke(command, [str(mlp_artifact), "--data", str(data), "--lr", "-0.1"])
    assert "-0.1 is not in the range x>=0" in shown.output


def test_evaluations_best_and_last_checkpoints(mlp_artifact: Path, data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    report = run(
        mlp_artifact, data, "--validation", data, "--eval-every", 5, "--patience", 2, "--min-delta", 100, "--epochs", 3,
        "--checkpoint", folder / "net.safetensors", "--keep", 2, "--keep-best", "--save-every", 4,
    )  # fmt: skip
    assert [e["steps"] for e in report["evaluations"]] == [5, 10, 15]
    assert report["stopped"] == "no improvement"
    assert "validation_loss" not in report["epochs"][0]
    named = {"net.safetensors", "net.best.safetensors", "net.step-12.safetensors", "net.step-15.safetensors"}
    assert {p.name for p in folder.iterdir()} == named
    losses = [e["loss"] for e in report["evaluations"]]
    best = Session(mlp_artifact, checkpoint=folder / "net.best.safetensors")
    arrays = dict(np.load(data))
    found = [best.eval_step(**{n: a[i : i + 6] for n, a in arrays.items()}) for i in range(0, 120, 6)]
    assert np.average(found) == min(losses)


def test_progress_fits_the_usual_terminal(mlp_artifact: Path, data: Path) -> None:
    options = ["--data", str(data), "--epochs", "2", "--validation", str(data)]
    shown = CliRunner().invoke(command, [str(mlp_artifact), *options]).output.splitlines()
    assert len(shown) == 2
    assert max(map(len, shown)) <= 80
    loss = r"loss \d\.\d{4}"
    for number, (line, rest) in enumerate(zip(shown, (r"\d:\d\d:\d\d left", r"[\d,]+ samples/s"), strict=True), 1):
        assert re.fullmatch(rf"epoch {number}/2 ━+ 20/20  {loss}  validation {loss}  {rest}", line.strip())


@pytest.mark.parametrize(("width", "shown"), [(80, ["samples/s", " left"]), (60, [" left"]), (36, [])])
def test_a_narrow_terminal_loses_what_matters_least(
    width: int, shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.StringIO()
    monkeypatch.setattr("irongrad.cli.train_progress.console", Console(file=written, width=width))
    with Display(12, quiet=False) as display:
        display(Started(0, 0, 0, 12000, 1000))
        display(Stepped(1, 0, 0.5, {}, {"lr": 0.1}, 16, 0.1))
    (line,) = written.getvalue().splitlines()
    assert len(line) <= width
    assert line.startswith("epoch 1/12 ")
    assert "1/1000  loss 0.5000" in line
    assert [text for text in ("samples/s", " left") if text in line] == shown


def test_a_resumed_run_goes_on_with_the_numbers_of_its_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr("irongrad.cli.train_progress.console", Console(file=written, width=80))
    with Display(4, quiet=False) as display:
        display(Started(25, 2, 5, 60, 10))
        display(Stepped(26, 2, 0.5, {}, {"lr": 0.1}, 16, 0.1))
    assert written.getvalue().startswith("epoch 3/6 ")


def start(artifact: Path, data: Path, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "irongrad", "train", artifact, "--data", data, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_sigterm_writes_the_checkpoint_and_exits_with_143(mlp_artifact: Path, data: Path, tmp_path: Path) -> None:
    path, log = tmp_path / "state.safetensors", tmp_path / "log.jsonl"
    process = start(mlp_artifact, data, "--epochs", 100000, "--checkpoint", path, "--log", log, "--json")
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end and not (log.exists() and "stepped" in log.read_text()):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 143, errors
    report = json.loads(out)
    assert report["stopped"] == "SIGTERM"
    steps = report["epochs"][-1]["steps"]
    assert lines(log, "ended") == [{"event": "ended", "step": steps, "reason": "SIGTERM"}]
    whole = tmp_path / "whole.safetensors"
    run(mlp_artifact, data, "--steps", steps, "--checkpoint", whole)
    assert whole.read_bytes() == path.read_bytes()
    assert {p.name for p in tmp_path.iterdir()} == {"data.npz", path.name, log.name, whole.name}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--save-every", "2", "--epochs", "9"], "state.safetensors has the state after 6 steps: --resume "),
        (["--epochs", "9"], "no checkpoint was written yet: --save-every"),
    ],
)
def test_an_interrupt_says_from_where_to_go_on(
    mlp_artifact: Path, data: Path, tmp_path: Path, options: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    show = Display.__call__

    def interrupted(display: Display, event: Event) -> None:
        show(display, event)
        if isinstance(event, Stepped) and event.step == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(Display, "__call__", interrupted)
    state = tmp_path / "state.safetensors"
    shown = CliRunner().invoke(command, [str(mlp_artifact), "--data", str(data), "--checkpoint", str(state), *options])
    assert told in shown.stderr
    assert shown.exit_code == 1
    assert state.exists() == ("--save-every" in options)


def test_shards_train_as_one_file_would(mlp_artifact: Path, data: Path, tmp_path: Path) -> None:
    arrays = dict(np.load(data))
    for number, (start, stop) in enumerate(((0, 50), (50, 60), (60, 120))):
        np.savez(tmp_path / f"shard-{number}.npz", **{n: a[start:stop] for n, a in arrays.items()})
        for name, array in arrays.items():
            np.save(tmp_path / f"{name}-{number}.npy", array[start:stop])
    whole = run(mlp_artifact, data, "--validation", data, "--epochs", 2)
    for files in ([f"{tmp_path}/shard-*.npz"], [f"x={tmp_path}/x-*.npy", f"y={tmp_path}/y-*.npy"]):
        first, *more = files
        options = [option for file in more for option in ("--data", file)]
        options += [option for file in files for option in ("--validation", file)]
        assert run(mlp_artifact, Path(first), *options, "--epochs", 2) == whole
    with pytest.raises(UserError, match="no file matches"):
        run(mlp_artifact, tmp_path / "*.nothing")


def test_a_file_that_is_larger_than_memory_is_mapped(
    mlp_artifact: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(mlp_artifact, data)
    monkeypatch.setattr("irongrad.training.numpy_files._free_memory", lambda: 1000)
    assert run(mlp_artifact, data) == whole
    np.savez_compressed(data, **dict(np.load(data)))
    with pytest.raises(UserError, match="of memory are free; split the file"):
        run(mlp_artifact, data)


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/dev/full").exists(), reason="needs a device that is full")
def test_a_log_that_cannot_be_written_is_one_line(mlp_artifact: Path, data: Path) -> None:
    process = start(mlp_artifact, data, "--log", "/dev/full")
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (2, "error: No space left on device\nsee docs/errors.md#usererror\n")
