"""The command line, for people and for scripts: in a new process, or in this one if that is enough."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from irongrad.cli.main import VERBS, main
from irongrad.runtime import Session

STEP = """
import torch
from torch import nn

import irongrad as ig
from sizes import HIDDEN


def make_step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 3))
    return ig.TrainStep(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        inputs={"x": torch.randn(8, 4), "y": torch.randint(0, 3, (8,))},
    )


def make_nothing():
    return 3


def make_branch():
    step = make_step()

    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = step.model

        def forward(self, x):
            if x.sum() > 0:  # the line that is at fault
                return self.inner(x)
            return self.inner(-x)

    model = Branch()
    return ig.TrainStep(model, step.loss, torch.optim.SGD(model.parameters(), lr=0.1), step.inputs)


def make_refused():
    class Refused(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            hidden = torch.special.airy_ai(x) + self.linear(x)  # the first refusal
            return torch.special.bessel_j0(hidden.detach()).sum() + hidden.sum()  # the second

    model = Refused()
    optimizer = torch.optim.AdamW(model.parameters())
    return ig.TrainStep(model, lambda out: out.sum(), optimizer, {"x": torch.randn(8, 4)})
"""


def irongrad(*arguments: object, code: int = 0) -> str:
    command = [sys.executable, "-m", "irongrad", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout if code == 0 else result.stdout + result.stderr


def irongrad_here(*arguments: object, code: int = 0) -> str:
    """As `irongrad`, but in this process, which has already loaded PyTorch. Loading it takes most of a run's time."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed), redirect_stderr(printed):
        patch.setattr(sys, "argv", ["irongrad", *map(str, arguments)])
        patch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as end:
            main()
        for module in ("step", "sizes"):  # modules of the project
            sys.modules.pop(module, None)
    assert end.value.code == code, printed.getvalue()
    return printed.getvalue()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a script, its artifact in `build/`, and training data."""
    directory = tmp_path_factory.mktemp("project")
    (directory / "step.py").write_text(STEP)
    (directory / "sizes.py").write_text("HIDDEN = 16\n")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((80, 4)).astype(np.float32)
    np.savez(directory / "data.npz", x=x, y=x[:, :3].argmax(1))
    np.save(directory / "x.npy", x[:8])
    out = irongrad(
        "compile", f"{directory / 'step.py'}:make_step", "-o", directory / "build", "--json",
        "--dump-dir", directory / "dump", "--depfile", directory / "step.d",
    )  # fmt: skip
    report = json.loads(out)
    assert report["targets"]["llvm-cpu"]["worst"] <= 1
    return directory


def test_names_cannot_control_the_terminal():
    from irongrad.cli.common import console

    with console.capture() as capture:
        console.print("a\x1b[2Jb\u202ec [red]d[/] ü\n")
    assert capture.get().startswith("a\\x1b[2Jb\\u202ec [red]d[/] ü\n")


def test_every_verb_has_help_with_an_example():
    for verb in VERBS:
        text = irongrad_here(verb, "--help")
        assert "Example:" in text
        assert f"irongrad {verb}" in text
        assert "--json" in text


def test_the_depfile_names_the_script_and_its_imports(project):
    text = (project / "step.d").read_text()
    assert str(project / "step.py") in text
    assert str(project / "sizes.py") in text


def test_every_stage_is_dumped(project):
    names = {p.name for p in (project / "dump").iterdir()}
    assert {
        "01_capture.train.txt",
        "02_differentiate.joint.fx",
        "03_optimizer.update.fx",
        "06_import.linalg.mlir",
    } <= names
    assert any(n.startswith("07_assemble") for n in names)
    assert "util.global private mutable" in (project / "dump" / "07_assemble.mlir").read_text()


def test_train_learns_and_resumes_where_it_left_off(project, tmp_path):
    common = ("train", project / "build", "--data", project / "data.npz", "--json")
    whole = json.loads(irongrad(*common, "--epochs", 4, "--checkpoint", tmp_path / "whole.safetensors"))
    losses = [e["loss"] for e in whole["epochs"]]
    assert losses[-1] < losses[0] / 2
    irongrad(*common, "--epochs", 2, "--checkpoint", tmp_path / "half.safetensors")
    rest = ("--epochs", 2, "--resume", tmp_path / "half.safetensors", "--checkpoint", tmp_path / "rest.safetensors")
    irongrad(*common, *rest)
    assert (tmp_path / "rest.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


def test_train_shows_progress_and_takes_hyperparameters(project, tmp_path):
    out = irongrad(
        "train", project / "build", "--data", project / "data.npz", "--epochs", 2, "--lr", 0.05,
        "--set", "momentum=0.5", "--validation", project / "data.npz", "--checkpoint", tmp_path / "c.safetensors",
    )  # fmt: skip
    assert "epoch 2/2" in out
    assert "validation" in out
    assert "saved" in out


def test_a_larger_batch_is_accumulated(project):
    common = ("train", project / "build", "--data", project / "data.npz", "--json", "--batch-size")
    assert json.loads(irongrad(*common, 16))["epochs"][0]["steps"] == 5
    assert "compiled for batches of 8" in irongrad(*common, 12, code=2)


BAD_DATA = {
    "missing": (lambda a: {"x": a["x"]}, "the step also needs y"),
    "dtype": (lambda a: {**a, "x": a["x"].astype(np.float64)}, "x is float64[80, 4], the step takes float32[N, 4]"),
    "length": (lambda a: {**a, "y": a["y"][:7]}, "different numbers of samples"),
    "few": (lambda a: {n: v[:5] for n, v in a.items()}, "fewer than one batch of 8"),
    "classes": (lambda a: {**a, "y": a["y"] + 3}, "y: every value must be in [0, 2]"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_train_refuses_bad_data(project, tmp_path, case):
    change, message = BAD_DATA[case]
    with np.load(project / "data.npz") as file:
        arrays = {n: file[n] for n in file.files}
    np.savez(tmp_path / "bad.npz", **change(arrays))
    report = json.loads(irongrad("train", project / "build", "--data", tmp_path / "bad.npz", "--json", code=2))
    assert message in report["error"]["message"]


def test_run_writes_and_prints_outputs(project, tmp_path):
    predict = ("run", project / "build", "predict", "--input", f"x={project / 'x.npy'}")
    irongrad(*predict, "--output", tmp_path / "out.npy")
    expected = Session(project / "build").predict(x=np.load(project / "x.npy"))
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)
    assert np.allclose(json.loads(irongrad(*predict, "--json"))["outputs"]["output"], expected)
    assert "output: float32[8, 3]" in irongrad(*predict)
    assert "no such output" in irongrad(*predict, "--output", "loss=a.npy", code=2)
    assert "no entry point 'fit'" in irongrad("run", project / "build", "fit", code=2)


def test_run_can_save_the_state(project, tmp_path):
    np.save(tmp_path / "y.npy", np.zeros(8, np.int64))
    irongrad(
        "run", project / "build", "train_step", "--input", f"x={project / 'x.npy'}",
        "--input", f"y={tmp_path / 'y.npy'}", "--set", "lr=0.5", "--save", tmp_path / "after.safetensors",
    )  # fmt: skip
    session = Session(project / "build")
    session.train_step(x=np.load(project / "x.npy"), y=np.zeros(8, np.int64), lr=0.5)
    expected = session.state()
    session.restore(tmp_path / "after.safetensors")
    for name, value in session.state().items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_inspect_shows_everything(project):
    text = irongrad("inspect", project / "build")
    parts = (
        "train_step(x: float32[8, 4], y: int64[8], lr: float64",
        "optimizer/momentum_buffer/0.weight",
        "y in [0, 2] or -100",
        "buckets: none",
        "torch 2.13.0",
        "sha256",
        "iree-run-module --device=local-sync",
    )
    assert [p for p in parts if p not in text] == []
    report = json.loads(irongrad("inspect", project / "build", "--json"))
    assert {"entry_points", "state", "targets", "versions", "files", "commands", "signatures"} <= report.keys()


def test_a_pasted_command_runs_through_a_shell(project):
    report = json.loads(irongrad("inspect", project / "build", "--json"))
    for entry in ("train_step", "train_steps", "predict"):
        result = subprocess.run(report["commands"][entry], shell=True, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr


def test_inspect_shows_which_files_were_not_copied(project, tmp_path):
    device = tmp_path / "device"
    shutil.copytree(project / "build", device, ignore=shutil.ignore_patterns("*.mlirbc", "*.gz"))
    lines = irongrad("inspect", device).splitlines()
    assert {line.split()[0] for line in lines if "not here" in line} == {"step.mlirbc", "analysis.json.gz"}


def test_verify_passes_on_a_right_artifact(project):
    report = json.loads(irongrad("verify", project / "build", "--device", "local-sync", "--json"))
    assert report["passed"]
    assert report["compared"] > 50
    text = irongrad("verify", project / "build")
    assert "ratio" in text
    assert f"{report['tightness']['elements']:,} elements; errors are " in text
    assert "cannot be judged" not in text
    assert report["unjudged"] == []


def test_verify_fails_on_a_wrong_artifact(project, tmp_path):
    """One golden value is off by 1e-4, so the binary must fail against it."""
    import shutil

    from irongrad.runtime.golden import read_golden, write_golden
    from irongrad.runtime.manifest import GOLDEN
    from irongrad.runtime.manifest_file import file_spec, read_manifest, write_manifest

    wrong = shutil.copytree(project / "build", tmp_path / "wrong")
    golden = read_golden(wrong / GOLDEN)
    golden.expected["gradient/1/0.weight"][2, 1] += 1e-4  # type: ignore[index]
    write_golden(golden, wrong / GOLDEN)
    manifest = read_manifest(wrong)
    manifest.files[GOLDEN] = file_spec(wrong / GOLDEN)
    write_manifest(manifest, wrong)
    text = irongrad("verify", wrong, code=3)
    assert "gradient/1/0.weight" in text
    assert "1 wrong" in text


WRONG_COMPILES = [
    ("step.py:nope", (), "has no function 'nope'; it has make_step"),
    ("step.py:make_nothing", (), "must return an irongrad.TrainStep"),
    ("nowhere.py:f", (), "does not exist"),
    ("step.py", (), "not FILE:FUNCTION"),
    ("step.py:make_step", ("--target", "llvm"), "did you mean 'llvm-cpu'"),
    ("step.py:make_step", ("--target", "llvm-cpu:cpus=host"), "has no option 'cpus'"),
    ("step.py:make_step", ("--stop-after", "linking"), "no stage 'linking'"),
    ("step.py:make_step", ("--entry-point", "fit"), "there is no entry point 'fit'; there are apply_step, "),
    (
        "step.py:make_step",
        ("--entry-point", "trainstep"),
        "there is no entry point 'trainstep' (did you mean 'train_step'?)",
    ),
    ("step.py:make_step", ("--disable-pass", "rowblocks"), "there is no pass 'rowblocks' (did you mean 'row-blocks'?)"),
    ("step.py:make_step", ("--passes", "dec"), "there is no pass 'dec' (did you mean 'dce'?)"),
    ("step.py:make_step", ("--max-memory", "50"), "'50' has no unit; write 50% for a share, or for instance 50MiB"),
]


@pytest.mark.parametrize(("source", "options", "message"), WRONG_COMPILES)
def test_compile_says_what_is_wrong(project, tmp_path, source, options, message):
    text = irongrad_here("compile", project / source, "-o", tmp_path / "out", *options, code=2)
    assert message in text.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def line_of(marker):
    return next(i for i, x in enumerate(STEP.splitlines(), 1) if marker in x)


def test_check_lists_every_operator(project):
    text = irongrad_here("check", f"{project / 'step.py'}:make_step")
    assert "all of them can be compiled for llvm-cpu" in text
    report = json.loads(irongrad_here("check", f"{project / 'step.py'}:make_step", "--json"))
    assert report["compiles"]
    assert report["refusals"] == []
    assert set(report["operators"]) == {"forward", "backward", "update", "evaluation"}
    rows = {(r["phase"], r["operator"]): r for r in report["lowerings"]}
    assert rows["forward", "aten.linear.default"]["count"] == 2
    assert rows["forward", "aten.linear.default"]["how"] == "PyTorch's decomposition"
    assert rows["backward", "aten.mm.default"]["how"] == "core operator"
    assert "aten.amax.default" in rows["forward", "aten.cross_entropy_loss.default"]["into"]


def test_a_virtual_environment_may_lie_behind_a_link(project, tmp_path):
    """Python then spells the files of PyTorch with the link, and they are still none of the user's."""
    (tmp_path / "venv").symlink_to(sys.prefix)
    command = [tmp_path / "venv/bin/python", "-m", "irongrad", "check", f"{project / 'step.py'}:make_step"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_check_finds_every_refusal_at_once(project):
    text = irongrad_here("check", f"{project / 'step.py'}:make_refused", code=2)
    assert "2 operators cannot be compiled" in text
    for marker, name in [("# the first refusal", "airy_ai"), ("# the second", "bessel_j0")]:
        assert f"step.py:{line_of(marker)}: " in text
        assert name in text
    report = json.loads(irongrad_here("check", f"{project / 'step.py'}:make_refused", "--json", code=2))
    assert not report["compiles"]
    first, second = report["refusals"]
    assert first["line"].startswith(f"{project / 'step.py'}:{line_of('# the first refusal')}: ")
    assert "register_decomposition" in second["advice"]
    assert [r["operator"] for r in report["lowerings"] if r["how"] == "refused" and r["phase"] == "forward"]


def test_check_says_a_refusal_without_a_line_once(tmp_path):
    (tmp_path / "frozen.py").write_text(
        "import torch\nimport irongrad as ig\n\n\ndef make_step():\n"
        "    model = torch.nn.Sequential(torch.nn.Linear(3, 2)).requires_grad_(False)\n"
        "    optimizer = torch.optim.SGD(model.parameters())\n"
        "    return ig.TrainStep(model, lambda y: y.sum(), optimizer, {'x': torch.ones(4, 3)})\n"
    )
    text = irongrad_here("check", f"{tmp_path / 'frozen.py'}:make_step", code=2)
    assert text.count("every parameter of the model is frozen") == 1
    assert "lowered as" not in text  # no operator was found


def test_check_reports_failed_captures_and_unknown_targets(project):
    assert f"step.py:{line_of('at fault')}" in irongrad_here("check", f"{project / 'step.py'}:make_branch", code=2)
    assert "did you mean" in irongrad_here("check", f"{project / 'step.py'}:make_step", "--target", "llvm", code=2)


@pytest.mark.parametrize(("cpu", "is_told"), [("x86-64-v3", True), ("sapphirerapids", False)])
def test_compile_says_that_a_cpu_does_not_multiply_bfloat16(project, tmp_path, cpu, is_told):
    target = f"llvm-cpu:arch=x86_64,cpu={cpu}"
    arguments = ["-o", tmp_path / "out", "--precision", "bf16", "--target", target]
    text = irongrad_here("compile", f"{project / 'step.py'}:make_step", *arguments)
    assert ("for a CPU without instructions for bfloat16" in text) == is_told


def test_compile_never_replaces_something_else(project, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert "not an artifact" in irongrad_here("compile", f"{project / 'step.py'}:make_step", "-o", tmp_path, code=2)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_compile_points_at_the_users_line(project, tmp_path):
    text = irongrad_here("compile", f"{project / 'step.py'}:make_branch", "-o", tmp_path / "out", code=2)
    line = next(i for i, x in enumerate(STEP.splitlines(), 1) if "the line that is at fault" in x)
    assert f"step.py:{line}" in text.replace("\n", "")
    assert "torch.where" in text.replace("\n", " ")


def test_stop_after_writes_no_artifact(project, tmp_path):
    text = irongrad_here(
        "compile", f"{project / 'step.py'}:make_step", "-o", tmp_path / "out", "--stop-after", "differentiate",
        "--dump-dir", tmp_path / "dump",
    )  # fmt: skip
    assert "stopped as asked" in text
    assert not (tmp_path / "out").exists()
    assert {p.name[:2] for p in (tmp_path / "dump").iterdir()} == {"01", "02"}


@pytest.mark.parametrize("stage", ["import", "assemble"])
def test_memory_is_predicted_when_the_build_stops_before_iree(project, tmp_path, stage):
    arguments = ("-o", tmp_path / "out", "--stop-after", stage, "--json")
    report = json.loads(irongrad_here("compile", f"{project / 'step.py'}:make_step", *arguments))
    assert report["predicted"]["train_step"] > 0


def test_a_directory_that_is_no_artifact_is_refused(tmp_path):
    assert "not an IronGrad artifact" in irongrad("inspect", tmp_path, code=2)
    report = json.loads(irongrad("inspect", tmp_path, "--json", code=2))
    assert report["error"]["class"] == "ArtifactError"
