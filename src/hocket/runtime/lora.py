"""LoRA: frozen linear layers, each with a trained product of two thin matrices in parallel.

    y = x W^T + (x A^T) B^T alpha / r            A [r, in], B [out, r]       (Hu et al. 2021)

Where W is split over tp, so is what has its dim, and what has not is whole and sees a part:

    column   W [out/tp, in]    A whole, gradient summed    B [out/tp, r]
    row      W [out, in/tp]    A [r, in/tp]                B whole, gradient summed

The product lies inside the layer, before its all-reduce and behind its entry: LoRA adds no message
to a microbatch, and one sum of thin gradients to a step. Names are those that peft gives in files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.linear import Kept, deferrable
from hocket.runtime.parallel import Parallel
from hocket.runtime.pipeline.stage import Stage
from hocket.runtime.tensor_parallel.layers import RowParallelLinear, _ParallelLinear
from hocket.runtime.tensor_parallel.shards import take
from hocket.spec.errors import LayoutError, ModelError
from hocket.spec.placement import Placement, TensorBlock


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """What is trained instead of the model.

    Attributes:
        rank: r. alpha: the products are scaled by alpha / r.
        dropout: of the products' input.
        targets: names of the linear layers, of the whole model.
        seed: of A; B begins at zero.
    """

    rank: int
    alpha: float
    dropout: float = 0.0
    targets: tuple[str, ...]
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class _Product(nn.Module):
    """What the changed layers share; never made directly."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_dropout: nn.Module
    scale: float

    def _product(self, x: Tensor) -> Tensor:
        out: Tensor = self.lora_B(self.lora_A(self.lora_dropout(x)) * self.scale)
        return out


class _Around(_Product):
    """A layer that is whole: the product is added to what it returns."""

    def forward(self, input: Tensor) -> Tensor:
        y: Tensor = super().forward(input)  # type: ignore[misc]
        return y + self._product(input)


