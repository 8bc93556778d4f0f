"""The sample project, built with CMake, and the errors of irongrad_add_training_step."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
GENERATORS = [
    pytest.param("Ninja", marks=pytest.mark.skipif(shutil.which("ninja") is None, reason="there is no ninja")),
    pytest.param("Unix Makefiles", marks=pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")),
]

# Replaces the Python interpreter in tests of the build's logic: compiles nothing, but writes the real depfile.
STUB = """\
#!{python}
import os, sys
from pathlib import Path
if sys.argv[1] == "-c":
    print({scripts!r}, end="")
    sys.exit()
from irongrad.cli.compile import _write_depfile
verb, source, output = sys.argv[3], sys.argv[4], Path(sys.argv[6])
output.mkdir(parents=True, exist_ok=True)
if verb == "compile":
    script = Path(source.rpartition(":")[0])
    (output / "step.llvm-cpu-generic.vmfb").touch()
    (output / "manifest.json").touch()
    _write_depfile(Path(sys.argv[-1]), output, [script, script.with_name("network.py")])
else:
    (output / "CTestTestfile.cmake").touch()
"""


def tool(name: str) -> str:
    """The path of cmake or ctest: from PATH, or else from the PyPI package."""
    found = shutil.which(name)
    if found is None:
        import cmake

        found = str(Path(cmake.CMAKE_BIN_DIR) / name)
    return found


def run(name: str, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [tool(name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def succeed(name: str, *arguments: object) -> str:
    result = run(name, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_sample_project_builds_tests_and_installs(tmp_path):
    source, build, prefix = tmp_path / "source", tmp_path / "build", tmp_path / "prefix"
    shutil.copytree(ROOT / "examples" / "cmake", source)
    succeed("cmake", "-S", source, "-B", build, f"-DPython_EXECUTABLE={sys.executable}")
    not_built = run("ctest", "--test-dir", build)
    assert not_built.returncode != 0
    assert "classifier.not_built" in not_built.stdout

    assert "Compiling training step classifier" in succeed("cmake", "--build", build)
    assert "Compiling" not in succeed("cmake", "--build", build)
    passed = succeed("ctest", "--test-dir", build, "-j", "2")
    assert "100% tests passed" in passed
    for name in ("train_step", "train_step.from_step_2", "train_steps.out_of_range.y", "predict", "export_state"):
        assert f"classifier.llvm-cpu.{name} ." in passed

    expected = build / "irongrad" / "classifier.golden" / "expected" / "predict" / "output.npy"
    np.save(expected, np.load(expected) + np.float32(1e-3))
    tampered = run("ctest", "--test-dir", build)
    assert tampered.returncode != 0
    assert "1 tests failed out of" in tampered.stdout
    assert "classifier.llvm-cpu.predict (Failed)" in tampered.stdout

    succeed("cmake", "--install", build, "--prefix", prefix)
    installed = prefix / "share" / "irongrad" / "classifier"
    assert {f.name for f in installed.iterdir()} >= {"manifest.json", "step.llvm-cpu.vmfb", "state.irpa"}

    network = source / "network.py"
    network.write_text(network.read_text().replace("torch.tanh", "torch.relu"))
    assert "Compiling training step classifier" in succeed("cmake", "--build", build)
    assert "100% tests passed" in succeed("ctest", "--test-dir", build, "-j", "2")


def write_stub(path: Path, scripts: Path) -> Path:
    path.write_text(STUB.format(python=sys.executable, scripts=str(scripts)))
    path.chmod(0o755)
    return path


def write_project(folder: Path, call: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\n"
        "project(P LANGUAGES NONE)\n"
        "enable_testing()\n"
        "find_package(IronGrad 0.1 REQUIRED CONFIG)\n"
        f"irongrad_add_training_step({call})\n"
        "get_target_property(vmfb s IRONGRAD_VMFB)\n"
        'message(STATUS "vmfb ${vmfb}")\n'
    )
    for name in ("step.py", "network.py", "data.csv"):
        (folder / name).touch()
    return folder


def configure(source: Path, build: Path, *options: str) -> subprocess.CompletedProcess[str]:
    folders = os.environ["PATH"].split(os.pathsep)
    paths = {**os.environ, "PATH": os.pathsep.join(f for f in folders if not Path(f, "iree-run-module").exists())}
    arguments = ["-S", source, "-B", build, f"-DIronGrad_DIR={ROOT / 'irongrad' / 'cmake'}", *options]
    return run("cmake", *arguments, env=paths)


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_changed_dependency_is_built_again(generator, tmp_path):
    scripts = Path(sys.executable).parent
    stub = write_stub(tmp_path / "python", scripts)
    call = f"s SCRIPT step.py FUNCTION f TARGETS llvm-cpu:cpu=generic DEPENDS data.csv PYTHON {stub}"
    source, build = write_project(tmp_path / "a folder", call), tmp_path / "a build"
    result = configure(source, build, "-G", generator)
    assert result.returncode == 0, result.stderr
    assert f"vmfb {build}/irongrad/s/step.llvm-cpu-generic.vmfb" in result.stdout
    assert "Compiling" in succeed("cmake", "--build", build)
    for name in ("step.py", "network.py", "data.csv"):
        assert "Compiling" not in succeed("cmake", "--build", build)
        (source / name).touch()
        assert "Compiling" in succeed("cmake", "--build", build), name
    (source / "network.py").unlink()
    assert "Compiling" in succeed("cmake", "--build", build)
    (build / "irongrad" / "s" / "state.irpa").touch()
    succeed("cmake", "--build", build, "--target", "clean")
    assert not (build / "irongrad" / "s").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("s FUNCTION f TARGETS llvm-cpu", "SCRIPT is missing"),
        ("s SCRIPT step.py TARGETS llvm-cpu", "FUNCTION is missing"),
        ("s SCRIPT step.py FUNCTION f", "TARGETS is missing"),
        ("s SCRIPT step.py FUNCTION f TARGETS", "TARGETS is missing"),
        ("s one SCRIPT step.py FUNCTION f TARGETS llvm-cpu", "unknown arguments one"),
        ("s SCRIPT none.py FUNCTION f TARGETS llvm-cpu", "none.py does not exist"),
        ("s SCRIPT step.py FUNCTION f TARGETS llvm-cpu PYTHON no-such-python", "no-such-python cannot compile"),
        ("s SCRIPT step.py FUNCTION f TARGETS llvm-cpu PYTHON @STUB@", "iree-run-module was not found"),
    ],
)
def test_wrong_calls_fail_when_the_project_is_configured(call, message, tmp_path):
    stub = write_stub(tmp_path / "python", tmp_path)
    source = write_project(tmp_path / "source", call.replace("@STUB@", str(stub)))
    result = configure(source, tmp_path / "build")
    assert result.returncode != 0
    assert message in " ".join(result.stderr.split())


def test_no_iree_run_module_is_needed_without_tests(tmp_path):
    stub = write_stub(tmp_path / "python", tmp_path)
    source = write_project(tmp_path / "source", f"s SCRIPT step.py FUNCTION f TARGETS llvm-cpu PYTHON {stub}")
    result = configure(source, tmp_path / "build", "-DBUILD_TESTING=OFF")
    assert result.returncode == 0, result.stderr


def test_add_subdirectory_defines_the_function(tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\n"
        "project(P LANGUAGES NONE)\n"
        f"add_subdirectory({ROOT} irongrad)\n"
        f"irongrad_add_training_step(s SCRIPT step.py FUNCTION f TARGETS llvm-cpu PYTHON {sys.executable})\n"
    )
    (tmp_path / "step.py").touch()
    succeed("cmake", "-S", tmp_path, "-B", tmp_path / "build")


@pytest.mark.parametrize("option", ["", "-DIRONGRAD_IREE_SOURCE_DIR=nowhere"])
def test_the_c_library_asks_for_the_source_of_iree(option, tmp_path):
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(P LANGUAGES NONE)\n"
        "find_package(IronGrad REQUIRED CONFIG)\nirongrad_add_runtime()\n"
    )
    result = configure(tmp_path, tmp_path / "build", *filter(None, [option]))
    assert result.returncode != 0
    expected = f"irongrad_add_runtime: '{option.rpartition('=')[2]}' is no source tree of IREE. Give one with"
    assert expected in " ".join(result.stderr.split())
