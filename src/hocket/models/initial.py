"""Random weights by seed, the same on every layout.

Hugging Face's own initialisation runs on one unit at a time (a layer, an embedding, a norm, the
head), whole and on CPU in fp32, from a generator keyed by the seed and the unit's name. A rank
then keeps its blocks of it, so that no layout and no order of units can change a value, and no
rank ever holds more than one whole layer besides its own part.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hocket.models.skeleton import build_skeleton
from hocket.spec.errors import ModelError

_WITH_BUFFERS = "_hocket_with_buffers"
"""Where a skeleton keeps its like that has been constructed with buffers."""


def unit_of(parameter: str) -> str:
    """The unit that a parameter is initialised with: its layer, else the module that owns it."""
    parts = parameter.split(".")
    for index, part in enumerate(parts[:-1]):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1])


def random_values(
    skeleton: nn.Module, names: Iterable[str], seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters by name, unit by unit; each is fp32 on CPU.

    Args:
        skeleton: the whole model on the meta device.
        names: parameters wanted.
        seed: of the weights.

    Raises:
        ModelError: the family's own initialisation leaves one of them untouched.
    """
    units: dict[str, list[str]] = defaultdict(list)
    for name in names:
        units[unit_of(name)].append(name)
    for unit, members in units.items():
        values = _unit(skeleton, unit, seed)
        for name in members:
            value = values[name]
            if bool(torch.isnan(value).any()):
                raise ModelError(
                    f"{type(skeleton).__name__} does not initialise {name}; train it from weights"
                )
            yield name, value


def buffer_values(skeleton: nn.Module, module_name: str) -> dict[str, Tensor]:
    """The buffers of one module as its family's initialisation makes them, on CPU.

    Rotary frequencies and embedding scales are in no weight file; transformers makes them again
    whenever it loads a model, by the same function. What that leaves out, a constant that only
    the constructor computes, is taken from a model that is constructed once more.

    Raises:
        ModelError: neither makes one of them.
    """
    module = _with_own_tensors(skeleton.get_submodule(module_name), parameters=False)
    _initialise(skeleton, module_name, module)
    found = {}
    for name, buffer in module.named_buffers(recurse=False):
        if buffer.is_floating_point() and bool(torch.isnan(buffer).any()):
            made = _constructed(skeleton, module_name, name)
            if made is None or made.shape != buffer.shape or bool(torch.isnan(made).any()):
                raise ModelError(
                    f"{type(skeleton).__name__} does not initialise {module_name}.{name}"
                )
            buffer = made.to(buffer.dtype)
        found[name] = buffer
    return found


def _constructed(skeleton: Any, module_name: str, name: str) -> Tensor | None:
    """A buffer as the model's constructor leaves it; None where it cannot be constructed so."""
    known = skeleton.__dict__.get(_WITH_BUFFERS)
    if known is None:
        try:
            with _without_parameters():
                known = build_skeleton(skeleton.config, device="cpu")
        except Exception:  # a constructor may compute with its parameters, of which there are none
            return None
        skeleton.__dict__[_WITH_BUFFERS] = known
    return known.get_submodule(module_name)._buffers.get(name)


@contextlib.contextmanager
def _without_parameters() -> Iterator[None]:
    """Within, a parameter loses its memory as soon as its module has it; buffers keep theirs."""
    register = nn.Module.register_parameter

    def dropping(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None:
            self._parameters[name] = nn.Parameter(param.to("meta"), param.requires_grad)

    nn.Module.register_parameter = dropping  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _unit(skeleton: nn.Module, unit: str, seed: int) -> dict[str, Tensor]:
    real = skeleton.get_submodule(unit)
    key = hashlib.sha256(f"{seed}:{unit}".encode()).digest()[:8]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(key, "big") >> 1)
        if unit.rpartition(".")[2].isdigit():
            module = copy.deepcopy(real)
            for child in module.modules():
                _own(child, parameters=True)
            _initialise_tree(skeleton, unit, module)
        else:
            module = _with_own_tensors(real, parameters=True)
            _initialise(skeleton, unit, module)
    prefix = f"{unit}." if unit else ""
    return {
        prefix + name: parameter.detach()
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if not parameter.is_meta
    }


def _with_own_tensors(module: nn.Module, *, parameters: bool) -> nn.Module:
    """A shallow copy: its own buffers (and parameters) real, its children as they are."""
    clone = copy.copy(module)
    clone.__dict__ = {
        **module.__dict__,
        "_parameters": dict(module._parameters),
        "_buffers": dict(module._buffers),
    }
    _own(clone, parameters=parameters)
    return clone


def _own(module: nn.Module, *, parameters: bool) -> None:
    """Give a module's own meta tensors memory, filled with what no initialisation leaves."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = _blank(buffer, buffer.dtype)
    if parameters:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                dtype = torch.float32 if parameter.is_floating_point() else parameter.dtype
                module._parameters[name] = nn.Parameter(_blank(parameter, dtype), False)


def _blank(like: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype.is_floating_point:
        return torch.full(like.shape, float("nan"), dtype=dtype)
    return torch.zeros(like.shape, dtype=dtype)


def _initialise_tree(skeleton: nn.Module, name: str, module: nn.Module) -> None:
    """Children before parents, as transformers goes: a block may rescale its own projections."""
    for child_name, child in module.named_children():
        _initialise_tree(skeleton, f"{name}.{child_name}", child)
    _initialise(skeleton, name, module)


def _initialise(skeleton: nn.Module, name: str, module: nn.Module) -> None:
    with torch.no_grad():
        _owner(skeleton, name)._init_weights(module)


def _owner(skeleton: nn.Module, name: str) -> Any:
    """The nearest Hugging Face model around a module: its initialisation is the one to use."""
    owner: Any = skeleton
    parts = name.split(".") if name else []
    for depth in range(1, len(parts) + 1):
        module = skeleton.get_submodule(".".join(parts[:depth]))
        if isinstance(module, PreTrainedModel):
            owner = module
    return owner
