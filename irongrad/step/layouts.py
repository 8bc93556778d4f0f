"""The forms in which other tools read a model: PyTorch's state dict, a transformers folder, and an adapter of PEFT."""

from __future__ import annotations

import json
from typing import Any

from torch import nn

from irongrad.quantisation.modules import QuantizedEmbedding, QuantizedLinear
from irongrad.runtime.manifest import LayoutSpec


def layouts_of(model: nn.Module) -> dict[str, LayoutSpec]:
    """Return every form that `model` has, by name: `torch`, `huggingface` and `peft`."""
    made = {"torch": LayoutSpec({name: name for name in _state_dict_names(model)})}
    adapters = outermost(model, "peft", "PeftModel")
    if len(adapters) == 1:
        made |= _peft(*adapters[0])
    pretrained = outermost(model, "transformers", "PreTrainedModel")
    if len(pretrained) == 1 and not adapters and not _is_quantised(model):
        made["huggingface"] = _huggingface(*pretrained[0])
    return made


def _state_dict_names(model: nn.Module) -> list[str]:
    """The names of the tensors in `model.state_dict()`; calls no method that the user may have written."""
    transient = {
        f"{_prefix(path)}{name}"
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return [name for name, _ in named if name not in transient]


def outermost(model: nn.Module, package: str, name: str) -> list[tuple[str, Any]]:
    """The modules of a class of a package, with their paths, but none inside another; the package is not imported."""
    found: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") or not outer for outer, _ in found)
        kinds = ((c.__module__.partition(".")[0], c.__name__) for c in type(module).__mro__)
        if not inside and (package, name) in kinds:
            found.append((path, module))
    return found


def _is_quantised(model: nn.Module) -> bool:
    """Whether `ig.quantize` has changed layers; transformers would make new weights for them, and only warn."""
    return any(isinstance(module, QuantizedLinear | QuantizedEmbedding) for module in model.modules())


def _prefix(path: str) -> str:
    return f"{path}." if path else ""


def _huggingface(path: str, model: Any) -> LayoutSpec:
    """The tensors and the config.json of a transformers model, as its `save_pretrained` writes them."""
    names = {name: f"{_prefix(path)}{name}" for name in _state_dict_names(model)}
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
    config = model.peft_config[adapter]
    base = model.get_base_model()
    settings = config.to_dict() | {"inference_mode": True}
    if settings["base_model_name_or_path"] is None:
        settings["base_model_name_or_path"] = getattr(base, "name_or_path", None)
    if config.task_type is None:
        settings["auto_mapping"] = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
    written: dict[str, Any] = json.loads(json.dumps(plain, default=str))
    return written
