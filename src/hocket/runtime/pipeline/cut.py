"""Cut one pipeline stage out of any module.

The module keeps its own `forward` and all its names; what the stage does not own is replaced by
something that lets the hidden state through unchanged:

    foreign layers                       `MissingLayer`: hands the hidden state on
    final norm, head                     `Missing`, the same, on earlier stages
    embedding, its norm and dropout      `Missing`, on later stages
    additive position embeddings         `ZeroPositions`: contributes 0, on later stages

so that the whole model's code runs on every stage and parameter names stay those of a checkpoint.

Where the hidden state comes from another stage it takes the place of what reaches the first own
layer, and where it goes to another stage it is taken from behind the last one (`taps`): what a
model computes before and after its layers without a module, a scaled embedding or a norm that is
a function, cannot happen twice.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hocket.spec.cut import matmul_cost, stage_layers
from hocket.spec.errors import ModelError
from hocket.spec.plan import StagePlan

_SIMPLE = (int, float, str, bool, type(None), torch.dtype)


class Missing(nn.Module):
    """Stands for a module of another stage: returns the hidden state it is given.

    Simple attributes of the real module (an attention type, a size, the dtype of its weight) stay
    readable, because some models read them off their layers and norms.
    """

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        _carry_over(real, self)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _hidden(args, kwargs)


class MissingLayer(Missing):
    """Stands for a layer of another stage; two of them are where the hidden state comes and goes.

    If the real layer returned a tuple of `returns_tuple` entries, so does this one, the others
    being None.

    Attributes:
        entering: returned, once, in place of what is given.
        leaves: whether what is given is kept in `left`, until it is asked for.
    """

    entering: Tensor | None
    left: Any

    def __init__(self, real: nn.Module, returns_tuple: int = 0) -> None:
        super().__init__(real)
        self._returns_tuple = returns_tuple
        self.leaves = False
        self.entering = self.left = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = _hidden(args, kwargs)
        if self.entering is not None:
            hidden, self.entering = self.entering, None
        if self.leaves:
            self.left = hidden
        if not self._returns_tuple:
            return hidden
        return (hidden, *[None] * (self._returns_tuple - 1))

    def take(self) -> Any:
        """What was given last."""
        left, self.left = self.left, None
        return left


class ZeroPositions(nn.Module):
    """Stands for an additive position embedding on a later stage, where it was added already."""

    def __init__(self, real: nn.Module) -> None:
        super().__init__()
        _carry_over(real, self)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                return torch.zeros((), device=value.device)
        return torch.zeros(())


def _hidden(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The hidden state among a module's arguments: the first of its kind, else the first."""
    given = [*args, *kwargs.values()]
    for value in given:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim >= 3:
            return value
    return given[0]


def _carry_over(real: nn.Module, stand_in: nn.Module) -> None:
    # What a model's own class holds for all of its layers, then what this one holds itself.
    kinds = [kind for kind in type(real).__mro__ if issubclass(kind, nn.Module)]
    own = kinds[: kinds.index(nn.Module)]
    shared = {name: value for kind in reversed(own) for name, value in vars(kind).items()}
    for name, value in {**shared, **vars(real)}.items():
        if not name.startswith("_") and isinstance(value, _SIMPLE):
            setattr(stand_in, name, value)
    for name, parameter in real.named_parameters(recurse=False):
        # Of a weight only the dtype is read; an empty tensor owns nothing.
        stand_in.__dict__[name] = torch.empty(0, dtype=parameter.dtype)


