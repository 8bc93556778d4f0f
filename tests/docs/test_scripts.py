"""The loops of docs/scripts.md and docs/steps.md train."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "scripts.md"


def test_the_loop_of_the_page_trains(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "script.py").write_text(code)
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(re.findall(r"accuracy ([\d.]+)", done.stdout)[0]) > 0.9
    assert (tmp_path / "script.safetensors").exists()


def test_the_gan_of_the_page_about_several_steps_trains(tmp_path: Path) -> None:
    parts = re.findall(r"```python\n(.*?)```", (PAGE.parent / "steps.md").read_text(), re.DOTALL)
    (tmp_path / "script.py").write_text("\n".join(parts))
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0.7 < float(re.findall(r"mean ([-\d.]+)", done.stdout)[0]) < 1.3  # the real samples have 1


STEP = """
import torch

import irongrad as ig

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
inputs = {"x": torch.randn(16, 8), "y": torch.zeros(16, dtype=torch.long)}
ig.compile(ig.TrainStep(model, torch.nn.functional.cross_entropy, torch.optim.AdamW(model.parameters()), inputs), "build/net")
"""  # noqa: E501


def test_the_run_of_the_page_about_training_trains(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (PAGE.parent / "training.md").read_text(), re.DOTALL)
    (tmp_path / "step.py").write_text(STEP)
    (tmp_path / "script.py").write_text(code)
    for script in ("step.py", "script.py"):
        done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"320 steps, complete, best loss 0\.[0-4]\d+\n", done.stdout)
    names = {"net.safetensors", "net.best.safetensors", *(f"net.step-{n}.safetensors" for n in (288, 300, 320))}
    assert names == {p.name for p in tmp_path.glob("*.safetensors")}
