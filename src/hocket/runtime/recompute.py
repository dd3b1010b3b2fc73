"""Recompute: activations thrown away after forward and made again when backward needs them.

    full        of each layer only its input stays; backward runs the layer again, then backward
                through it (Chen et al. 2016; Korthikanti et al. 2022, section 5)
    selective   only what the attention core saves is thrown away: everything else stays

`torch.utils.checkpoint` does the work, in its form of hooks on saved tensors. It stops as soon as
the last tensor that backward asks for is there: a layer that ends in a product and sums is not
run to its end, and the last all-reduce over tp is not repeated. All others are.

What a layer's first run found out by asking others is noted and not asked again (`found_once`):
the sizes of messages to experts, which a CUDA host waits for.

Random numbers come again: a layer is seeded again by its key, a core gets the state back that it
found. Where the weights' gradients are deferred (I and W), a layer is recomputed in I, and what its
products read stays from there to W.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hocket.runtime.random import Streams
from hocket.spec.layout import Layout
from hocket.spec.plan import StagePlan

CORE = "recompute_core"
"""Attribute of an attention module: calls the function it is given, and again in backward. Who
gives such a module its core (`models.cores`) goes through it."""


class RecomputedLayer:
    """Stands for the `forward` of one layer.

    Attributes:
        inner: the layer's own forward, compiled or not.
        streams: random streams; None where nothing is drawn.
    """

    def __init__(self, inner: Callable[..., Any], streams: Streams | None) -> None:
        self.inner = inner
        self.streams = streams
        self.__wrapped__ = inner  # signatures are read off it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        return checkpoint(
            self.inner,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=self._contexts,
            **kwargs,
        )

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        notes: list[Any] = []
        place = None if self.streams is None else self.streams.place
        return _first(notes), _again(notes, self.streams, place)


class RecomputedCore:
    """Calls an attention core such that what it saves is made again in backward."""

    def __init__(self, streams: Streams | None) -> None:
        self.streams = streams

    def __call__(self, core: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return core(*args, **kwargs)
        draws = self.streams is not None
        return checkpoint(core, *args, use_reentrant=False, preserve_rng_state=draws, **kwargs)


class _Run(threading.local):
    """Of this thread: `notes` of a layer's first run, or what is `left` of them in its second."""

    notes: list[Any] | None = None
    left: Iterator[Any] | None = None


_RUN = _Run()
_Found = TypeVar("_Found")


def found_once(find: Callable[[], _Found]) -> tuple[_Found, bool]:
    """What `find` gives; where a layer runs again in backward, what it gave in the first run.

    Returns:
        That, and whether it is of the first run.
    """
    if _RUN.left is not None:
        return next(_RUN.left), True
    found = find()
    if _RUN.notes is not None:
        _RUN.notes.append(found)
    return found, False


@contextmanager
def _first(notes: list[Any]) -> Iterator[None]:
    """Within, a layer runs whose second run will ask for `notes`."""
    before, _RUN.notes = _RUN.notes, notes
    try:
        yield
    finally:
        _RUN.notes = before


@contextmanager
def _again(
    notes: list[Any], streams: Streams | None, place: tuple[int, int, int] | None
) -> Iterator[None]:
    """Within, a layer draws what it drew at that place. Nothing else draws during a backward."""
    if streams is not None and place is not None:
        streams.enter_again(place)
    before, _RUN.left = _RUN.left, iter(notes)
    try:
        yield
    finally:
        _RUN.left = before


def recompute_layers(
    module: nn.Module, layout: Layout, plan: StagePlan, streams: Streams | None
) -> list[nn.Module]:
    """Let one stage's layers be run again in backward, as the layout says.

    Returns:
        The layers concerned: the first `layout.recompute_layers` that the stage has, or all.
    """
    assert layout.recompute in ("selective", "full"), layout.recompute
    layers = recomputed_layers(module, layout, plan)
    for layer in layers:
        if layout.recompute == "full":
            assert not isinstance(vars(layer).get("forward"), RecomputedLayer), "twice"
            layer.forward = RecomputedLayer(layer.forward, streams)
        else:
            for core in _attention_cores(layer, plan.cores):
                setattr(core, CORE, RecomputedCore(streams))
    return layers


def recomputed_layers(module: nn.Module, layout: Layout, plan: StagePlan) -> list[nn.Module]:
    """Of the layers that a stage owns, those that are run again."""
    owned = [
        layer
        for layer in module.get_submodule(plan.layers).children()
        if any(True for _ in layer.parameters())  # the others have been cut away
    ]
    return owned[: layout.recompute_layers]


def _attention_cores(layer: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The attention modules of a layer; layers of another kind have none."""
    found = dict(layer.named_modules())
    return [found[name] for name in names if name in found]
