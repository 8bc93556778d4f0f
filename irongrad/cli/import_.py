"""`irongrad import`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from irongrad.cli.common import (
    choice_options,
    console,
    fallback_option,
    given_choices,
    json_option,
    pairs,
    precision_option,
    print_json,
    print_unjudged,
    targets_option,
)
from irongrad.cli.compile import load_function
from irongrad.cli.recorded import compile_or_repeat
from irongrad.cli.working import working
from irongrad.pipeline.choices import OF_PASSES
from irongrad.runtime.errors import UserError

if TYPE_CHECKING:
    import numpy as np

    from irongrad.runtime.manifest import Manifest
    from irongrad.step.train_step import TrainStep

# Packages with native code that opens files in Python only, as far as `irongrad.onnx` uses them.
_READ_IN_PYTHON = ("google", "onnx")


@click.command(
    epilog="""\b
Example:
  irongrad import build/digits.jax -o build/digits --target llvm-cpu
  irongrad import model.onnx -o build/model --data train.npz --batch-size 32 --loss cross_entropy --optimizer AdamW
"""
)
@click.argument("source", type=click.Path(path_type=Path))
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="The artifact's directory.")
@targets_option
@choice_options("entry_points", "cache")
@choice_options(*OF_PASSES, "dump_dir")
@precision_option
@fallback_option
@click.option("--data", type=click.Path(path_type=Path), help="ONNX: an .npz of inputs and targets, as for train.")
@click.option("--batch-size", type=click.IntRange(1), help="ONNX: how many rows of the data make a batch.")
@click.option("--loss", metavar="NAME", help="ONNX: of torch.nn.functional or torch.nn, or FILE:FUNCTION.")
@click.option("--optimizer", metavar="NAME", help="ONNX: of torch.optim, such as AdamW, or FILE:FUNCTION.")
@click.option("--lr", type=float, help="ONNX: the optimizer's learning rate.")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="ONNX: another option of the optimizer.")
@click.option("--freeze", multiple=True, metavar="PATTERN", help="ONNX: initialisers that are not trained.")
@click.option("--result", metavar="NAME", help="ONNX: which of several outputs the loss takes.")
@click.option(
    "--dynamic", multiple=True, metavar="INPUT=DIM:NAME", help="ONNX: a dimension of the data that varies; repeatable."
)
@click.option("--bucket", "buckets", multiple=True, metavar="NAME=SIZE,SIZE", help="ONNX: the sizes of a dimension.")
@json_option
def command(
    source: Path,
    output: Path,
    targets: tuple[str, ...],
    entry_points: tuple[str, ...],
    cache: bool,
    data: Path | None,
    batch_size: int | None,
    loss: str | None,
    optimizer: str | None,
    lr: float | None,
    settings: tuple[str, ...],
    freeze: tuple[str, ...],
    result: str | None,
    dynamic: tuple[str, ...],
    buckets: tuple[str, ...],
    precision: str | None,
    bucket_fallback: str | None,
    as_json: bool,
    **choices: Any,
) -> None:
    """Compile the training step in SOURCE: a bundle that irongrad.jax.export_step wrote, or an ONNX model.

    An ONNX model gets a loss and an optimizer here. The result is verified before it is written: against JAX in
    float64, or against eager PyTorch in float64.
    """
    of_step = {"dynamic": dynamic, "bucket": buckets, "precision": precision, "bucket-fallback": bucket_fallback}
    of_onnx = {"data": data, "batch-size": batch_size, "loss": loss, "optimizer": optimizer}
    given = [
        n
        for n, v in (of_onnx | {"lr": lr, "set": settings, "freeze": freeze, "result": result} | of_step).items()
        if v not in (None, ())
    ]
    options: dict[str, Any] = {"entry_points": entry_points or None, "cache": cache}
    if _is_bundle(source):
        if given:
            raise UserError(f"--{given[0]} is for ONNX models; a step from JAX has its loss and its optimizer")
        from irongrad.frontends.import_bundle import import_bundle

        with working(f"importing {source}", quiet=as_json):
            manifest = import_bundle(source, output, targets, **options).manifest
    else:
        _check_onnx(source, of_onnx)
        load = partial(_step, source, of_onnx, of_step, lr, settings, freeze, result)
        options |= given_choices(choices)
        parameters = click.get_current_context().params
        outcome = compile_or_repeat(load, output, targets, options, parameters, known=_READ_IN_PYTHON, quiet=as_json)
        assert outcome.manifest is not None
        manifest = outcome.manifest
    _show(manifest, output, as_json=as_json)


def _is_bundle(source: Path) -> bool:
    if not source.is_dir():
        return False
    from irongrad.jax.bundle import is_bundle

    return is_bundle(source)


def _check_onnx(source: Path, needed: Mapping[str, object]) -> None:
    if source.suffix != ".onnx":
        from irongrad.jax.bundle import INDEX

        raise UserError(
            f"{source} is neither an .onnx file nor a bundle of irongrad.jax.export_step: it has no {INDEX}"
        )
    if missing := [f"--{name}" for name, value in needed.items() if value is None]:
        raise UserError(f"an ONNX model also needs {', '.join(missing)}")


def _step(
    source: Path,
    given: Mapping[str, Any],
    of_step: Mapping[str, Any],
    lr: float | None,
    settings: tuple[str, ...],
    freeze: tuple[str, ...],
    result: str | None,
) -> TrainStep:
    from irongrad.onnx.step import make_step, options_of

    chosen = options_of(pairs(settings, "--set")) | ({"lr": lr} if lr is not None else {})
    step = make_step(
        source,
        _arrays(given["data"]),
        given["batch-size"],
        loss=_named(given["loss"]),
        optimizer=_named(given["optimizer"]),
        options=chosen,
        freeze=freeze,
        output=result,
        dynamic=_dynamic(of_step["dynamic"]),
        buckets=_buckets(of_step["bucket"]),
    )
    fallback = of_step["bucket-fallback"] or step.bucket_fallback
    return replace(step, precision=of_step["precision"] or step.precision, bucket_fallback=fallback)


def _named(name: str) -> str | Callable[..., Any]:
    """The function of a file if `name` is FILE:FUNCTION, else `name`."""
    return load_function(name) if ":" in name else name


def _dynamic(items: Sequence[str]) -> dict[str, dict[int, str]]:
    """Read `INPUT=DIM:NAME`, also spelled `INPUT:DIM=NAME`.

    Raises:
        UserError: an item is neither.
    """
    found: dict[str, dict[int, str]] = {}
    for item in items:
        match = re.fullmatch(r"(?P<a>[^=]+)=(?P<d>-?\d+):(?P<n>\w+)|(?P<b>[^=]+):(?P<e>-?\d+)=(?P<m>\w+)", item)
        if match is None:
            raise UserError(f"--dynamic {item!r} is not INPUT=DIM:NAME, such as x=0:B")
        found.setdefault(match["a"] or match["b"], {})[int(match["d"] or match["e"])] = match["n"] or match["m"]
    return found


def _buckets(items: tuple[str, ...]) -> dict[str, list[int]]:
    try:
        return {name: [int(size) for size in sizes.split(",")] for name, sizes in pairs(items, "--bucket").items()}
    except ValueError:
        raise UserError(f"--bucket {' '.join(items)!r} is not NAME=SIZE,SIZE, such as B=4,8,16") from None


def _arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{path} cannot be read as an .npz file: {error}") from None


def _show(manifest: Manifest, output: Path, *, as_json: bool) -> None:
    """Print the written files, and how each target was verified."""
    worst = {t.name: t.certificate.worst if t.certificate else None for t in manifest.targets}
    if as_json:
        print_json({"output": output, "targets": worst})
        return
    for target in manifest.targets:
        size = manifest.files[target.file].size / 1024
        note = (
            f"verified: {target.certificate.steps} steps against {target.certificate.oracle}, worst error "
            f"{target.certificate.worst:.0%} of what is allowed"
            if target.certificate is not None
            else "not verified: it cannot run here; run 'irongrad verify' on the device"
        )
        console.print(f"{output / target.file}: {size:.0f} KiB, {note}", highlight=False, soft_wrap=True)
        print_unjudged(target.certificate.unjudged if target.certificate is not None else ())
