"""benchmarks/gpu.py runs on the CPU too, and reports a missing GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu.py"


def run(*options: str, gpus: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ if gpus is None else os.environ | {"CUDA_VISIBLE_DEVICES": gpus}
    command = [sys.executable, str(SCRIPT), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_the_benchmark_measures_and_verifies_on_the_cpu():
    chosen = ["--family", "mlp", "--precision", "f32", "--precision", "tf32", "--backend", "eager"]
    result = run(
        "--device", "local-task", "--size", "small", "--rounds", "2", "--json", *chosen, "--backend", "irongrad"
    )
    assert result.returncode == 0, result.stderr
    rows = {(r["case"]["precision"], r["case"]["backend"]): r for r in json.loads(result.stdout)["rows"]}
    assert rows.keys() == {("tf32", "eager"), ("f32", "eager"), ("f32", "irongrad")}
    assert all(r["milliseconds"] > 0 and r["ratio"] > 0 for r in rows.values())
    assert 0 < rows["f32", "irongrad"]["worst"] <= 1
    assert rows["tf32", "eager"]["worst"] is None


def test_a_missing_gpu_is_reported():
    result = run(gpus="")
    assert result.returncode == 1
    assert "no device 'cuda' was found: this benchmark needs an NVIDIA GPU" in result.stderr
