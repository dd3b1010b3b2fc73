"""Weights: memory and values for the meta tensors of one stage, on one rank.

A rank allocates what its stage owns, at its tensor-parallel size, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hocket.models.initial import buffer_values, random_values
from hocket.models.source import ModelSource
from hocket.models.weight_files import WeightFiles
from hocket.spec.placement import Placement


def materialize(
    module: nn.Module,
    placements: Mapping[str, Placement],
    skeleton: nn.Module,
    source: ModelSource | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> int:
    """Give every meta parameter and buffer of a stage memory and its values, in place.

    Values come from the source's safetensors files, of which only the needed slices are read, or,
    where there are none, from the seed: equal on every layout, bit for bit.

    Args:
        module: one stage, cut and split, under the whole model's names.
        placements: name to placement, of every parameter of the stage.
        skeleton: the whole model on the meta device.
        source: where the weights are. None, or a source without weights: random.
        device: where the stage is to live.
        dtype: of floating-point parameters; buffers keep the dtype their family gave them.
        seed: of random weights.

    Returns:
        The bytes read from weight files, their headers among them.

    Raises:
        WeightsError: weight files whose names or shapes do not fit.
        ModelError: a family whose own initialisation leaves a tensor untouched.
    """
    files = None
    if source is not None and source.weights is not None:
        files = WeightFiles(source.weights, skeleton)
    locals_ = _allocate(module, torch.device(device), dtype)
    ties: dict[str, str] = dict(getattr(skeleton, "all_tied_weights_keys", None) or {})
    with torch.no_grad():
        if files is not None:
            for name, local in locals_.items():
                files.read_into(local, placements[name])
        else:
            owners = {name: _owner(name, placements[name], ties) for name in locals_}
            wanted = dict.fromkeys(owners.values())
            for owner, whole in random_values(skeleton, wanted, seed):
                for name, local in locals_.items():
                    if owners[name] == owner:
                        for there, here in placements[name].pairs():
                            local[here].copy_(whole[there])
        _fill_buffers(module, skeleton, files, torch.device(device))
    if files is not None:
        files.close()
    return 0 if files is None else files.bytes_read


def _owner(name: str, placement: Placement, ties: Mapping[str, str]) -> str:
    """The name whose values a parameter takes: its own, or its tie's."""
    owner = placement.tie or name
    return ties.get(owner, owner)


def _allocate(module: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Replace each meta parameter by an empty real one; tied ones stay one. Name to tensor."""
    made: dict[int, nn.Parameter] = {}
    # The old ones are held until the end: a tie is known by the identity of a living object.
    held: list[nn.Parameter] = []
    found: dict[str, Tensor] = {}
    for module_name, child in module.named_modules():
        for key, parameter in list(child._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                kind = dtype if parameter.is_floating_point() else parameter.dtype
                real = nn.Parameter(
                    torch.empty(parameter.shape, dtype=kind, device=device),
                    requires_grad=parameter.requires_grad,
                )
                real.__dict__.update(parameter.__dict__)
                held.append(parameter)
                made[id(parameter)] = real
                found[f"{module_name}.{key}" if module_name else key] = real.data
            child._parameters[key] = made[id(parameter)]
    return found


def _fill_buffers(
    module: nn.Module, skeleton: nn.Module, files: WeightFiles | None, device: torch.device
) -> None:
    for module_name, child in module.named_modules():
        own = {key: b for key, b in child._buffers.items() if b is not None and b.is_meta}
        if not own:
            continue
        values = buffer_values(skeleton, module_name)
        for key in own:
            name = f"{module_name}.{key}" if module_name else key
            value = values[key]
            if files is not None and name in files and key not in child._non_persistent_buffers_set:
                files.read_into(value, Placement.whole(name, tuple(value.shape)))
            child._buffers[key] = value.to(device)
