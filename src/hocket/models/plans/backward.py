"""What a layer keeps for backward, and in which order: found by watching a tiny proxy model train.

cores               the modules whose attention core can be run by itself again
ends                the modules that finish after the last tensor that the layer saves: a layer that
                    is run again need not come to their end. Where a norm or dropout follows the
                    last product, as in Gemma 2 and in GPT-2 with dropout, there are none
feed_forward        feed-forward layers that can be run by themselves again: no mixtures of experts
feed_forward_ends   as `ends`, of each of these
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hocket.models.cores import watched
from hocket.models.proxy import ProxyModel
from hocket.spec import recompute

_DROPPING = ("dropout", "pdrop")


def saving(proxy: ProxyModel, whole: nn.Module, layers: str) -> dict[str, Any]:
    """These fields of a `StagePlan`, as names below one layer.

    Args:
        proxy: the tiny proxy model of the model.
        whole: the real model; only its dropout probabilities are read.
        layers: name of the list of layers.
    """
    model: Any = proxy.build()
    _drop(model, whole)
    model.train()
    held = list(model.get_submodule(layers).children())
    clock = _Clock()
    finished: list[dict[str, int]] = [{} for _ in held]
    saved = [0] * len(held)
    inside: list[dict[str, int]] = [{} for _ in held]
    names: dict[int, str] = {}
    for index, layer in enumerate(held):
        for name, child in layer.named_modules():
            if name:
                names[id(child)] = name
                child.register_forward_hook(clock.writes(finished[index], name))
        for name, child in _feed_forward(layer):
            child.register_forward_hook(clock.writes_last_save(inside[index], name))
        layer.register_forward_hook(clock.writes_last_save(saved, index))
    ids = torch.arange(3, 19).unsqueeze(0)
    positions = torch.arange(ids.shape[1]).unsqueeze(0)
    hooks = torch.autograd.graph.saved_tensors_hooks(clock.save, lambda tensor: tensor)
    with torch.random.fork_rng(devices=[]), watched() as ran, torch.enable_grad(), hooks:
        model(input_ids=ids, position_ids=positions, use_cache=False)
    cores = dict.fromkeys(names[id(module)] for module in ran if id(module) in names)
    attention = {name for name in cores if name}
    dense = {
        name: last
        for row in inside
        for name, last in row.items()
        if not any(core == name or core.startswith(f"{name}.") for core in attention)
    }
    within = [
        ({n: t for n, t in row.items() if n.startswith(f"{name}.")}, last)
        for row, lasts in zip(finished, inside, strict=True)
        for name, last in lasts.items()
        if name in dense
    ]
    return {
        "cores": tuple(cores),
        "ends": _behind(zip(finished, saved, strict=True)),
        "feed_forward": tuple(dense),
        "feed_forward_ends": _behind(within),
    }


def _behind(finished: Iterable[tuple[Mapping[str, int], int]]) -> tuple[str, ...]:
    """Names that always come after the last save: of times by name, and that of the save."""
    after: set[str] = set()
    before: set[str] = set()
    for times, last in finished:
        for name, time in times.items():
            (after if time > last else before).add(name)
    return tuple(sorted(after - before))


def _feed_forward(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The outermost feed-forward layers in a module that are no mixtures of experts, by name."""
    for name, child in module.named_children():
        classes = [type(each).__name__ for each in child.modules()]
        if recompute.FEED_FORWARD_CLASS.fullmatch(classes[0]) is None:
            yield from _feed_forward(child, f"{prefix}{name}.")
        elif recompute.is_dense(classes):
            yield f"{prefix}{name}", child


class _Clock:
    """Counts what happens, in order to know what came first."""

    def __init__(self) -> None:
        self.now = 0
        self.last_save = 0

    def save(self, tensor: Tensor) -> Tensor:
        self.now += 1
        self.last_save = self.now
        return tensor

    def writes(self, into: dict[str, int], name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self.now += 1
            into[name] = self.now

        return hook

    def writes_last_save(self, into: Any, index: Any) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            into[index] = self.last_save

        return hook


def _drop(proxy: nn.Module, whole: nn.Module) -> None:
    """Give the proxy model's layers the dropout that the model trains with."""
    kinds: dict[str, float] = {}
    for name, child in whole.named_modules():
        if isinstance(child, nn.Dropout):
            kinds[_pattern(name)] = max(child.p, kinds.get(_pattern(name), 0.0))
    for name, child in proxy.named_modules():
        if isinstance(child, nn.Dropout):
            child.p = kinds.get(_pattern(name), 0.0)
        for key, value in vars(child).items():
            if isinstance(value, float) and any(word in key for word in _DROPPING):
                setattr(child, key, _like(whole, name, key, value))


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _like(whole: nn.Module, name: str, key: str, default: float) -> float:
    """The same attribute of the module of that name, or of its like in the first layer."""
    first = ".".join("0" if part.isdigit() else part for part in name.split("."))
    for each in (name, first):
        try:
            return float(getattr(whole.get_submodule(each), key, default))
        except AttributeError:
            continue
    return default
