"""The loops of docs/scripts.md and docs/steps.md train."""

from __future__ import annotations

import copy
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import irongrad as ig

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
    code, *_ = re.findall(r"```python\n(.*?)```", (PAGE.parent / "training.md").read_text(), re.DOTALL)
    (tmp_path / "step.py").write_text(STEP)
    (tmp_path / "script.py").write_text(code)
    for script in ("step.py", "script.py"):
        done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"320 steps, complete, best loss 0\.[0-4]\d+\n", done.stdout)
    names = {"net.safetensors", "net.best.safetensors", *(f"net.step-{n}.safetensors" for n in (288, 300, 320))}
    assert names == {p.name for p in tmp_path.glob("*.safetensors")}


def network() -> nn.Sequential:
    """A frozen layer, a BatchNorm that the script keeps in evaluation mode, and a layer that trains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    model[1].eval()
    return model


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.5, momentum=0.9)


def batches(*sizes: int) -> Iterator[dict[str, torch.Tensor]]:
    for size in sizes:
        yield {"x": torch.randn(size, 8), "y": torch.randint(4, (size,))}


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler")
def test_the_lines_of_a_plain_script_do_in_a_session_what_they_do_in_eager(tmp_path: Path) -> None:
    """Schedule, clipping, accumulation, a smaller last batch, frozen parts and checkpoints, as the page says."""
    model = network()
    optimizer, (example,) = optimizer_of(model), batches(8)
    dynamic = {"x": {0: "B"}, "y": {0: "B"}}
    step = ig.TrainStep(model, cross_entropy, optimizer, example, clip_grad_norm=0.1, dynamic=dynamic)
    session = ig.compile(step, tmp_path / "net", cache=False).load()

    script = copy.deepcopy(model)
    own = optimizer_of(script)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in (own, optimizer)]

    def backward(batch: dict[str, torch.Tensor], parts: int) -> float:
        loss = cross_entropy(script(batch["x"]), batch["y"])
        (loss / parts).backward()
        return loss.item()

    def update() -> None:
        nn.utils.clip_grad_norm_(script.parameters(), 0.1)
        own.step()
        own.zero_grad()

    for batch in batches(8, 8, 5):
        loss = backward(batch, 1)
        update()
        assert abs(session.train_step(**batch, **ig.hypers(optimizer)) - loss) < 1e-5
        for scheduler in schedulers:
            scheduler.step()
    for batch in batches(4, 4, 4, 4):
        assert abs(session.grad_step(**batch) - backward(batch, 4)) < 1e-5
    update()
    session.apply_step(**ig.hypers(optimizer))

    session.save(tmp_path / "net.safetensors")
    restored = network()
    again = optimizer_of(restored)
    ig.load_checkpoint(tmp_path / "net.safetensors", restored, again)
    torch.testing.assert_close(dict(restored.state_dict()), dict(script.state_dict()))
    momentum = [[s["momentum_buffer"] for s in o.state.values()] for o in (again, own)]
    torch.testing.assert_close(*momentum)
