"""The C library: it computes what Python computes, its files are Python's, and it refuses what Python refuses.

IRONGRAD_IREE_SOURCE_DIR names a source tree of IREE; docs/cmake.md says which. The programs run with the address and
undefined-behaviour sanitizers.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import nn

import irongrad as ig
from irongrad.runtime import Session, load
from irongrad.runtime.cpu import cpu_features
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import Manifest, PlacementSpec
from irongrad.runtime.manifest_file import read_manifest, write_manifest
from tests.cmake.test_cmake import ROOT, succeed
from tests.runtime.test_relied_values import Indexed, OfTheProgram, Reads, make_step

SOURCE = os.environ.get("IRONGRAD_IREE_SOURCE_DIR")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(SOURCE is None, reason="IRONGRAD_IREE_SOURCE_DIR names no source tree of IREE"),
]

OK, ARTIFACT_ERROR, GUARD_ERROR, FILE_ERROR = range(4)
NO_XOP = pytest.mark.skipif("xop" in (cpu_features() or ()), reason="this CPU has the feature")
# The order of irongrad_dtype.
DTYPES = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
DTYPES += ["float16", "bfloat16", "float32", "float64"]
LR = 0.003


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    build = tmp_path_factory.mktemp("c") / "build"
    options = [f"-DIRONGRAD_IREE_SOURCE_DIR={SOURCE}", f"-DIronGrad_DIR={ROOT / 'irongrad' / 'cmake'}"]
    succeed("cmake", "-S", Path(__file__).parent / "c", "-B", build, *options)
    succeed("cmake", "--build", build, "-j", "2")
    return build


class Driver:
    """The program that runs commands; each returns a status and a message."""

    def __init__(self, programs: Path, folder: Path) -> None:
        self._folder = folder
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen([programs / "driver"], text=True, **pipes)

    def __call__(self, *words: object) -> tuple[int, str]:
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        status, _, message = self.process.stdout.readline().rstrip("\n").partition(" ")
        return int(status), message

    def call(self, entry: str, arguments: dict[str, np.ndarray], **results: np.ndarray) -> tuple[int, str]:
        """Run an entry point; fill the arrays in `results`. A name `_` stands for the next argument."""
        words = []
        for i, (name, array) in enumerate(arguments.items()):
            array.tofile(self._folder / f"{i}.in")
            sizes = "x".join(map(str, array.shape))
            words.append(f"<{name.strip('_')}:{DTYPES.index(array.dtype.name)}:{sizes}:{self._folder / f'{i}.in'}")
        for name, array in results.items():
            words.append(f">{name}:{DTYPES.index(array.dtype.name)}:{array.size}:{self._folder / f'{name}.out'}")
        answer = self("call", entry, *words)
        for name, array in results.items() if answer[0] == OK else ():
            array.reshape(-1)[:] = np.fromfile(self._folder / f"{name}.out", array.dtype)[: array.size]
        return answer

    def step(self, batch: dict[str, np.ndarray], lr: float = LR) -> np.float32:
        loss = np.zeros((), np.float32)
        answer = self.call("train_step", {**batch, "lr": np.float64(lr)}, loss=loss)
        assert answer == (OK, "")
        return loss

    def state(self) -> dict[str, np.ndarray]:
        assert self("save", self._folder / "state.safetensors", "whole") == (OK, "")
        return safetensors.numpy.load_file(self._folder / "state.safetensors")

    def end(self) -> None:
        """End the program; fails if a sanitizer found anything."""
        _, error = self.process.communicate(timeout=60)
        assert (self.process.returncode, error) == (0, "")


@pytest.fixture
def driver(programs: Path, tmp_path: Path) -> Iterator[Driver]:
    driver = Driver(programs, tmp_path)
    yield driver
    driver.end()


@pytest.fixture(scope="module")
def other_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model, with SGD."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    inputs = {"x": torch.randn(6, 8), "y": torch.randint(0, 4, (6,))}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    directory = tmp_path_factory.mktemp("other") / "other"
    ig.compile(ig.TrainStep(model, nn.functional.cross_entropy, optimizer, inputs), directory)
    return directory


def equal(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    same = (one[n].dtype == other[n].dtype and one[n].tobytes() == other[n].tobytes() for n in one.keys() & other)
    return one.keys() == other.keys() and all(same)


@pytest.mark.parametrize("device", ["local-sync", "local-task"])
def test_twenty_steps_are_pythons_to_the_bit(device, driver, mlp_artifact, batches, tmp_path):
    python = Session(mlp_artifact, device=device)
    assert driver("load", mlp_artifact, f"device={device}") == (OK, "")
    assert [driver.step(b) for b in batches] == [python.train_step(**b, lr=LR) for b in batches]
    assert driver("save", tmp_path / "c.safetensors", "whole") == (OK, "")
    python.save(tmp_path / "python.safetensors")
    files = [safetensors.numpy.load_file(tmp_path / f"{name}.safetensors") for name in ("c", "python")]
    assert equal(*files)

    resumed = load(mlp_artifact, checkpoint=tmp_path / "c.safetensors")
    restored = Session(mlp_artifact)
    restored.restore(tmp_path / "c.safetensors")
    expected = python.train_step(**batches[0], lr=LR)
    assert [resumed.train_step(**batches[0], lr=LR), restored.train_step(**batches[0], lr=LR)] == [expected] * 2


def test_a_thread_that_waits_does_not_hold_up_the_workers(driver, tmp_path):
    """On one core. Without `invoke` of module.c, each step takes 4 ms more of the thread that waits for it.

    Linux lets a thread finish that has computed for less than 3 ms.
    """
    layer, inputs = nn.Linear(1024, 1024), {"x": torch.randn(256, 1024)}
    step = ig.TrainStep(layer, torch.Tensor.sum, torch.optim.SGD(layer.parameters(), lr=1e-3), inputs)
    ig.compile(step, tmp_path / "wide")
    os.sched_setaffinity(driver.process.pid, {min(os.sched_getaffinity(0))})
    assert driver("load", tmp_path / "wide", "device=local-task") == (OK, "")
    batch = {"x": inputs["x"].numpy()}
    driver.step(batch)
    statistics = Path(f"/proc/{driver.process.pid}/schedstat")  # of the first thread, in nanoseconds
    before = int(statistics.read_text().split()[0])
    for _ in range(50):
        driver.step(batch)
    assert int(statistics.read_text().split()[0]) - before < 50 * 4.5e6  # reading the batch takes half
    assert os.sched_getscheduler(driver.process.pid) == os.SCHED_OTHER


def test_a_checkpoint_of_python_goes_on_in_c(driver, mlp_artifact, batches, tmp_path):
    python = Session(mlp_artifact)
    for batch in batches[:7]:
        python.train_step(**batch, lr=LR)
    python.save(tmp_path / "python.safetensors", beside={"ema/0.weight": np.zeros(2, np.float32)})
    assert driver("load", mlp_artifact) == (OK, "")
    driver.step(batches[9])
    assert driver("restore", tmp_path / "python.safetensors") == (OK, "")
    assert [driver.step(b) for b in batches[7:]] == [python.train_step(**b, lr=LR) for b in batches[7:]]


def test_every_kind_of_entry_point(driver, mlp_artifact, batches):
    python = Session(mlp_artifact)
    assert driver("load", mlp_artifact, "target=llvm-cpu") == (OK, "")
    stacked = {n: np.stack([b[n] for b in batches]) for n in batches[0]}
    losses, loss, logits = np.zeros(20, np.float32), np.zeros((), np.float32), np.zeros((6, 4), np.float32)
    rates = np.linspace(1e-3, 1e-2, 20)
    assert driver.call("train_steps", {**stacked, "lr": rates}, losses=losses) == (OK, "")
    assert losses.tolist() == python.train_steps(**stacked, lr=rates).tolist()
    assert driver.call("train_steps", {**stacked, "lr": np.float64(LR)}, losses=losses) == (OK, "")
    assert losses.tolist() == python.train_steps(**stacked, lr=LR).tolist()
    assert driver.call("eval_step", batches[0], loss=loss) == (OK, "")
    assert loss == python.eval_step(**batches[0])
    assert driver.call("predict", {"_": batches[0]["x"]}, output=logits) == (OK, "")
    assert logits.tolist() == python.predict(x=batches[0]["x"]).tolist()
    for session_step in (driver.call("grad_step", batches[1]), driver.call("apply_step", {"lr": np.float64(LR)})):
        assert session_step == (OK, "")
    python.grad_step(**batches[1])
    python.apply_step(lr=LR)
    positional = {"_": batches[2]["x"], "__": batches[2]["y"], "___": np.float64(LR)}
    assert driver.call("train_step", positional, loss=loss) == (OK, "")
    assert loss == python.train_step(**batches[2], lr=LR)
    assert driver.call("reset", {}) == (OK, "")
    python.reset()
    assert driver.step(batches[3]) == python.train_step(**batches[3], lr=LR)  # with the optimizer's own betas


def test_a_nan_in_an_input_gives_pythons_numbers(driver, mlp_artifact, batches):
    spoilt = {**batches[0], "x": np.full((6, 8), np.nan, np.float32)}
    python = Session(mlp_artifact, on_nonfinite="ignore")
    assert driver("load", mlp_artifact) == (OK, "")
    assert np.isnan(driver.step(spoilt))
    assert np.isnan(python.train_step(**spoilt, lr=LR))
    mine, theirs = driver.state(), python.state()
    assert all(np.array_equal(theirs[n], mine[n], equal_nan=True) for n in theirs)


REFUSED_CALLS: list[tuple[str, dict[str, np.ndarray], dict[str, np.ndarray], str]] = [
    ("train", {}, {}, "the artifact has no entry point 'train'; `irongrad inspect` lists its own"),
    ("train_step", {"x": None}, {}, "train_step: the input 'y' is missing; expected train_step(x: float32[6, 8], y: "),
    ("train_step", {"z": None}, {}, "train_step takes no argument 'z'; expected train_step("),
    (
        "train_step",
        {"x": np.zeros((5, 8), np.float32), "y": None},
        {},
        "shape dimension 0 mismatch; expected 6 but have",
    ),
    (
        "train_step",
        {"x": np.zeros((6, 8)), "y": None},
        {},
        "x element type mismatch; expected f32 but have f64; expected train_step(",
    ),
    ("train_step", {"x": None, "y": np.full(6, 4)}, {}, "train_step: y: every value must be in [0, 3] (or -100)"),
    ("train_step", {"x": None, "y": None, "lr": np.float64("nan")}, {}, "train_step: lr is nan: it must be finite"),
    ("train_step", {"x": None, "y": None, "lr": np.float64("inf")}, {}, "train_step: lr is inf: it must be finite"),
    (
        "train_step",
        {"x": None, "y": None, "lr": np.float32(1)},
        {},
        "train_step: lr must be a float64 number; expected",
    ),
    ("train_step", {"x": None, "y": None, "lr": np.ones(1)}, {}, "train_step: lr must be a float64 number; expected"),
    ("train_step", {"x": np.zeros((1,) * 9, np.float32), "y": None}, {}, "train_step: x has too many dimensions"),
    ("train_step", {"x": None, "_": None, "y": None}, {}, "train_step: 'y' is given twice"),
    ("train_step", {"x": None, "y": None}, {"none": np.zeros(1)}, "train_step has no result 'none'"),
    ("train_step", {"x": None, "y": None}, {"loss": np.zeros(1)}, "train_step: the result 'loss' is float32"),
    ("train_step", {"x": None, "y": None}, {"loss": np.zeros(2, np.float32)}, "'loss' has another number of elements"),
    ("train_step", {"_" * i: np.float64(1) for i in range(1, 10)}, {}, "train_step: "),
    ("apply_step", {}, {}, "apply_step: no gradients are accumulated"),
]


@pytest.mark.parametrize(("entry", "arguments", "results", "message"), REFUSED_CALLS)
def test_a_refused_call_changes_nothing(entry, arguments, results, message, driver, mlp_artifact, batches):
    batch = batches[1]
    given = {n: a if a is not None else batch.get(n, batch["y"]) for n, a in arguments.items()}
    assert driver("load", mlp_artifact) == (OK, "")
    driver.step(batches[0])
    before = driver.state()
    status, said = driver.call(entry, given, **results)
    assert status == GUARD_ERROR
    assert message in said
    assert equal(driver.state(), before)
    python = Session(mlp_artifact)
    python.train_step(**batches[0], lr=LR)
    assert driver.step(batch) == python.train_step(**batch, lr=LR)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def edit_default(path: Path) -> None:
    path.write_text(path.read_text().replace('"default": 0.9,', '"default": 0.8,').replace("0.9\n", "0.8\n"))


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("manifest.json", Path.unlink, "manifest.json does not exist"),
        ("manifest.json", cut, "manifest.json is damaged. Copy or compile the artifact again"),
        ("manifest.json", edit_default, "manifest.json is damaged"),
        ("manifest.json", lambda p: p.write_text('{"format_version": 2}'), "format version 2, and this library reads"),
        ("manifest.json", lambda p: p.write_text("[" * 100000), "manifest.json is damaged"),
        ("step.llvm-cpu.vmfb", Path.unlink, "step.llvm-cpu.vmfb does not exist"),
        ("step.llvm-cpu.vmfb", cut, "step.llvm-cpu.vmfb differs from its sha256"),
        ("step.llvm-cpu.vmfb", flip, "step.llvm-cpu.vmfb differs from its sha256"),
        ("state.irpa", flip, "state.irpa differs from its sha256 in the manifest"),
        ("state.irpa", Path.unlink, "state.irpa does not exist"),
    ],
)
def test_a_damaged_artifact_is_refused(name, damage, message, driver, mlp_artifact, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(mlp_artifact, broken)
    damage(broken / name)
    status, said = driver("load", broken)
    assert status == ARTIFACT_ERROR
    assert message in said
    with pytest.raises(ArtifactError):
        load(broken)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("target=none", "has no target none"),
        ("device=vulkan", "the device vulkan is neither local-task nor local-sync"),
        ("base=model.irpa", "holds all of its state, so it takes no base"),
    ],
)
def test_wrong_options_are_refused(option, message, driver, mlp_artifact):
    status, said = driver("load", mlp_artifact, option)
    assert (status, message in said) == (ARTIFACT_ERROR, True), said


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"features": ("sse3", "amx-bf16x")}, ""),  # IREE does not know the second, so no kernel of its uses it
        pytest.param({"features": ("xop",)}, "needs the CPU feature xop, which this machine lacks", marks=NO_XOP),
        ({"architecture": "riscv64"}, "is compiled for riscv64, this machine is"),
        ({"device": "cuda"}, "runs on the device cuda, and the C library runs on CPUs"),
    ],
)
def test_a_target_that_cannot_run_here_is_refused(changed, message, driver, mlp_artifact, tmp_path):
    manifest = copied(mlp_artifact, tmp_path / "copy")
    write_manifest(replace(manifest, targets=(replace(manifest.targets[0], **changed),)), tmp_path / "copy")
    status, said = driver("load", tmp_path / "copy")
    assert (status == ARTIFACT_ERROR, message in said) == (bool(message), True), said


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"placement": PlacementSpec((), {})}, "runs on several devices, which only Python can"),
        ({"shards": (("optimizer/exp_avg/0.weight",),)}, "divides the optimizer's state among ranks"),
    ],
)
def test_an_artifact_in_parts_is_refused(changed, message, driver, mlp_artifact, tmp_path):
    write_manifest(replace(copied(mlp_artifact, tmp_path / "copy"), **changed), tmp_path / "copy")
    status, said = driver("load", tmp_path / "copy")
    assert (status, message in said) == (ARTIFACT_ERROR, True), said


def copied(artifact: Path, copy: Path) -> Manifest:
    shutil.copytree(artifact, copy)
    return read_manifest(copy)


def rewritten(change: Callable[[dict[str, np.ndarray]], None]) -> Callable[[Path], None]:
    """Damage a checkpoint by a change of its tensors; the file has no checksum."""

    def damage(path: Path) -> None:
        tensors = safetensors.numpy.load_file(path)
        change(tensors)
        safetensors.numpy.save_file(tensors, path)

    return damage


def with_header(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = change(data[8 : 8 + length])
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])

    return damage


NO_CHECKPOINTS = [
    (Path.unlink, "does not exist"),
    (lambda p: (p.unlink(), p.mkdir()), "is no file"),
    (lambda p: p.write_bytes(b""), "it is too short for a header"),
    (lambda p: p.write_bytes(b"\xff" * 64), "its header does not fit into it"),
    (lambda p: p.write_bytes((56).to_bytes(8, "little") + b"{" * 56), "its header is no table of tensors"),
    (cut, "its header does not say the dtype, shape and place of"),
    (lambda p: p.write_bytes(p.read_bytes() + b"0"), "its tensors do not fill it without gaps"),
    (flip, "its tensors differ from its checksum"),
    (with_header(lambda h: h.replace(b'"0.bias"', b'"1.bias"', 1)), "its header has a name twice"),
    (with_header(lambda h: h.rstrip() + b"x"), "its header is no table of tensors"),
    (with_header(lambda h: h.replace(b'"F32"', b'"F99"', 1)), "its header does not say the dtype"),
    (with_header(lambda h: h.replace(b'"shape":[16', b'"shape":[-1', 1)), "its header does not say the dtype"),
    (with_header(lambda h: re.sub(rb'"data_offsets":\[\d+', b'"data_offsets":[1e300', h, count=1)), "does not say the"),
    (
        rewritten(lambda t: t.pop("0.weight")),
        "does not fit this step (another model or optimizer?): 0.weight is missing",
    ),
    (rewritten(lambda t: t.update(more=np.zeros(1))), "more is unknown"),
    (
        rewritten(lambda t: t.update({"0.bias": t["0.bias"].view(np.int32)})),
        "0.bias is int32[16], the step has float32[16]",
    ),
    (rewritten(lambda t: t.update({"0.weight": t["0.weight"].T.copy()})), "0.weight is float32[8,16], the step has"),
    (rewritten(lambda t: t.update({"irongrad/steps": np.array(-1)})), "irongrad/steps counts, and is below 0"),
    (
        rewritten(lambda t: t.update({"optimizer/step/0.bias": np.array(9, np.float32)})),
        "are one tensor in the compiled step, but",
    ),
    (rewritten(dict.clear), "is missing; "),
]


@pytest.mark.parametrize(("damage", "message"), NO_CHECKPOINTS)
def test_a_refused_checkpoint_changes_nothing(damage, message, driver, mlp_artifact, batches, tmp_path):
    path = tmp_path / "damaged.safetensors"
    python = Session(mlp_artifact)
    python.train_step(**batches[5], lr=LR)
    python.save(path)
    damage(path)
    with pytest.raises(ArtifactError):
        python.restore(path)

    assert driver("load", mlp_artifact) == (OK, "")
    driver.step(batches[0])
    before = driver.state()
    status, said = driver("restore", path)
    assert (status, message in said) == (ARTIFACT_ERROR, True), said
    assert equal(driver.state(), before)


@pytest.mark.parametrize(
    ("model", "name", "status", "message"),
    [
        (Reads(), "scale", ARTIFACT_ERROR, "scale has other values than those that the step was compiled for"),
        (OfTheProgram(1), "passing", ARTIFACT_ERROR, "passing has other values than those that the step"),
        (Indexed(), "place", GUARD_ERROR, "compiled for the values of place at capture, in [0, 3]"),
    ],
)
def test_other_values_than_a_step_relies_on_are_refused(model, name, status, message, driver, tmp_path):
    ig.compile(make_step(model), tmp_path / "net")
    state = Session(tmp_path / "net").state()
    safetensors.numpy.save_file(state, tmp_path / "same.safetensors")
    other = {**state, name: np.asarray(state[name] + 9, state[name].dtype)}
    safetensors.numpy.save_file(other, tmp_path / "other.safetensors")
    assert driver("load", tmp_path / "net") == (OK, "")
    assert driver("restore", tmp_path / "same.safetensors") == (OK, "")
    found, said = driver("restore", tmp_path / "other.safetensors")
    assert (found, message in said, "shape" in said) == (status, True, False), said


def test_a_checkpoint_of_another_artifact_is_refused(driver, mlp_artifact, other_artifact, batches, tmp_path):
    Session(other_artifact).save(tmp_path / "other.safetensors")
    assert driver("load", mlp_artifact) == (OK, "")
    status, said = driver("restore", tmp_path / "other.safetensors")
    assert status == ARTIFACT_ERROR
    assert "does not fit this step (another model or optimizer?)" in said
    assert re.search(r"is missing; .*, and \d+ more$", said)
    assert driver.step(batches[0]) == Session(mlp_artifact).train_step(**batches[0], lr=LR)


def test_a_file_that_cannot_be_written_leaves_the_old_one(driver, mlp_artifact, batches, tmp_path):
    assert driver("load", mlp_artifact) == (OK, "")
    path = tmp_path / "kept.safetensors"
    assert driver("save", path, "whole") == (OK, "")
    written = path.read_bytes()
    assert driver("save", tmp_path / "none" / "c.safetensors", "whole")[0] == FILE_ERROR
    assert driver("save", tmp_path, "whole") == (FILE_ERROR, f"{tmp_path} cannot be written: Is a directory")
    (tmp_path / "kept.safetensors.tmp").mkdir()
    driver.step(batches[0])
    assert driver("save", path, "whole")[0] == FILE_ERROR
    assert path.read_bytes() == written
    (tmp_path / "kept.safetensors.tmp").rmdir()
    link = tmp_path / "link.safetensors"
    link.symlink_to(path)
    path.chmod(0o640)
    (tmp_path / "kept.safetensors.tmp").write_bytes(bytes(1 << 20))  # of a writer that was killed
    assert driver("save", link, "whole") == (OK, "")
    assert link.is_symlink()
    assert path.read_bytes() != written
    assert path.stat().st_mode & 0o777 == 0o640
    assert not (tmp_path / "kept.safetensors.tmp").exists()


class Adapted(nn.Module):
    """A frozen layer, and a head that is trained, with a name outside ASCII."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Linear(8, 32).requires_grad_(requires_grad=False)
        self.add_module("kopf_ä𝔘", nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.get_submodule("kopf_ä𝔘")(torch.relu(self.frozen(x)))


@pytest.mark.parametrize("has_base", [False, True])
def test_frozen_tensors_stay_out_of_the_trainable_state(has_base, driver, batches, tmp_path):
    model, base = Adapted(), tmp_path / "base.irpa" if has_base else None
    optimizer = torch.optim.SGD(model.get_submodule("kopf_ä𝔘").parameters(), lr=0.1, momentum=0.9)
    inputs = {n: torch.from_numpy(a) for n, a in batches[0].items()}
    ig.compile(ig.TrainStep(model, nn.functional.cross_entropy, optimizer, inputs), tmp_path / "net", base=base)
    python = Session(tmp_path / "net")
    assert driver("load", tmp_path / "net") == (OK, "")
    assert [driver.step(b) for b in batches[:5]] == [python.train_step(**b, lr=LR) for b in batches[:5]]
    assert driver("save", tmp_path / "c.safetensors", "trainable") == (OK, "")
    python.save(tmp_path / "python.safetensors", trainable=True)
    files = [safetensors.numpy.load_file(tmp_path / f"{name}.safetensors") for name in ("c", "python")]
    assert equal(*files)
    assert not any(name.startswith("frozen") for name in files[0])
    python.restore(tmp_path / "c.safetensors")
    driver.step(batches[7])
    assert driver("restore", tmp_path / "python.safetensors") == (OK, "")
    assert driver.step(batches[8]) == python.train_step(**batches[8], lr=LR)

    whole = driver("save", tmp_path / "whole.safetensors", "whole")
    python.save(tmp_path / "whole.python.safetensors", trainable=False)
    restored = driver("restore", tmp_path / "whole.python.safetensors")
    if has_base:
        assert whole[0] == GUARD_ERROR
        assert "lies in the base file, so only the trainable state can be saved" in whole[1]
        assert restored[0] == ARTIFACT_ERROR
        assert "Save the trainable state alone" in restored[1]
        flip(base)
        driver("close")
        assert "differs from its sha256" in driver("load", tmp_path / "net")[1]
    else:
        assert (whole, restored) == ((OK, ""), (OK, ""))
    header = with_header(lambda h: h.replace(b'\\"base\\": \\"', b'\\"base\\": \\"0', 1))
    header(tmp_path / "python.safetensors")
    if not has_base:
        status, said = driver("restore", tmp_path / "python.safetensors")
        assert (status, "was trained on another base" in said) == (ARTIFACT_ERROR, True)


def test_two_sessions_train_while_others_are_opened_and_threads_share_one(programs, mlp_artifact, batches, tmp_path):
    batch = batches[0]
    for name in ("x", "y"):
        batch[name].tofile(tmp_path / name)
    command = [programs / "threads", mlp_artifact, tmp_path / "x", tmp_path / "y", "1000"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    *losses, shared = result.stdout.splitlines()
    python = Session(mlp_artifact)
    expected = [float(python.train_step(**batch, lr=0.01)) for _ in range(1000)]
    assert [[float.fromhex(loss) for loss in line.split()] for line in losses] == [expected, expected]
    assert shared == "2000"


def read_batches(path: Path) -> list[dict[str, np.ndarray]]:
    """Read the batches that examples/c/data.py wrote."""
    kind = np.dtype([("x", np.float32, (32, 1, 8, 8)), ("y", np.int64, 32)])
    return [{"x": batch["x"], "y": batch["y"]} for batch in np.fromfile(path, kind)]


def test_the_sample_program_is_killed_and_goes_on(tmp_path):
    build = tmp_path / "build"
    options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DIRONGRAD_IREE_SOURCE_DIR={SOURCE}"]
    succeed("cmake", "-S", ROOT / "examples" / "c", "-B", build, *options)
    succeed("cmake", "--build", build, "-j", "2")
    subprocess.run([sys.executable, ROOT / "examples" / "c" / "data.py", tmp_path / "digits.bin"], check=True)
    data = read_batches(tmp_path / "digits.bin")
    artifact, checkpoint = build / "irongrad" / "digits", tmp_path / "digits.safetensors"
    command = [build / "train", artifact, tmp_path / "digits.bin", checkpoint]

    losses: dict[int, float] = {}

    def note(line: str) -> int:
        step, loss = line.split()
        assert losses.setdefault(int(step), float.fromhex(loss)) == float.fromhex(loss)
        return int(step)

    process = subprocess.Popen([*command, "100000"], stdout=subprocess.PIPE, text=True)
    while note(process.stdout.readline()) < 47:
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    reached = safetensors.numpy.load_file(checkpoint)["irongrad/steps"]
    assert reached >= 40
    total = int(reached) + 30
    for line in subprocess.run([*command, str(total)], capture_output=True, text=True, check=True).stdout.splitlines():
        note(line)
    python = load(artifact)
    expected = [float(python.train_step(**data[i % len(data)], lr=5e-3 / (1 + i / 100))) for i in range(total)]
    assert [losses[i] for i in range(48)] == expected[:48]
    assert [losses[i] for i in range(int(reached), total)] == expected[int(reached) :]
    assert equal(safetensors.numpy.load_file(checkpoint), {n: np.asarray(a) for n, a in whole_state(python).items()})


def whole_state(session: Session) -> dict[str, np.ndarray]:
    """The state under all names of a checkpoint."""
    state = session.state()
    return {key: state[s.name] for s in session.manifest.state for key in (s.name, *s.aliases)}
