"""Running a model once on fake tensors: its embedding, one block of each kind, its head."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.nn import functional

from hocket.models import skeleton
from hocket.models.cores import watched
from hocket.models.failure import raise_if_exhausted
from hocket.models.lora import is_linear
from hocket.models.plans.pairs import leaves
from hocket.models.rows import one_sequence_each
from hocket.models.trace.grouped import GroupedProducts
from hocket.models.trace.record import (
    PRIMES,
    SHORTER,
    OpRecorder,
    TracedKernels,
    TracedPart,
    TracedSize,
    WrittenOut,
)
from hocket.spec.errors import ModelError

_OWN = ("idx", "layer_i", "layer_n", "training")
"""Parts of attribute names that say which layer a module is, not what it does."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
_OFFSET = 2
"""Positions that some families leave out, before the first."""


@dataclasses.dataclass
class Run:
    """What was recorded: the parts, the values, and the model they are of.

    `kinds` maps every layer to the first layer that is like it; `linear` are the names of the
    linear layers. `asks`: whether modules ask transformers for their attention.
    """

    model: nn.Module
    layers: str
    kinds: tuple[int, ...]
    parts: dict[str, TracedPart]
    recorder: OpRecorder
    leaves: frozenset[str]
    linear: frozenset[str]
    asks: bool


def run_trace(
    config: Any,
    dtype: torch.dtype = torch.bfloat16,
    *,
    frozen: bool = False,
    traced: TracedSize | None = None,
) -> Run:
    """Build the model on fake tensors (real sizes, no memory) and run what differs once.

    `traced`: rows and tokens; None: prime numbers, and where the model has fewer positions or masks
    than that, as many as it has.

    Raises:
        ModelError: as `_run`.
    """
    if traced is not None:
        return _run(config, dtype, frozen, traced)
    try:
        return _run(config, dtype, frozen, PRIMES)
    except WrittenOut:
        raise
    except ModelError:
        positions = min((n for n in _positions(config)), default=PRIMES.sequence)
        shorter = next((n for n in SHORTER if n + _OFFSET <= positions), None)
        if positions > PRIMES.sequence or shorter is None:
            raise
        return _run(config, dtype, frozen, TracedSize(sequence=shorter))


def _positions(config: Any) -> list[int]:
    """Numbers of positions, by the names that families have for them."""
    values = config.to_dict()
    return [values[name] for name in _POSITIONS if isinstance(values.get(name), int)]


