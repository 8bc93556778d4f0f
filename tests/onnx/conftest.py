"""ONNX files of the examples' models, exported by PyTorch."""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import irongrad as ig
from irongrad.step.train_step import call_of

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES: dict[str, dict[str, int]] = {
    "mlp": {"batch": 16, "hidden": 32},
    "digits": {},
    "resnet18": {"batch": 4, "width": 4},
    "gpt": {"batch": 2, "length": 16, "width": 16, "heads": 2, "layers": 2},
}


class Exported(NamedTuple):
    """An exported step.

    Attributes:
        step: the step.
        inputs: the example inputs of its model.
        file: the ONNX file of the model, exported in training mode.
    """

    step: ig.TrainStep
    inputs: tuple[torch.Tensor, ...]
    file: Path


def export(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], file: Path, **options: Any) -> None:
    """Write an ONNX file with PyTorch's parameter names, using the exporter based on torch.export."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            torch.onnx.export(model, inputs, file, dynamo=True, external_data=False, **({"optimize": False} | options))
    finally:
        logging.disable(disabled)


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """`family(name)`: an example, exported once per test run."""
    directory = tmp_path_factory.mktemp("onnx")
    made: dict[str, Exported] = {}

    def run(name: str) -> Exported:
        if name not in made:
            with pytest.MonkeyPatch.context() as patch:
                patch.syspath_prepend(EXAMPLES)
                step = importlib.import_module(name).make_step(**SIZES[name])
            inputs = tuple(step.inputs[n] for n in call_of(step).positional + call_of(step).keyword)
            export(copy.deepcopy(step.model).train(), inputs, directory / f"{name}.onnx")
            made[name] = Exported(step, inputs, directory / f"{name}.onnx")
        return made[name]

    return run


@pytest.fixture
def export_model() -> Callable[..., None]:
    return export