class Tap:
    """Where the hidden state comes in or goes out at a real layer, in a stage whose neighbours
    hold none: the first, or the last, of all layers is then this stage's own."""

    def __init__(self) -> None:
        self.entering: Tensor | None = None
        self.left: Any = None

    def enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A hook before the first layer."""
        if self.entering is None:
            return None
        given, entering, self.entering = _hidden(args, kwargs), self.entering, None
        kept = tuple(entering if value is given else value for value in args)
        return kept, {k: entering if value is given else value for k, value in kwargs.items()}

    def leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """A hook behind the last layer."""
        self.left = output[0] if isinstance(output, (tuple, list)) else output

    def take(self) -> Any:
        """What came out last."""
        left, self.left = self.left, None
        return left


def taps(
    module: nn.Module, plan: StagePlan, *, first: bool, last: bool
) -> tuple[MissingLayer | Tap | None, MissingLayer | Tap | None]:
    """(where the hidden state of a cut stage comes in, where it goes out); None on the first
    (the last) stage.
    """
    layers = list(_find(module, plan.layers).children())
    held = [i for i, layer in enumerate(layers) if not isinstance(layer, MissingLayer)]
    # A stage without a layer of its own has the whole list before it, or behind it.
    none = (0, 0) if first else (len(layers), len(layers))
    start, stop = (held[0], held[-1] + 1) if held else none
    coming: MissingLayer | Tap | None = None
    going: MissingLayer | Tap | None = None
    if not first and start:
        coming = _stand_in(layers[start - 1])
    elif not first:
        coming = Tap()
        layers[0].register_forward_pre_hook(coming.enter, with_kwargs=True)
    if not last and stop < len(layers):
        going = _stand_in(layers[stop])
        going.leaves = True
    elif not last:
        going = Tap()
        layers[-1].register_forward_hook(going.leave)
    return coming, going


def _stand_in(layer: nn.Module) -> MissingLayer:
    assert isinstance(layer, MissingLayer)
    return layer


def cut(module: nn.Module, plan: StagePlan, bounds: Sequence[int], stage: int) -> nn.Module:
    """The part of `module` that `stage` owns, under the whole model's names.

    Foreign modules are never copied, so that cutting a model on the meta device costs no memory
    and little time. On a real module the owned parameters are the module's own, not copies,
    except that a later stage copies one that it shares with another stage (a tied head).

    Args:
        module: the whole model, on the meta device or real.
        plan: what may be cut.
        bounds: layers per stage.
        stage: which one.

    Raises:
        ModelError: the plan names a module that the model does not have.
    """
    num_stages = len(bounds)
    assert 0 <= stage < num_stages, (stage, num_stages)
    assert sum(bounds) == plan.num_layers, (bounds, plan.num_layers)
    if num_stages == 1:
        return module
    first, last = stage == 0, stage == num_stages - 1
    layers = _find(module, plan.layers)
    if not isinstance(layers, nn.ModuleList) or len(layers) != plan.num_layers:
        raise ModelError(
            f"{plan.layers} is not a list of {plan.num_layers} layers, but {type(layers).__name__}"
        )
    owned = stage_layers(bounds, stage)
    # deepcopy takes what stands in its memo instead of copying it.
    memo: dict[int, Any] = {}
    for index, layer in enumerate(layers):
        if index not in owned:
            memo[id(layer)] = MissingLayer(layer, plan.returns_tuple)
    if not first:
        for name in plan.before:
            real = _find(module, name)
            positions = name in plan.positions
            memo[id(real)] = ZeroPositions(real) if positions else Missing(real)
    if not last:
        for name in (*plan.after, *plan.head):
            real = _find(module, name)
            memo[id(real)] = Missing(real)
    kept = _reached(module, memo)
    inside = {id(p) for m in kept for p in m.parameters(recurse=False)}
    for kept_module in kept:
        for tensor in (
            *kept_module.parameters(recurse=False),
            *kept_module.buffers(recurse=False),
        ):
            memo[id(tensor)] = tensor
    # A tie across stages becomes two tensors; the first stage keeps the module's own.
    for parameter in _shared(module, memo, inside) if not first else ():
        memo[id(parameter)] = nn.Parameter(
            parameter.detach().clone(), requires_grad=parameter.requires_grad
        )
    return copy.deepcopy(module, memo)


def _find(module: nn.Module, name: str) -> nn.Module:
    try:
        return module.get_submodule(name)
    except AttributeError:
        raise ModelError(f"the model has no module {name!r} that its plan names") from None


def _reached(module: nn.Module, memo: Mapping[int, Any]) -> list[nn.Module]:
    """The modules that stay: all that is reached without passing a replaced one."""
    found = [module]
    for child in module.children():
        if id(child) not in memo:
            found += _reached(child, memo)
    return found


def _shared(module: nn.Module, memo: Mapping[int, Any], inside: set[int]) -> list[nn.Parameter]:
    """Owned parameters that a replaced module holds too: a tie across stages."""
    outside: dict[int, nn.Parameter] = {}
    for each in module.modules():
        if isinstance(memo.get(id(each)), nn.Module):
            for parameter in each.parameters():
                outside[id(parameter)] = parameter
    return [p for key, p in outside.items() if key in inside]


def cut_costs(module: nn.Module, plan: StagePlan, *, cuda: bool) -> dict[str, Any]:
    """What `spec.cut.choose_cut` needs, counted on the whole model: arguments by name.

    A layer costs a token's time in its matrices (`spec.cut.matmul_cost`): of experts, in those that
    its router chooses. So does the head, tied or not; an embedding is a lookup and costs nothing.
    """

    def cost(root: str) -> float:
        return sum(
            _cost(parameter, plan.share_of(f"{root}.{name}"), cuda)
            for name, parameter in _find(module, root).named_parameters()
        )

    layers = _find(module, plan.layers)
    return {
        "layer_costs": [cost(f"{plan.layers}.{name}") for name, _ in layers.named_children()],
        "after_cost": sum(cost(name) for name in (*plan.after, *plan.head)),
    }


def _cost(parameter: Tensor, share: float | None, cuda: bool) -> float:
    if parameter.ndim == 3 and share is not None:  # a matrix of each expert
        experts, n, k = parameter.shape
        return matmul_cost(n, k, experts * share, cuda=cuda)
    if parameter.ndim != 2:  # of a norm, a bias, a convolution of each channel
        return 0.0
    n, k = parameter.shape
    return matmul_cost(n, k, 1.0 if share is None else share, cuda=cuda)
