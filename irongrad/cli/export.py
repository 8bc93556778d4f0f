"""`irongrad export`: write a trained model for PyTorch, transformers, PEFT or ONNX, or for prediction alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from irongrad.cli.common import base_option, console, directory_argument, error_console, json_option, print_json
from irongrad.cli.working import working
from irongrad.export.layouts import FORMS, export
from irongrad.runtime.errors import UserError

if TYPE_CHECKING:
    from irongrad.frontends.trained_step import TrainedStep

# The forms that are made from the model's code.
_OF_CODE = ("onnx", "inference")


@click.command(
    epilog="""\b
Example:
  irongrad export build/news --to peft -o build/adapter --checkpoint news.safetensors
  irongrad export build/digits --to torch -o digits.safetensors
  irongrad export build/digits --to inference -o build/predict --model digits.py:make_step
"""
)
@directory_argument
@click.option(
    "--to", "form", required=True, type=click.Choice([*FORMS, *_OF_CODE]), help="The form in which to write the model."
)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The file of --to torch and --to onnx; a folder otherwise.",
)
@click.option("--checkpoint", type=click.Path(path_type=Path), help="The state to take; the initial one by default.")
@click.option(
    "--model",
    "source",
    metavar="FILE:FUNCTION",
    help="What the artifact was compiled from, for --to onnx and --to inference.",
)
@click.option("--merge", is_flag=True, help="Add the adapter to the weights, for --to onnx and --to inference.")
@click.option(
    "--target",
    "targets",
    multiple=True,
    help="What to compile for, for --to inference; the artifact's targets by default. Repeatable.",
)
@base_option
@json_option
def command(
    directory: Path,
    form: str,
    output: Path,
    checkpoint: Path | None,
    source: str | None,
    merge: bool,
    targets: tuple[str, ...],
    base: Path | None,
    as_json: bool,
) -> None:
    """Write the model of the artifact in DIRECTORY for other tools.

    peft: the adapter alone, adapter_model.safetensors and adapter_config.json, for PeftModel.from_pretrained.
    torch: a safetensors file of all tensors by PyTorch's names, for model.load_state_dict.
    huggingface: a folder with model.safetensors and config.json, for from_pretrained of transformers.
    onnx: a file with the trained weights, which has been compared with eager float64 in ONNX Runtime.
    inference: an artifact with predict and the step's own entries alone, without optimizer state.

    The first three need no PyTorch. The last two are made from the model's code, which --model names.
    """
    _refuse_useless(form, source, merge, targets)
    if source is None:
        files, compared = export(directory, form, output, checkpoint, base), True
    else:
        from irongrad.cli.compile import load_one_step
        from irongrad.frontends.trained_step import TrainedStep

        trained = TrainedStep(load_one_step(source, None), source, directory, checkpoint, merge, base)
        with working("making the model from its code, and comparing", quiet=as_json):
            files, compared = _of_code(trained, form, output, targets)
    if not compared:
        error_console.print(
            f"warning: the code of {source} was not compared with {directory}, which has no predict, or no target that "
            "runs on this machine",
            soft_wrap=True,
        )
    if as_json:
        print_json({"files": [{"path": path, "bytes": path.stat().st_size} for path in files], "compared": compared})
        return
    for path in files:
        console.print(f"{path}: {path.stat().st_size} bytes", highlight=False, soft_wrap=True)


def _refuse_useless(form: str, source: str | None, merge: bool, targets: tuple[str, ...]) -> None:
    if form in _OF_CODE and source is None:
        raise UserError(
            f"--to {form} is made from the model's code, and an artifact has none: give --model FILE:FUNCTION, from "
            "which it was compiled"
        )
    for option, given, forms in (
        ("--model", source, _OF_CODE),
        ("--merge", merge, _OF_CODE),
        ("--target", targets, ("inference",)),
    ):
        if given and form not in forms:
            raise UserError(f"{option} is for --to {' and --to '.join(forms)}")


def _of_code(trained: TrainedStep, form: str, output: Path, targets: tuple[str, ...]) -> tuple[list[Path], bool]:
    """Export the model of a step; return the files, and whether the artifact predicts the same."""
    if form == "onnx":
        from irongrad.frontends.export_onnx import export_onnx

        return export_onnx(trained, output)
    from irongrad.frontends.export_inference import export_inference

    compared = export_inference(trained, output, targets)
    return sorted(output.iterdir()), compared
