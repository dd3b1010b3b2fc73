"""StagePlan of any model, found by watching one tiny forward instead of trusting names.

Four rules cut most causal language models while their own forward stays in use: (a) start at
`get_decoder()`; (b) what runs before and after the layers is read from the order of execution;
(c) a missing layer returns a tuple if the real one did; (d) position embeddings add nothing on
later stages, and dropout or norms of the embedding are passed through.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hocket.models.failure import raise_if_exhausted
from hocket.models.plans.backward import saving
from hocket.models.plans.experts import expert_shares
from hocket.models.plans.pairs import leaves
from hocket.models.plans.segments import folded
from hocket.models.proxy import ProxyModel
from hocket.spec.errors import ModelError
from hocket.spec.plan import StagePlan


def stage_plan(proxy: ProxyModel, whole: nn.Module) -> StagePlan:
    """Run the proxy model once on CPU and read its stages.

    Args:
        proxy: the tiny proxy model of the model to cut.
        whole: the real model; only its number of layers is read.

    Raises:
        ModelError: the layers are not one list that the decoder runs through.
    """
    model: Any = proxy.build()
    kind = model.config.model_type
    names = {id(module): name for name, module in model.named_modules()}
    decoder, layers_name, layers = _layers(model, len(proxy.layers))
    path = names[id(decoder)]

    order: list[str] = []
    lengths: set[int] = set()
    streams: set[tuple[int, bool]] = set()
    width = int(model.config.get_text_config().hidden_size)
    hooks = []

    carries: set[str] = set()
    tokens: set[str] = set()
    embedded: list[tuple[torch.Tensor, int]] = []
    ids = torch.arange(3, 19).unsqueeze(0)

    def watch(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            order.append(name)
            if isinstance(module, nn.Embedding) and isinstance(output, torch.Tensor):
                embedded.append((output, output._version))
            if _carries(module, inputs, output):
                carries.add(name)

        return hook

    def given(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        tokens.update(name for name, value in kwargs.items() if value is ids)

    def measure(module: nn.Module, inputs: Any, output: Any) -> None:
        several = isinstance(output, (tuple, list))
        lengths.add(len(output) if several else 0)
        hidden = output[0] if several else output
        streams.add(_streams(hidden, width))

    children = _around(decoder, layers_name)
    for name, child in children.items():
        hooks.append(child.register_forward_hook(watch(name)))
    called: set[nn.Module] = set()
    for module in layers.modules():
        hooks.append(module.register_forward_hook(lambda module, *_: called.add(module)))
    for index, layer in enumerate(layers):
        hooks.append(layer.register_forward_hook(watch(f"<{index}>")))
        hooks.append(layer.register_forward_hook(measure))
        hooks.append(layer.register_forward_pre_hook(given, with_kwargs=True))
    with torch.no_grad():
        model(input_ids=ids, position_ids=torch.arange(ids.shape[1]).unsqueeze(0), use_cache=False)
    for handle in hooks:
        handle.remove()

    ran = [name for name in order if name.startswith("<")]
    if ran != [f"<{index}>" for index in range(len(layers))]:
        raise ModelError(f"{kind!r} does not run each of its layers once, in order")
    if len(lengths) != 1:
        raise ModelError(f"the layers of {kind!r} return tuples of different lengths")
    first, last = order.index(ran[0]), order.index(ran[-1])
    before = [
        n for n in dict.fromkeys(order[:first]) if n in carries and not _serves(children[n], width)
    ]
    after = [n for n in dict.fromkeys(order[last + 1 :]) if n in carries]
    both = set(before) & set(after)
    # What holds no parameters belongs to no stage: each runs it, and nobody looks at the result.
    owned = {name for name in both if _has_parameters(children[name])}
    before, after = ([n for n in names if n not in both - owned] for names in (before, after))
    if both := owned:
        raise ModelError(f"{kind!r} runs its {both.pop()} before its layers and again after them")
    embedding = model.get_input_embeddings()
    positions = [
        n for n in before if isinstance(children[n], nn.Embedding) and children[n] is not embedding
    ]

    def full(found: list[str]) -> tuple[str, ...]:
        return tuple(f"{path}.{name}" if path else name for name in found)

    number, flat_streams = max(streams)
    try:
        saved = saving(proxy, whole, full([layers_name])[0])
    except Exception as error:  # it runs, as was seen, but does not train: nothing is known
        raise_if_exhausted(error)
        saved = {}
    return StagePlan(
        decoder=path,
        layers=full([layers_name])[0],
        num_layers=_num_layers(whole, full([layers_name])[0], kind),
        before=full(before),
        positions=full(positions),
        after=full(after),
        head=_head(model, path),
        returns_tuple=lengths.pop(),
        streams=number,
        flat_streams=flat_streams,
        tokens=min(tokens, default=""),
        overwrites=any(tensor._version > version for tensor, version in embedded),
        **saved,
        chosen={**_idle(layers, full([layers_name])[0], called), **expert_shares(whole)},
    )


def _idle(layers: nn.ModuleList, name: str, called: set[nn.Module]) -> dict[str, float]:
    """Modules of layers that compute nothing, in which none is called (BART's attention to an
    encoder), to the share of tokens that reach them."""
    found = {}
    for path, module in layers.named_modules():
        inside = list(module.children())
        if (
            path
            and inside
            and not isinstance(module, nn.ModuleList)
            and not called & {*module.modules()}
        ):
            found[f"{name}.{path}"] = 0.0
    return folded(found)


def _streams(hidden: Any, width: int) -> tuple[int, bool]:
    """(streams of a layer's output, whether they lie side by side), for a hidden size of `width`;
    0 for one stream."""
    if not isinstance(hidden, torch.Tensor):
        return 0, False
    if hidden.ndim == 4:
        return hidden.shape[2], False
    more, rest = divmod(hidden.shape[-1], width)
    return (more, True) if hidden.ndim == 3 and more > 1 and not rest else (0, False)


def _decoder(model: Any) -> nn.Module:
    """The module whose forward runs the layers."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    if decoder is None or decoder is model:
        decoder = getattr(model, model.base_model_prefix, model)
    inner = getattr(decoder, "get_decoder", lambda: None)()
    return inner if isinstance(inner, nn.Module) else decoder


def handed_on(model: nn.Module, layers: str, run: Callable[[], Any]) -> str:
    """What layers are given next to the hidden state that has been computed from weights, or by a
    layer before them: why a cut changes the result, if it does; empty where that is nothing.

    Args:
        model: the whole model.
        layers: name of its list of layers.
        run: runs the model once.
    """
    own = {id(parameter) for parameter in model.parameters()}
    found: list[str] = []
    made: list[torch.Tensor] = []  # held, so that no other tensor takes its identity

    def keep(layer: nn.Module, args: Any, output: Any) -> None:
        several = isinstance(output, (tuple, list))
        parts = output[1:] if several else getattr(output, "__dict__", {}).values()
        made.extend(part for part in parts if isinstance(part, torch.Tensor))

    def look(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = {**{f"argument {i + 1}": a for i, a in enumerate(args) if i}, **kwargs}
        if not args:
            named.pop("hidden_states" if "hidden_states" in kwargs else next(iter(kwargs)), None)
        for name, value in named.items():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if not isinstance(part, torch.Tensor):
                    continue
                if own & set(leaves(part)) or any(part is other for other in made):
                    found.append(name)

    hooks = []
    for layer in model.get_submodule(layers).children():
        hooks.append(layer.register_forward_pre_hook(look, with_kwargs=True))
        hooks.append(layer.register_forward_hook(keep))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return f"its layers hand on more than the hidden state ({found[0]})" if found else ""


def _layers(model: Any, count: int) -> tuple[nn.Module, str, nn.ModuleList]:
    """(decoder, name of its layers in it, the layers): a list of `count` modules that the decoder
    holds or, as in BERT, that an encoder inside it does.

    The decoder is then the innermost module around the list that is given its input by embedding.

    Raises:
        ModelError: there is no such list.
    """
    decoder = _decoder(model)
    for name, child in decoder.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == count:
            return decoder, name, child
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count and _has_parameters(module)
    ]
    if found:
        name, layers = min(found, key=lambda each: each[0].count("."))
        parts = name.split(".")
        for depth in reversed(range(len(parts))):
            around = model.get_submodule(".".join(parts[:depth]))
            if "inputs_embeds" in inspect.signature(around.forward).parameters:
                return around, ".".join(parts[depth:]), layers
    raise ModelError(
        f"{model.config.model_type!r} keeps its layers in no single list, so it cannot be cut"
    )


def _around(decoder: nn.Module, layers: str) -> dict[str, nn.Module]:
    """The modules outside the way from the decoder to its layers, by name."""
    found = {}
    parts = layers.split(".")
    for depth, part in enumerate(parts):
        parent = ".".join(parts[:depth])
        for name, child in decoder.get_submodule(parent).named_children():
            if name != part:
                found[f"{parent}.{name}" if parent else name] = child
    return found


def _carries(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> bool:
    """Whether the hidden state passes through a module; rotary tables only serve the layers.

    A norm may have no parameters (OLMo): it is known by what goes in and comes out.
    """
    if isinstance(module, nn.Dropout) or _has_parameters(module):
        return True
    given = inputs[0] if inputs else None
    return (
        isinstance(given, torch.Tensor)
        and isinstance(output, torch.Tensor)
        and given.is_floating_point()
        and given.ndim == 3
        and given.shape == output.shape
    )


def _serves(module: nn.Module, width: int) -> bool:
    """Whether a module is a table for the layers (rotary sines as a frozen embedding, RoFormer's):
    it adds nothing to the hidden state of `width`, and every stage looks it up."""
    return (
        isinstance(module, nn.Embedding)
        and module.embedding_dim != width
        and not module.weight.requires_grad
    )


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _head(model: nn.Module, path: str) -> tuple[str, ...]:
    """Modules outside the decoder's path that hold parameters: the output head."""
    found = []
    names = path.split(".") if path else []
    for depth in range(len(names)):
        parent = ".".join(names[:depth])
        for name, child in model.get_submodule(parent).named_children():
            if name != names[depth] and _has_parameters(child):
                found.append(f"{parent}.{name}" if parent else name)
    return tuple(found)


def _num_layers(whole: nn.Module, name: str, kind: str) -> int:
    layers = whole.get_submodule(name)
    if not isinstance(layers, nn.ModuleList):
        raise ModelError(f"{kind!r} keeps its layers in no list, so it cannot be cut")
    return len(layers)
