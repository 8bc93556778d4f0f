"""`irongrad export`: write a trained model for PyTorch, transformers or PEFT."""

from __future__ import annotations

from pathlib import Path

import click

from irongrad.cli.common import console, directory_argument, json_option, print_json
from irongrad.export.layouts import FORMS, export


@click.command(
    epilog="""\b
Example:
  irongrad export build/news --to peft -o build/adapter --checkpoint news.safetensors
  irongrad export build/digits --to torch -o digits.safetensors
"""
)
@directory_argument
@click.option("--to", "form", required=True, type=click.Choice(FORMS), help="The form in which to write the model.")
@click.option(
    "-o", "--output", required=True, type=click.Path(path_type=Path), help="The file of --to torch; a folder otherwise."
)
@click.option("--checkpoint", type=click.Path(path_type=Path), help="The state to take; the initial one by default.")
@json_option
def command(directory: Path, form: str, output: Path, checkpoint: Path | None, as_json: bool) -> None:
    """Write the model of the artifact in DIRECTORY for other tools; needs no PyTorch.

    peft: the adapter alone, adapter_model.safetensors and adapter_config.json, for PeftModel.from_pretrained.
    torch: a safetensors file of all tensors by PyTorch's names, for model.load_state_dict.
    huggingface: a folder with model.safetensors and config.json, for from_pretrained of transformers.
    """
    files = export(directory, form, output, checkpoint)
    if as_json:
        print_json({"files": [{"path": path, "bytes": path.stat().st_size} for path in files]})
        return
    for path in files:
        console.print(f"{path}: {path.stat().st_size} bytes", highlight=False, soft_wrap=True)
