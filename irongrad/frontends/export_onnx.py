"""Export the trained model as an ONNX file, and compare it with the model in ONNX Runtime."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.export import Dim

from irongrad.frontends.trained_step import TrainedStep, differences, expected_predictions
from irongrad.pipeline.capture.modes import in_evaluation
from irongrad.runtime.errors import ToolchainError, UserError, VerificationError
from irongrad.runtime.golden import Golden
from irongrad.runtime.scratch import held_directory
from irongrad.step.train_step import TrainStep, call_of

# The prefix of the keys of predictions among golden values.
_PREDICTED = "predict/0/"


def export_onnx(trained: TrainedStep, output: Path) -> tuple[list[Path], bool]:
    """Write the trained model in evaluation mode as an ONNX file, by `torch.onnx.export`.

    Its inputs and outputs have the names of those of `predict`. Dimensions that vary in the step vary in the file. Of a
    model that is too large for one file, the weights are in `NAME.data` beside it.

    Args:
        trained: the step, and where its state is.
        output: the file.

    Returns:
        The files, and whether the predictions were compared with those of the artifact; see `TrainedStep.check`.

    Raises:
        ArtifactError: as `TrainedStep.loaded`.
        ToolchainError: PyTorch's exporter or ONNX Runtime refuses the model.
        UserError: as `TrainedStep.loaded`; or a package is missing.
        VerificationError: ONNX Runtime predicts something else than eager float64, or the artifact does.
    """
    runtime = _onnx_runtime()
    step = trained.loaded()
    golden = expected_predictions(step)
    compared = trained.check(golden)
    output.parent.mkdir(parents=True, exist_ok=True)
    with held_directory(output, ".onnx") as scratch:
        _write(step, golden, scratch / output.name)
        _check(runtime, scratch / output.name, golden)
        files = sorted(scratch.iterdir(), key=lambda path: path.name, reverse=True)  # the weights come first
        return [Path(shutil.move(file, output.parent / file.name)) for file in files][::-1], compared


def _onnx_runtime() -> Any:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"--to onnx needs the package {error.name}: pip install 'irongrad[onnx-export]'") from None
    return onnxruntime


def _write(step: TrainStep, golden: Golden, path: Path) -> None:
    call = call_of(step)
    names = (*call.positional, *call.keyword)
    sizes = {n: {axis: Dim(size) for axis, size in step.dynamic.get(n, {}).items()} for n in names}
    try:
        with _quiet(), in_evaluation(step), step.autocast(), torch.no_grad():
            program = torch.onnx.export(
                step.model,
                tuple(step.inputs[n] for n in call.positional),
                kwargs={n: step.inputs[n] for n in call.keyword},
                input_names=names,
                output_names=[k.removeprefix(_PREDICTED) for k in golden.expected if k.startswith(_PREDICTED)],
                dynamic_shapes=(tuple(sizes.values()) if call.positional else sizes) if step.dynamic else None,
                dynamo=True,
                verbose=False,
            )
            assert program is not None
            program.save(path)
    except Exception as error:  # the exporter's errors have no base of their own
        raise ToolchainError(f"torch.onnx.export refuses the model: {_reason(error)}") from error


def _check(runtime: Any, path: Path, golden: Golden) -> None:
    """Compare what ONNX Runtime computes with the expected predictions."""
    try:
        session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
        names = [node.name for node in session.get_outputs()]
        given = {node.name: golden.inputs[node.name] for node in session.get_inputs()}
        found = dict(zip(names, session.run(names, given), strict=True))
    except Exception as error:  # as above
        raise ToolchainError(f"ONNX Runtime refuses the exported model: {_reason(error)}") from error
    missing = [
        key for key in golden.expected if key.startswith(_PREDICTED) and key.removeprefix(_PREDICTED) not in found
    ]
    if wrong := differences(golden, found) or ", ".join(missing):
        raise VerificationError(
            f"ONNX Runtime predicts something else than eager {golden.oracle}, so nothing was written: {wrong}"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what the exporter tells its own developers."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__
