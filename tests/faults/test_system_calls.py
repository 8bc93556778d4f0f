"""The campaign of failing system calls: a bounded sample by default, all of it in the slow run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import irongrad as ig
from tests.conftest import make_mlp_step

CAMPAIGN = Path(__file__).with_name("campaign.py")

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="needs Linux and a C compiler (Debian: gcc libc6-dev)"
)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that makes system calls fail."""
    built = tmp_path_factory.mktemp("faults") / "failing_calls.so"
    source = CAMPAIGN.with_name("failing_calls.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", built, source, "-ldl"], check=True)
    return built


def campaign(artifact: Path, library: Path, stride: int, before: str = "pass") -> subprocess.CompletedProcess[str]:
    """Run the campaign in a process of its own; `before` is code that runs first."""
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(CAMPAIGN.parent)!r})
import campaign
{before}
campaign.main(Path({str(artifact)!r}), {str(library)!r}, {stride})
"""
    environment = os.environ | {"LD_PRELOAD": str(library)}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_no_failing_call_loses_or_damages_anything(mlp_artifact, library, stride):
    done = campaign(mlp_artifact, library, stride)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    print(done.stdout)
    assert all(c["errors"] >= 10 // stride for c in counts.values())
    assert sum(c["kills"] for c in counts.values()) >= 50 // stride


def other_steps() -> dict[str, ig.TrainStep]:
    """A step of several sizes, one with a loss scale, and one in pieces."""
    step = make_mlp_step()
    dynamic = {"x": {0: "B"}, "y": {0: "B"}}
    return {
        "buckets": replace(step, dynamic=dynamic, buckets={"B": [4, 8]}),
        "loss scale": replace(step, precision="f16"),
        "pieces": replace(step, between=["y"]),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["buckets", "loss scale", "pieces"])
def test_artifacts_of_other_steps_are_as_safe(library, tmp_path, kind):
    ig.compile(other_steps()[kind], tmp_path / "artifact")
    done = campaign(tmp_path / "artifact", library, 1)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "careless",
    [
        "import irongrad.runtime.checkpoint as c; c.atomic_write = lambda path, data: path.write_bytes(data)",
        "import irongrad.runtime.atomic_files as a; a.remove_abandoned = lambda *_: None",
        "campaign.publish = lambda new, old: (campaign.shutil.rmtree(old, True), campaign.shutil.copytree(new, old))",
    ],
    ids=["written in place", "left behind", "removed first"],
)
def test_careless_code_is_caught(mlp_artifact, library, careless):
    done = campaign(mlp_artifact, library, 1, careless)
    assert done.returncode == 1
    assert "call" in done.stderr