class _Inside(_Product):
    """A split layer: the product is added to its part, before anything is gathered or summed."""

    training: bool

    def _linear(self, x: Tensor, bias: Tensor | None, kept: Kept | None = None) -> Tensor:
        y: Tensor = super()._linear(x, bias, kept)  # type: ignore[misc]
        streams = getattr(self, "streams", None)
        if streams is None or not self.training:
            return y + self._product(x)
        # Dropout agrees on an input that is whole and differs on one in parts.
        if isinstance(self, RowParallelLinear):
            streams.enter_sharded()
            product = self._product(x)
            streams.leave_sharded()
        else:
            streams.enter_replicated()
            product = self._product(x)
        return y + product


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class of a layer of `kind` with an adapter; one for all such layers."""
    if kind not in _CLASSES:
        way = _Inside if issubclass(kind, _ParallelLinear) else _Around
        _CLASSES[kind] = type(f"Lora{kind.__name__}", (way, deferrable(kind)), {})
    return _CLASSES[kind]


def adapt(parallel: Parallel, lora: Lora, *, values: bool = True) -> None:
    """Freeze this rank's parameters and add adapters to its targets, in place.

    To be called on real tensors, before `Parallel.finish`. `values` False leaves the products
    without values, for tensors that have none.

    Raises:
        LayoutError: a stage that holds none of the targets.
        ModelError: a target that is no linear layer.
    """
    wanted = frozenset(lora.targets)
    for stage in parallel.stages:
        for parameter in stage.module.parameters():
            parameter.requires_grad_(False)
        _adapt(stage, lora, wanted, values)
        parallel.placements.update(stage.placements)


def _adapt(stage: Stage, lora: Lora, wanted: Collection[str], values: bool) -> None:
    found = [(n, m) for n, m in stage.module.named_modules() if n in wanted]
    found = [(n, m) for n, m in found if "weight" in m._parameters]  # the rest has been cut away
    if not found:
        raise LayoutError(
            f"stage {stage.index} of {stage.num_stages} holds none of the layers that LoRA adapts, "
            "so that its gradients would go nowhere",
            hint="--lora-targets all-linear, or fewer pipeline stages",
        )
    for name, module in found:
        weight = stage.placements[f"{name}.weight"]
        if not isinstance(module, nn.Linear) and type(module).__name__ != "Conv1D":
            raise ModelError(f"{name} is a {type(module).__name__}; LoRA adapts linear layers")
        transposed = type(module).__name__ == "Conv1D" or getattr(module, "transposed", False)
        places = adapter_placements(f"{name}.", weight, transposed=transposed, rank=lora.rank)
        child: Any = module
        held = child.weight
        for key, place in zip(("lora_A", "lora_B"), places, strict=True):
            whole = initial(place, lora.seed) if values and key == "lora_A" else None
            rows, columns = place.local_shape
            thin = nn.Linear(columns, rows, bias=False, device="meta")
            local = torch.zeros(place.local_shape, dtype=held.dtype, device=held.device)
            if whole is not None:
                local.copy_(take(whole, place))
            thin.weight = nn.Parameter(local)
            thin.weight.grad_dtype = torch.float32
            child.add_module(key, thin)
            stage.placements[place.name] = place
        child.lora_dropout = nn.Dropout(lora.dropout) if lora.dropout else nn.Identity()
        child.scale = lora.scale
        child.__class__ = _class(type(module))


def adapter_placements(
    prefix: str, weight: Placement, *, transposed: bool, rank: int
) -> tuple[Placement, Placement]:
    """Where A and B of a layer lie on this rank, from where its weight does.

    Args:
        prefix: of the names. transposed: the weight is [in, out] instead of [out, in].
    """
    inner, outer = (0, 1) if transposed else (1, 0)
    partial = ("tp",) if weight.sharded or "tp" in weight.grad_sum else ()
    split = _split_dim(weight, outer)
    found = []
    for key, dim, own in (("lora_A", inner, 1), ("lora_B", outer, 0)):
        name = f"{prefix}{key}.weight"

        def shape(size: int, own: int = own) -> tuple[int, int]:
            return (rank, size) if own else (size, rank)

        def corner(first: int, own: int = own) -> tuple[int, int]:
            return (0, first) if own else (first, 0)

        if split != dim:
            whole = Placement.whole(name, shape(weight.shape[dim]), grad_sum=partial)
            there = ("tp",) if weight.sharded else weight.replicated
            found.append(dataclasses.replace(whole, replicated=there))
            continue
        blocks = tuple(
            TensorBlock(
                start=corner(block.start[dim]),
                local=corner(block.local[dim]),
                size=shape(block.size[dim]),
                copies=block.copies,
            )
            for block in weight.blocks
        )
        found.append(
            Placement(
                name=name,
                shape=shape(weight.shape[dim]),
                local_shape=shape(weight.local_shape[dim]),
                blocks=blocks,
                sharded=weight.sharded,
            )
        )
    return found[0], found[1]


def _split_dim(weight: Placement, outer: int) -> int | None:
    """The dim along which a weight is dealt out. Where every rank has a copy of all heads, no dim
    is smaller than the whole; heads are copied along the outputs alone."""
    if not weight.sharded:
        return None
    smaller = [d for d in range(2) if any(b.size[d] != weight.shape[d] for b in weight.blocks)]
    return smaller[0] if smaller else outer


def initial(place: Placement, seed: int) -> Tensor:
    """A whole A [r, in] as peft draws it (`kaiming_uniform_`, a = sqrt 5), keyed by its name."""
    key = hashlib.sha256(f"{seed}:{place.name}".encode()).digest()[:8]
    generator = torch.Generator().manual_seed(int.from_bytes(key, "big") >> 1)
    whole = torch.empty(place.shape)
    nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)
    return whole


class TrainedParameters:
    """What a rank's checkpoint holds, in the form that checkpoints are written from: the products
    where there are some, else all parameters. What is frozen lies in the base's files."""

    def __init__(self, parallel: Any) -> None:
        self.mesh = parallel.mesh
        self.reading, self.writing = parallel.reading, parallel.writing
        self.local_part = parallel.local_part
        found = dict(parallel.named_parameters())
        if any(".lora_A." in name for name in found):
            found = {name: p for name, p in found.items() if p.requires_grad}
        else:
            self.stages = parallel.stages  # whose buffers belong to it
        self._parameters = found
        self.placements = {n: parallel.placements[n] for n in self._parameters}
        # What is trained and what is frozen is gathered apart.
        self._groups = [g for g in parallel.groups() if any(n in found for n in g)]
        self._groups = [[n for n in group if n in found] for group in self._groups]

    def named_parameters(self) -> Any:
        return self._parameters.items()

    def groups(self) -> list[list[str]]:
        return self._groups
