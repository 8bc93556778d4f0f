"""Adapters of PEFT: `adapter_config.json` beside `adapter_model.safetensors`, as state of an artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from irongrad.runtime.arrays import Array
from irongrad.runtime.checkpoint import BASE, some_of_each
from irongrad.runtime.errors import ArtifactError
from irongrad.runtime.manifest import Manifest, StateSpec
from irongrad.runtime.safetensors_file import Header, read_arrays

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_BASE = "base_model_name_or_path"
# Settings that change no number once an adapter has its tensors: how these began, what they were trained with, and
# which modules have them, which their names say.
_WITHOUT_EFFECT = frozenset(
    {_BASE, "auto_mapping", "ensure_weight_tying", "eva_config", "corda_config", "lora_ga_config", "inference_mode"}
    | {"init_lora_weights", "init_weights", "loftq_config", "lora_dropout", "dropout", "module_dropout"}
    | {"rank_dropout", "megatron_config", "megatron_core", "modules_to_save", "exclude_modules", "target_modules"}
    | {"layers_pattern", "layers_to_transform", "peft_version", "revision", "runtime_config", "task_type"}
)


def specs_by_name(manifest: Manifest) -> dict[str, StateSpec]:
    """The state by each of its names."""
    return {key: s for s in manifest.state for key in (s.name, *s.aliases)}


def read_adapter(folder: Path, manifest: Manifest, *, another_base: bool = False) -> dict[str, Array]:
    """Read an adapter for the model of an artifact; return its tensors by their names in the state.

    Args:
        folder: has the two files of the adapter.
        manifest: the artifact's manifest.
        another_base: whether to accept an adapter that names another base model.

    Raises:
        ArtifactError: the artifact has no adapter; or a file is missing or damaged, the adapter belongs to another
            base, its settings lead to other numbers, or its tensors are not those of the artifact's adapter.
    """
    layout = manifest.layouts.get("peft")
    if layout is None:
        raise ArtifactError(
            f"{folder} is an adapter, and this artifact's model has none. Compile the model with an adapter in it, as "
            "peft.get_peft_model returns it"
        )
    config = _read_config(folder / CONFIG)
    arrays, header = read_arrays(folder / WEIGHTS)
    if not another_base:
        _check_base(folder, config, header, manifest)
    _check_settings(folder, config, layout.config)
    specs = specs_by_name(manifest)
    wanted = {name: specs[tensor] for name, tensor in layout.tensors.items()}
    _check_tensors(folder, arrays, wanted)
    return {spec.name: arrays[name] for name, spec in wanted.items()}


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ArtifactError(
            f"{path.parent} is no adapter of PEFT: it has no {path.name}. 'irongrad export ARTIFACT --to peft' writes "
            "one"
        ) from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is damaged: {error}") from None
    if not isinstance(config, dict):
        raise ArtifactError(f"{path} is damaged: it is no table of settings")
    return config


def _check_base(folder: Path, config: dict[str, Any], header: Header, manifest: Manifest) -> None:
    """Refuse an adapter of another base: by the base's hash where the file has it, by its name elsewhere."""
    recorded = header.about.get(BASE)
    if recorded is not None:
        if recorded == manifest.base:
            return
        raise ArtifactError(
            f"{folder} was trained on another base: its frozen tensors have the sha256 {recorded}, and those of this "
            f"artifact {manifest.base or 'do not exist'}"
        )
    theirs, ours = config.get(_BASE), manifest.layouts["peft"].config.get(_BASE)
    if theirs and ours and _last(theirs) != _last(ours):
        raise ArtifactError(
            f"{folder} was trained on another base: its {CONFIG} names {theirs!r}, and the artifact was compiled from "
            f"{ours!r}. If both are the same weights, pass another_base=True"
        )


def _last(name: object) -> str:
    """The last part of a path or of a name on the hub: a base has several places, and one name."""
    return str(name).rstrip("/").rpartition("/")[2]


def _check_settings(folder: Path, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Refuse settings that are compiled in with other values; one that a file lacks is off."""
    for key in sorted((theirs.keys() | ours.keys()) - _WITHOUT_EFFECT):
        if (theirs.get(key) or None) != (ours.get(key) or None):
            raise ArtifactError(
                f"{folder} is an adapter with {key}={theirs.get(key)!r}, and {key}={ours.get(key)!r} is compiled into "
                f"this artifact. Compile a model whose adapter has {key}={theirs.get(key)!r}"
            )


def _check_tensors(folder: Path, arrays: dict[str, Array], wanted: dict[str, StateSpec]) -> None:
    missing = [f"{n} is missing" for n in wanted if n not in arrays]
    unknown = [f"{n} is unknown" for n in arrays if n not in wanted]
    others = []
    for name, spec in wanted.items():
        if name in arrays and (arrays[name].shape, arrays[name].dtype.name) != (spec.shape, spec.dtype):
            array = arrays[name]
            others.append(f"{name} is {array.dtype.name}{list(array.shape)}, not {spec.dtype}{list(spec.shape)}")
    if missing or unknown or others:
        problems = some_of_each(missing, unknown, others)
        raise ArtifactError(f"{folder} is another adapter than the artifact's: {problems}")
