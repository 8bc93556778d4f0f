"""Arrays in Flower's records, and what a message of a federation must hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, RecordDict

from irongrad.distributed.averaging import averaged
from irongrad.runtime.arrays import Array
from irongrad.runtime.checkpoint import check_arrays
from irongrad.runtime.errors import GuardError, NonFiniteError, UserError
from irongrad.runtime.manifest import EntryPoint, Manifest, StateSpec
from irongrad.runtime.nonfinite import nonfinite_names
from irongrad.runtime.safetensors_file import numpy_dtype


def training_entry(manifest: Manifest) -> EntryPoint:
    """Return the entry point that a client trains with.

    Raises:
        GuardError: the artifact has no `train_step`, or several steps.
    """
    if manifest.steps:
        raise GuardError(f"a client trains one step, and the artifact has several: {', '.join(manifest.steps)}")
    entry = manifest.entry_point("train_step")
    if entry is None:
        raise GuardError("the artifact was compiled without train_step, so no client can train it; compile it with it")
    return entry


def record_of(arrays: Mapping[str, Array], specs: Iterable[StateSpec]) -> ArrayRecord:
    """Return the arrays of `specs` as Flower sends them."""
    return ArrayRecord({s.name: FlowerArray(np.asarray(arrays[s.name])) for s in specs})


def arrays_of(record: ArrayRecord, specs: Iterable[StateSpec]) -> dict[str, Array]:
    """Return the arrays in a record that `record_of` made; numpy's files do not know the dtypes of ml_dtypes."""
    return {s.name: record[s.name].numpy().view(numpy_dtype(s.dtype)) for s in specs}


def parameters_in(content: RecordDict, manifest: Manifest, source: str) -> tuple[str, dict[str, Array]]:
    """Return the parameters in a message, and the name of their record.

    Args:
        content: the content of the message.
        manifest: the artifact's manifest.
        source: who sent it, for an error message.

    Raises:
        ArtifactError: a tensor is missing or unknown, or has another shape or dtype.
        NonFiniteError: one is NaN or infinite.
        UserError: there is not one record of arrays, or the artifact's parameters cannot be averaged.
    """
    specs = averaged(manifest)
    if len(content.array_records) != 1:
        raise UserError(f"what {source} sent has {len(content.array_records)} records of arrays; it must have one")
    ((key, record),) = content.array_records.items()
    arrays = {name: array.numpy() for name, array in record.items()}
    check_arrays(arrays, replace(manifest, state=specs), f"what {source} sent")
    if bad := nonfinite_names({s.name: arrays[s.name] for s in specs}):
        more = f" and {len(bad) - 4} more" if len(bad) > 4 else ""
        raise NonFiniteError(f"what {source} sent is NaN or infinite in {', '.join(bad[:4])}{more}")
    return key, {s.name: arrays[s.name] for s in specs}


def config_in(content: RecordDict) -> ConfigRecord:
    """Return the configuration in a message; an empty one if there is none."""
    return next(iter(content.config_records.values()), ConfigRecord())
