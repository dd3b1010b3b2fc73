"""Recompute: activations thrown away after forward and made again when backward needs them.

    full        of each layer only its input stays; backward runs the layer again, then backward
                through it (Chen et al. 2016; Korthikanti et al. 2022, section 5)
    selective   only what the attention core saves is thrown away: everything else stays
    modules     of norms, activation functions and MLA's up-projections the input stays
                (`runtime.recipes`)
    mlp         of each feed-forward layer that is no mixture of experts only its input stays

`torch.utils.checkpoint` does the work of full, selective and mlp, in its form of hooks on saved
tensors. It stops as soon as the last tensor that backward asks for is there: a layer, or a
feed-forward layer, that ends in a product and sums is not run to its end, and the last all-reduce
over tp is not repeated. All others are: with sequence parallelism a feed-forward layer gathers its
input once more.

What a layer's first run found out by asking others is noted and not asked again (`found_once`):
the sizes of messages to experts, which a CUDA host waits for.

Random numbers come again: a layer is seeded again by its key, a core or a feed-forward layer gets
the state back that it found. Where the weights' gradients are deferred (I and W), a layer is
recomputed in I, and what its products read stays from there to W.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hocket.runtime.random import Streams
from hocket.runtime.recipes import (
    KeptInput,
    LayerRecipes,
    LayerWithRecipes,
    ProjectionAgain,
    WrittenModule,
    mapped,
    nothing_written,
    running_layer,
)
from hocket.runtime.tensor_parallel.sequence import forward_from_slice
from hocket.spec import recompute
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
        layer = running_layer()
        if layer is None:
            return checkpoint(core, *args, use_reentrant=False, preserve_rng_state=draws, **kwargs)
        return _from_inputs(layer, core, args, kwargs, preserve_rng_state=draws)


class RecomputedFeedForward:
    """Stands for the `forward` of a feed-forward layer, of which its inputs stay."""

    def __init__(self, inner: Callable[..., Any], streams: Streams | None) -> None:
        self.inner = inner
        self.streams = streams
        self.__wrapped__ = inner  # signatures are read off it

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer, streams = running_layer(), self.streams
        if layer is None or not torch.is_grad_enabled():
            return self.inner(*args, **kwargs)
        # As in a layer nothing else draws during a backward: the state after it is no matter.
        before = (
            _nothing if streams is None else functools.partial(streams.return_to, streams.moment())
        )
        return _from_inputs(layer, self.inner, args, kwargs, before=before)


def _nothing() -> None:
    pass


def _from_inputs(
    layer: LayerRecipes,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    *,
    preserve_rng_state: bool = False,
    before: Callable[[], None] = _nothing,
) -> Any:
    """Call a function such that what it saves is made again in backward, from its inputs: those
    that are made again themselves (norms, up-projections) are kept as what makes them.

    Args:
        before: called before it runs again.
    """
    given = [(args, kwargs)]
    kept = mapped((args, kwargs), lambda tensor: KeptInput(layer, tensor))

    def run() -> Any:
        if given:
            args, kwargs = given.pop()
        else:
            args, kwargs = mapped(kept, KeptInput.tensor)
            before()
        with nothing_written():
            return function(*args, **kwargs)

    return checkpoint(run, use_reentrant=False, preserve_rng_state=preserve_rng_state)


class PlainCore:
    """Calls an attention core inside a module whose operations are written down; its are not."""

    def __call__(self, core: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with nothing_written():
            return core(*args, **kwargs)


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
    layers = recomputed_layers(module, layout, plan)
    asked = recompute.modules(layout.recompute)
    for layer in layers:
        assert not isinstance(vars(layer).get("forward"), RecomputedLayer), "twice"
        if layout.recompute == "full":
            layer.forward = RecomputedLayer(layer.forward, streams)
            continue
        if "core_attn" in asked:
            for core in _named(layer, plan.cores):
                setattr(core, CORE, RecomputedCore(streams))
        found = {kind: recomputed_modules(layer, kind, plan) for kind in asked}
        if not any(found.values()):
            continue
        for child in found.get("mla_up", []):
            up = [linear for name, linear in child.named_children() if UP.fullmatch(name)]
            for linear in up:
                linear.forward = ProjectionAgain(linear.forward)
            if not hasattr(child, CORE):
                setattr(child, CORE, PlainCore())
        whole = found.get("mlp", [])
        for child in whole:
            child.forward = RecomputedFeedForward(forward_from_slice(child), streams)
        written = [child for kind in recompute.RECIPES for child in found.get(kind, [])]
        for child in written:
            if child not in whole:
                child.forward = WrittenModule(child.forward)
        layer.forward = LayerWithRecipes(layer.forward)
    return layers


UP = re.compile(r"(q|k|v|kv)_b_proj")
"""How MLA's up-projections are named."""


def recomputed_modules(layer: nn.Module, kind: str, plan: StagePlan) -> list[nn.Module]:
    """The modules of a layer that a word of `spec.recompute.MODULES` stands for."""
    attention = _named(layer, plan.cores)
    if kind == "core_attn":
        return []
    if kind == "mlp":  # layers of experts may have the same name
        return [
            child
            for child in _named(layer, plan.feed_forward)
            if recompute.is_dense([type(module).__name__ for module in child.modules()])
        ]
    if kind == "norm":
        return [child for child in layer.modules() if child is not layer and _is_norm(child)]
    if kind == "mla_up":
        return [
            child
            for child in attention
            if any(UP.fullmatch(name) for name, _ in child.named_children())
        ]
    found: list[nn.Module] = []
    _feed_forward(layer, set(attention), found)
    return found


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not any(True for _ in module.children())


def _feed_forward(module: nn.Module, attention: set[nn.Module], found: list[nn.Module]) -> None:
    """The outermost feed-forward layers, layers of experts and activation functions."""
    for child in module.children():
        if child in attention or _is_norm(child):
            continue
        holds = attention.isdisjoint(child.modules())
        named = recompute.FEED_FORWARD_CLASS.fullmatch(type(child).__name__) is not None
        home = type(child).__module__
        function = home.endswith(".activations") or home == "torch.nn.modules.activation"
        if (named and holds) or (function and not any(True for _ in child.parameters())):
            found.append(child)
        else:
            _feed_forward(child, attention, found)


def recomputed_layers(module: nn.Module, layout: Layout, plan: StagePlan) -> list[nn.Module]:
    """Of the layers that a stage owns, those that are run again."""
    owned = [
        layer
        for layer in module.get_submodule(plan.layers).children()
        if any(True for _ in layer.parameters())  # the others have been cut away
    ]
    return owned[: layout.recompute_layers]


def _named(layer: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules of these names in a layer; layers of another kind have none."""
    found = dict(layer.named_modules())
    return [found[name] for name in names if name in found]
