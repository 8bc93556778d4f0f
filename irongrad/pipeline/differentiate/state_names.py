"""The names of a step's state: PyTorch's own names, with one name for each group of tied tensors."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from irongrad.graph.step_graph import Relied, StateTensor
from irongrad.operators.legalize.complex_numbers import refuse_complex
from irongrad.pipeline.capture.step_modules import StepModule, is_carried, name_of
from irongrad.runtime.manifest import Role


class StateNames:
    """The PyTorch names of the step's tensors; all names of a tied tensor lead to its first name.

    Args:
        module: the module of the step.
        relied: what the step relies on of the values of its state, by name.

    Attributes:
        state: the state tensors by name.
    """

    def __init__(self, module: StepModule, relied: Mapping[str, Relied] = MappingProxyType({})) -> None:
        self.state: dict[str, StateTensor] = {}
        self._canonical: dict[str, str] = {}
        first: dict[int, str] = {}
        aliases: dict[str, list[str]] = {}
        tensors: list[tuple[str, torch.Tensor]] = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        for path, tensor in tensors:
            name = name_of(path)
            name = first.setdefault(id(tensor), name)
            self._canonical[path] = name
            if name != name_of(path):
                aliases.setdefault(name, []).append(name_of(path))
        passing = {name_of(f"{p}.{n}") for p, m in module.named_modules() for n in m._non_persistent_buffers_set}
        for path, tensor in tensors:
            name = self._canonical[path]
            role = Role.PARAMETER if isinstance(tensor, nn.Parameter) else Role.BUFFER
            role = Role.CARRIED if is_carried(path) else role
            initial = tensor.detach().cpu()
            others = tuple(aliases.get(name, ()))
            kept = not passing.issuperset((name, *others))
            found = next((relied[n] for n in (name, *others) if n in relied), None)
            self.state[name] = StateTensor(name, role, initial, others, persistent=kept, relied=found)

    def of(self, path: str) -> str:
        """Return the state name for an attribute path of the step module."""
        return self._canonical[path]

    def __contains__(self, path: str) -> bool:
        return path in self._canonical

    def constant(self, path: str, tensor: torch.Tensor) -> str:
        """Register a tensor constant of an exported graph and return its state name.

        Each program of a step numbers its own constants, so a path does not identify one. Equal constants share a name.
        """
        value = tensor.detach().cpu()
        refuse_complex({path: value})
        constants = [t for t in self.state.values() if t.role is Role.CONSTANT]
        for known in constants:
            if known.initial.dtype == value.dtype and torch.equal(known.initial, value):
                return known.name
        name = f"constant/{len(constants)}.{path.rpartition('.')[2]}"
        self.state[name] = StateTensor(name, Role.CONSTANT, value)
        return name

    def tie(self, exported: nn.Module) -> None:
        """Make tied tensors of an exported module one object again; torch.export makes one object for each name."""
        owners: dict[str, torch.Tensor] = {}
        for path, name in self._canonical.items():
            parent_path, _, attribute = path.rpartition(".")
            try:
                parent = exported.get_submodule(parent_path)
                tensor = getattr(parent, attribute)
            except AttributeError:
                continue  # torch.export leaves out a tensor that the forward does not use
            shared = owners.setdefault(name, tensor)
            if shared is not tensor:
                setattr(parent, attribute, shared)