def _run(config: Any, dtype: torch.dtype, frozen: bool, traced: TracedSize) -> Run:
    """As `run_trace`, at one size.

    `dtype` is that of its weights: what a model casts to fp32 and back costs nothing in fp32. Where
    it is `frozen`, no weight has a gradient.

    Raises:
        ModelError: the model cannot be built, keeps its layers in no single list, or does
            something that depends on the values of its tensors.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model = skeleton.build_skeleton(config, dtype=dtype, device="cpu").train()
        model.requires_grad_(not frozen)
    name, layers = _layers(model, int(config.num_hidden_layers))
    kinds = _kinds(layers)
    picked = sorted(set(kinds))
    parameters = dict(model.named_parameters())
    routed, idle = getattr(config, "n_routed_experts", 0), getattr(config, "zero_expert_num", 0)
    computed = routed / (routed + idle) if idle else 1.0
    recorder = OpRecorder(parameters, traced, buffers=list(model.buffers()), computed=computed)
    parts = {"embedding": recorder.part, "head": TracedPart(traced)}
    parts |= {str(index): TracedPart(traced) for index in picked}
    following = _Layers(recorder, parts, layers, kinds)
    prefixes = {f"{name}.{index}" for index in picked}
    try:
        watch = _watched(model, name, prefixes, recorder)
        products = GroupedProducts()  # type: ignore[no-untyped-call]
        with fake, products, one_sequence_each(), watch, following, recorder:
            with (
                watched() as asked,
                TracedKernels(recorder, asked),
                torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor),
            ):
                ids = torch.zeros(traced.rows, traced.sequence, dtype=torch.long)
                logits = model(input_ids=ids, use_cache=False).logits
                recorder.path.append("loss")
                width = logits.shape[-1]
                loss = functional.cross_entropy(logits.float().view(-1, width), ids.view(-1))
                recorder.path.pop()
            following.close(loss)
    except ModelError:
        raise
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        read: Any = error.func
        raise ModelError(
            f"how much {config.model_type!r} computes depends on values: "
            f"{recorder.path[-1] or 'its forward'} reads them ({read.name()})",
            hint="it runs, without a prediction: hocket train MODEL --layout LAYOUT",
        ) from error
    except Exception as error:  # the forward of any family may fail in its own way
        raise_if_exhausted(error)
        raise ModelError(
            f"{config.model_type!r} fails in {str(dtype).removeprefix('torch.')} on {traced.rows} "
            f"sequences of {traced.sequence} tokens: {type(error).__name__}: "
            f"{str(error).splitlines()[0] if str(error) else ''}"
        ) from error
    return Run(
        model=model,
        layers=name,
        kinds=kinds,
        parts=parts,
        recorder=recorder,
        leaves=frozenset(n for n, m in model.named_modules() if not any(m.children())),
        linear=frozenset(n for n, m in model.named_modules() if is_linear(m)),
        asks=bool(asked),
    )


class _Layers:
    """Replaces the layers' forwards: the first of each kind is recorded, the others are passed.

    Every recorded part is cut from the one before it, so that its backward is its own.
    """

    def __init__(
        self,
        recorder: OpRecorder,
        parts: dict[str, TracedPart],
        layers: nn.ModuleList,
        kinds: tuple[int, ...],
    ) -> None:
        self.recorder, self.parts, self.layers, self.kinds = recorder, parts, layers, kinds
        self.seen: Any = None
        self.last: torch.Tensor | None = None

    def __enter__(self) -> _Layers:
        for index, layer in enumerate(self.layers):
            layer.forward = (
                self._recorded(index, layer.forward)
                if self.kinds[index] == index
                else self._passed(index)
            )
        return self

    def __exit__(self, *error: object) -> None:
        for layer in self.layers:
            layer.__dict__.pop("forward", None)

    def _recorded(self, index: int, forward: Any) -> Any:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            hidden, put = _hidden(args, kwargs)
            if index == 0:
                self._finish("embedding", hidden, None)
            part = self.parts[str(index)]
            self.recorder.part = part
            given = self._fresh(hidden)
            part.inputs = [self.recorder.ref(given)]
            args, kwargs = put(given)
            args = tuple(_cut(value, given) for value in args)
            kwargs = {key: _cut(value, given) for key, value in kwargs.items()}
            result = forward(*args, **kwargs)
            self.seen = result
            output = result[0] if isinstance(result, (tuple, list)) else result
            self._finish(str(index), output, given)
            fresh = self._start_head(index, output)
            return (fresh, *result[1:]) if isinstance(result, (tuple, list)) else fresh

        return replacement

    def _passed(self, index: int) -> Any:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            hidden, _ = _hidden(args, kwargs)
            fresh = self._start_head(index, hidden)
            if isinstance(self.seen, (tuple, list)):
                return (fresh, *(None for _ in self.seen[1:]))
            return fresh

        return replacement

    def _fresh(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of its own storage, cut from what came before."""
        self.recorder.paused = True
        fresh = torch.empty_like(tensor).requires_grad_()
        self.recorder.paused = False
        self.recorder.ref(fresh)
        return fresh

    def _start_head(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        if index != len(self.layers) - 1:
            return tensor.detach()
        self.recorder.part = self.parts["head"]
        self.last = self._fresh(tensor)
        self.recorder.part.inputs = [self.recorder.ref(self.last)]
        return self.last

    def _finish(self, name: str, output: torch.Tensor, given: torch.Tensor | None) -> None:
        """Run the backward of the part that ends with `output`."""
        recorder = self.recorder
        part = self.parts[name]
        part.outputs = [recorder.ref(output)]
        if not output.requires_grad:  # a frozen embedding
            return
        wanted = [given] if given is not None else []
        # Gradients of what the part used; what it did not is None.
        wanted += [p for p in leaves(output).values() if isinstance(p, nn.Parameter)]
        if not wanted:
            raise ModelError(
                f"the {name} hands on what no recorded operation made: its layers run without a "
                "graph, and again in backward"
            )
        recorder.paused = True
        ahead = torch.empty_like(output)
        recorder.paused = False
        recorder.ref(ahead)
        recorder.in_backward = True
        try:
            made = torch.autograd.grad(output, wanted, ahead, allow_unused=True, retain_graph=True)
        finally:
            recorder.in_backward = False
        of_weights = made if given is None else made[1:]
        part.weight_gradients = {
            recorder.ref(grad).value for grad in of_weights if grad is not None
        }

    def close(self, loss: torch.Tensor) -> None:
        self._finish("head", loss, self.last)


def _cut(value: Any, given: torch.Tensor) -> Any:
    """An argument without the graph it was made in, so that a block's backward ends there."""
    if isinstance(value, torch.Tensor) and value is not given:
        return value.detach()
    if type(value) is tuple:
        return tuple(_cut(item, given) for item in value)
    return value


def _hidden(args: Any, kwargs: Any) -> tuple[torch.Tensor, Any]:
    """The hidden state among a layer's arguments, and how to put another in its place."""
    if args and isinstance(args[0], torch.Tensor):
        return args[0], lambda new: ((new, *args[1:]), kwargs)
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim == 3:
            return value, lambda new, key=key: (args, {**kwargs, key: new})
    raise ModelError("a layer is given no hidden state")


def _layers(model: nn.Module, count: int) -> tuple[str, nn.ModuleList]:
    """The list of layers: as long as the configuration says, or else where most weights are."""
    lists = [
        (name, module, _size(module))
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
    ]
    fits = [found for found in lists if len(found[1]) == count and found[2]]
    if fits:
        name, layers, _ = max(fits, key=lambda found: (-found[0].count("."), found[2]))
        return name, layers
    top = [f for f in lists if not any(f[0].startswith(f"{other[0]}.") for other in lists)]
    largest = max(top, key=lambda found: found[2], default=None)
    if largest is None or largest[2] < 0.9 * sum(found[2] for found in top):
        raise ModelError("its layers are in no single list, so they cannot be distinguished")
    return largest[0], largest[1]


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _kinds(layers: nn.ModuleList) -> tuple[int, ...]:
    """For each layer the first that has the same modules, sizes and switches, and the same
    parameters shared with layers before it (Zamba's attention), which those hold."""
    first: dict[Any, int] = {}
    known: set[int] = set()
    found = []
    for index, layer in enumerate(layers):
        found.append(first.setdefault(_signature(layer, known), index))
        known |= {id(parameter) for parameter in layer.parameters()}
    return tuple(found)


def _signature(layer: nn.Module, known: set[int]) -> Any:
    found: list[Any] = []
    for name, module in layer.named_modules():
        plain = tuple(
            (key, value)
            for key, value in vars(module).items()
            if isinstance(value, (int, str, type(None)))
            and not key.startswith("_")
            and not any(part in key for part in _OWN)
        )
        sizes = tuple(
            (n, tuple(p.shape), id(p) in known) for n, p in module.named_parameters(recurse=False)
        )
        found.append((name, type(module), plain, sizes))
    return tuple(found)


@contextlib.contextmanager
def _watched(
    model: nn.Module, layers: str, picked: set[str], recorder: OpRecorder
) -> Iterator[None]:
    """Keep the name of the running module, of all modules but the layers that are passed."""
    hooks = []
    for name, module in model.named_modules():
        inside = name.startswith(f"{layers}.")
        if inside and ".".join(name.split(".")[: layers.count(".") + 2]) not in picked:
            continue

        def enter(module: nn.Module, args: Any, name: str = name) -> None:
            recorder.path.append(name)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            recorder.path.pop()

        hooks.append(module.register_forward_pre_hook(enter))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
