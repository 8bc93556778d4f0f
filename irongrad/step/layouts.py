"""The forms in which other tools read a model: PyTorch's state dict, a transformers folder, and an adapter of PEFT."""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from irongrad.runtime.manifest import LayoutSpec


def layouts_of(model: nn.Module) -> dict[str, LayoutSpec]:
    """Return every form that `model` has, by name: `torch`, `huggingface` and `peft`."""
    names = [name for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)]
    made = {"torch": LayoutSpec({name: name for name in names})}
    adapters = _outermost(model, "peft", "PeftModel")
    if len(adapters) == 1:
        made |= _peft(*adapters[0])
    pretrained = _outermost(model, "transformers", "PreTrainedModel")
    if len(pretrained) == 1 and not adapters:
        made["huggingface"] = _huggingface(*pretrained[0])
    return made


def _outermost(model: nn.Module, package: str, name: str) -> list[tuple[str, Any]]:
    """The modules of a class of a package, with their paths, but none inside another; the package is not imported."""
    found: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") or not outer for outer, _ in found)
        kinds = ((c.__module__.partition(".")[0], c.__name__) for c in type(module).__mro__)
        if not inside and (package, name) in kinds:
            found.append((path, module))
    return found


def _prefix(path: str) -> str:
    return f"{path}." if path else ""


def _huggingface(path: str, model: Any) -> LayoutSpec:
    """The tensors and the config.json of a transformers model, as its `save_pretrained` writes them."""
    names = {name: f"{_prefix(path)}{name}" for name in model.state_dict()}
    config = json.loads(model.config.to_json_string())
    config |= {"architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}
    return LayoutSpec(names, config)


def _peft(path: str, model: Any) -> dict[str, LayoutSpec]:
    """The tensors and the adapter_config.json of the active adapter, as PEFT's `save_pretrained` writes them.

    None if several adapters are active, or if PEFT computes a tensor of the file instead of taking it from the model,
    as it does for prompts.
    """
    from peft import get_peft_model_state_dict

    active = model.active_adapter
    if not isinstance(active, str):
        return {}
    state = model.state_dict()
    names = {id(tensor): name for name, tensor in state.items()}
    tensors = get_peft_model_state_dict(model, state, adapter_name=active, save_embedding_layers=False)
    if any(id(tensor) not in names for tensor in tensors.values()):
        return {}
    return {
        "peft": LayoutSpec(
            {name: f"{_prefix(path)}{names[id(tensor)]}" for name, tensor in tensors.items()},
            _peft_config(model, active),
        )
    }


def _peft_config(model: Any, adapter: str) -> dict[str, Any]:
    config = copy.deepcopy(model.peft_config[adapter])
    base = model.get_base_model()
    config.inference_mode = True
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None)
    known = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder, auto_mapping_dict=known if config.task_type is None else None)
        written: dict[str, Any] = json.loads((Path(folder) / "adapter_config.json").read_text())
    return {key: sorted(v) if key == "target_modules" and isinstance(v, list) else v for key, v in written.items()}
