"""Weights: memory and values for the meta tensors of one stage, on one rank.

A rank allocates what its stage owns, at its tensor-parallel size, and nothing else; where it holds
shares of that, it is filled block by block as each is shared out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hocket.models.initial import buffer_values, random_values
from hocket.models.source import ModelSource
from hocket.models.weight_files import WeightFiles
from hocket.spec import downloads
from hocket.spec.errors import WeightsError
from hocket.spec.placement import Placement


class Weights:
    """The values of one stage: buffers at once, parameters by name when they are asked for.

    Until then a parameter has its shape, dtype and device, one element's memory, and no values.
    Values come from the source's safetensors files, of which only the needed slices are read, or,
    where there are none, from the seed: equal on every layout and in every order, bit for bit.

    Args:
        module: one stage, cut and split, under the whole model's names; its meta parameters and
            buffers are replaced.
        placements: name to placement, of every parameter of the stage.
        skeleton: the whole model on the meta device.
        source: where the weights are. None, or a source without weights: random.
        device: where the stage is to live.
        dtype: of floating-point parameters; buffers keep the dtype their family gave them.
        seed: of random weights.

    Raises:
        WeightsError: weight files whose names or shapes do not fit.
        ModelError: a family whose own initialisation leaves a buffer untouched.
    """

    def __init__(
        self,
        module: nn.Module,
        placements: Mapping[str, Placement],
        skeleton: nn.Module,
        source: ModelSource | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        self._placements, self._skeleton, self._seed = placements, skeleton, seed
        self._files: WeightFiles | None = None
        if source is not None and source.weights is not None:
            self._files = WeightFiles(source.weights, skeleton)
        self._ties: dict[str, str] = dict(getattr(skeleton, "all_tied_weights_keys", None) or {})
        self._left = _replace(module, torch.device(device), dtype)
        self._done, self._total = 0, sum(p.numel() * p.itemsize for p in self._left.values())
        with torch.no_grad():
            _fill_buffers(module, skeleton, self._files, torch.device(device))

    @torch.no_grad()
    def fill(self, names: Iterable[str] | None = None) -> None:
        """Give parameters their values, and memory to those that were given none meanwhile.

        Args:
            names: which; None: all that are left. Those that have values are passed over.

        Raises:
            WeightsError: the weight files cannot be read, or hold values that are not finite.
            ModelError: a family whose own initialisation leaves one of them untouched.
        """
        wanted = [n for n in (list(self._left) if names is None else names) if n in self._left]
        locals_: dict[str, Tensor] = {}
        for name in wanted:
            parameter = self._left.pop(name)
            if 0 in parameter.stride():  # one element's memory still
                parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)
            locals_[name] = parameter.data
        if self._files is not None:
            for name, local in locals_.items():
                self._files.read_into(local, self._placements[name])
                require_finite(name, local, self._files.directory)
                self._done += local.nbytes
                done, total = min(self._done, self._total), self._total
                downloads.report_download(
                    downloads.Download("weights of a rank", done, total, brief=True)
                )
            return
        owners = {name: _owner(name, self._placements[name], self._ties) for name in locals_}
        for owner, whole in random_values(
            self._skeleton, dict.fromkeys(owners.values()), self._seed
        ):
            for name, local in locals_.items():
                if owners[name] == owner:
                    for there, here in self._placements[name].pairs():
                        local[here].copy_(whole[there])

    def close(self) -> int:
        """Let the files go, once every parameter has its values. Returns the bytes read from
        them, their headers among them."""
        assert not self._left, f"without values: {', '.join(list(self._left)[:5])}"
        if self._files is None:
            return 0
        self._files.close()
        return self._files.bytes_read


def materialize(
    module: nn.Module,
    placements: Mapping[str, Placement],
    skeleton: nn.Module,
    source: ModelSource | None = None,
    **more: Any,
) -> int:
    """Give every meta parameter and buffer of a stage memory and its values, in place.

    Args and errors are those of `Weights`. Returns the bytes read from weight files.
    """
    weights = Weights(module, placements, skeleton, source, **more)
    weights.fill()
    return weights.close()


def require_finite(name: str, value: Tensor, where: object) -> None:
    """Raise WeightsError for NaN, and for infinite entries of matrices. A vector may have some: an
    attention sink at -inf is one that is left out."""
    if value.sum().isfinite() or value.isfinite().all():
        return
    if value.dim() > 1 or value.isnan().any():
        raise WeightsError(
            f"{name} in {where} has {int((~value.isfinite()).sum()):,} values that are not finite "
            f"numbers, of {value.numel():,} that this rank reads",
            hint="weights of a run that diverged, or a damaged file: take an earlier checkpoint, "
            "or download it again",
        )


def _owner(name: str, placement: Placement, ties: Mapping[str, str]) -> str:
    """The name whose values a parameter takes: its own, or its tie's."""
    owner = placement.tie or name
    return ties.get(owner, owner)


def _replace(
    module: nn.Module, device: torch.device, dtype: torch.dtype
) -> dict[str, nn.Parameter]:
    """Replace each meta parameter by a real one, all of it one element's memory; tied ones stay
    one. Name to parameter."""
    made: dict[int, nn.Parameter] = {}
    # The old ones are held until the end: a tie is known by the identity of a living object.
    held: list[nn.Parameter] = []
    found: dict[str, nn.Parameter] = {}
    for module_name, child in module.named_modules():
        for key, parameter in list(child._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                kind = dtype if parameter.is_floating_point() else parameter.dtype
                real = nn.Parameter(
                    torch.zeros((), dtype=kind, device=device).expand(parameter.shape),
                    requires_grad=parameter.requires_grad,
                )
                real.__dict__.update(parameter.__dict__)
                held.append(parameter)
                made[id(parameter)] = real
                found[f"{module_name}.{key}" if module_name else key] = real
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
