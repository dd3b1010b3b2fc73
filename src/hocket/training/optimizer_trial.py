"""Optimizer trial: whether an optimizer steps shards as it steps the whole tensors they are of.

SGD, Adam and Lion treat every element by itself. Adafactor's factored moments, Muon's matrices and
the trust ratios of LAMB are of whole tensors, and some optimizers estimate one number from all of
them: over tp, ep or ZeRO they would compute something else, without an error. So a new optimizer of
the same class and options takes two steps on small tensors, whole and cut in the way that this
rank's are, before the first step of the real one.

    optimizer.step() -> the hook, once an optimizer -> for each way of cutting: two trials, compared
"""

from __future__ import annotations

import dataclasses
import inspect
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hocket.spec.errors import OptionError

if TYPE_CHECKING:
    from hocket.spec.placement import Placement
    from hocket.training.parallel_model import ParallelModel

TOLERANCE = 1e-2
"""Largest difference of two steps, in units of a step. Rounding is below it, moments in 8 bits
included; factored moments, trust ratios and norms are far above."""
LARGEST = 128
"""Elements of a trial tensor in its last two dims, at most: some optimizers factor large matrices
alone. 2 in the dims before them, which are of experts."""
RATE = 1e-3
STEPS = 2


@dataclasses.dataclass(frozen=True)
class ShardCut:
    """How this rank's shard was cut out of a parameter.

    Attributes:
        shape: of the parameter, made smaller.
        dims: those of which ranks have parts.
        flat: what is stepped is a part of the flattened shard (ZeRO).
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    flat: bool

    @classmethod
    def of(cls, placement: Placement, stepped: Tensor) -> ShardCut:
        """Of what is stepped of one parameter."""
        whole, local = placement.shape, placement.local_shape
        dims = tuple(d for d, size in enumerate(whole) if local[d] < size)
        small = [min(n, LARGEST if d >= len(whole) - 2 else 2) for d, n in enumerate(whole)]
        shape = tuple(n // 2 * 2 if d in dims else n for d, n in enumerate(small))
        return cls(shape, dims, flat=tuple(stepped.shape) != local)

    def shards(self, tensor: Tensor) -> list[Tensor]:
        """A trial tensor's shards, as new tensors."""
        parts = [tensor]
        for dim in self.dims:
            parts = [half for part in parts for half in part.chunk(2, dim)]
        if self.flat:
            parts = [half for part in parts for half in _halves(part.reshape(-1))]
        return [part.clone() for part in parts]


def watch(parallel: ParallelModel) -> None:
    """Try every optimizer that steps tensors of `parallel`, before its first step; until
    `parallel` is gone."""
    model = weakref.ref(parallel)
    tried: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        here = model()
        if here is not None and optimizer not in tried:
            tried.add(optimizer)
            apart = here.layout.pp > 1 or bool(here.layout.zero)
            require_equal_step(
                optimizer, here.named_stepped(), here.placements, str(here.layout), apart=apart
            )

    handle = register_optimizer_step_pre_hook(before_step)
    weakref.finalize(parallel, handle.remove)


def require_equal_step(
    optimizer: torch.optim.Optimizer,
    stepped: Iterable[tuple[str, Tensor]],
    placements: Mapping[str, Placement],
    layout: str,
    *,
    apart: bool,
) -> None:
    """Raises OptionError where a step of shards differs from that of whole tensors; warns where
    that cannot be tried.

    Args:
        optimizer: as its owner made it; it is left as it is.
        stepped: tensors of the model on this rank, by global name.
        placements: of parameters, by global name.
        layout: for the message.
        apart: other ranks step other parameters.
    """
    names = {id(tensor): name for name, tensor in stepped}
    for group in optimizer.param_groups:
        mine = [tensor for tensor in group["params"] if id(tensor) in names]
        cuts = {ShardCut.of(placements[names[id(tensor)]], tensor) for tensor in mine}
        for cut in {ShardCut((8, 8), (), False)} | cuts if mine and apart else cuts:
            if cut.dims or cut.flat or apart:
                _try(optimizer, group, cut, mine[0].device, layout)


def _try(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    cut: ShardCut,
    device: torch.device,
    layout: str,
) -> None:
    kind = type(optimizer).__name__
    reason: Exception | None = None
    for dtype in (torch.float64, torch.float32):
        # Weights far smaller than gradients, so that decay is not most of a step.
        scales = [1e-2, 4e-2, *(4.0**number for number in range(2 * STEPS))]
        values = [_values(cut.shape, scale, device, dtype) for scale in scales]
        tensors, gradients = values[:2], values[2:]
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
            try:
                whole = _stepped(optimizer, group, [tensors], [gradients])
            except Exception as error:  # it is the user's class: anything may be raised
                reason = error
                continue
            parts = [list(map(cut.shards, each)) for each in (tensors, gradients)]
            count = len(parts[0][0])
            pieces = [
                [[some[n] for some in of[tensor::2]] for tensor in range(2) for n in range(count)]
                for of in parts
            ]
            try:
                shards = _stepped(optimizer, group, *pieces)
            except Exception as error:
                raise _rejected(kind, layout, f"fails on them: {error}") from error
        expected = torch.cat([p.reshape(-1) for each in map(cut.shards, whole) for p in each])
        before = torch.cat([p.reshape(-1) for each in map(cut.shards, tensors) for p in each])
        found = torch.cat([p.reshape(-1) for p in shards])
        length = float((expected - before).norm())
        difference = float((found - expected).norm()) / length if length else 0.0
        if not difference <= TOLERANCE:
            raise _rejected(kind, layout, f"differs by {difference:.0%} from that of whole ones")
        return
    warnings.warn(
        f"whether {kind} steps shards of {layout} as it steps whole tensors could not be tried: "
        f"{type(reason).__name__}: {reason}",
        stacklevel=4,
    )


def _rejected(kind: str, layout: str, why: str) -> OptionError:
    return OptionError(
        f"{kind} computes from whole tensors, or from several at once; with {layout} this rank "
        f"has shards, and its step {why}",
        hint="torch.optim.AdamW(parallel.parameters(), lr=1e-4), or parallelize(model, "
        "Layout(dp=WORLD_SIZE))",
    )


def _stepped(
    optimizer: torch.optim.Optimizer,
    group: Mapping[str, Any],
    tensors: Sequence[Sequence[Tensor]],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """Tensors after STEPS steps, each row of them by an optimizer of its own. `gradients`: of each
    row those of the first step, then those of the second."""
    found = []
    for row, given in zip(tensors, gradients, strict=True):
        parameters = [torch.nn.Parameter(tensor.clone()) for tensor in row]
        other = _another(optimizer, group, parameters)
        for step in range(STEPS):
            some = given[step * len(row) : (step + 1) * len(row)]
            for parameter, gradient in zip(parameters, some, strict=True):
                parameter.grad = gradient.clone()
            other.step(*_closure(other))
        found += [parameter.detach() for parameter in parameters]
    return found


def _another(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameters: list[torch.nn.Parameter]
) -> Any:
    """A new optimizer of the same class and options over other tensors."""
    accepted = inspect.signature(type(optimizer)).parameters
    every = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted.values())
    options = {k: v for k, v in optimizer.defaults.items() if every or k in accepted}
    other = type(optimizer)(parameters, **options)
    for own in other.param_groups:
        own.update({k: v for k, v in group.items() if k != "params"})
        if own.get("lr") is not None:  # zero at the beginning of a warm-up
            own["lr"] = torch.full_like(own["lr"], RATE) if isinstance(own["lr"], Tensor) else RATE
    return other


def _closure(optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """The argument of `step` of an optimizer that evaluates the loss by itself (LBFGS)."""
    given = inspect.signature(type(optimizer).step).parameters.get("closure")
    if given is not None and given.default is inspect.Parameter.empty:
        yield lambda: torch.ones(())


def _values(
    shape: tuple[int, ...], scale: float, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Random values whose scale differs along every dim, so that halves differ from wholes."""
    generator = torch.Generator().manual_seed(int(1000 * scale))
    values = torch.randn(shape, generator=generator, dtype=dtype) * scale
    for dim, size in enumerate(shape):
        slope = torch.logspace(-1, 1, size, dtype=dtype)
        values *= slope.reshape(-1, *[1] * (len(shape) - dim - 1))
    return values.to(device)


def _halves(flat: Tensor) -> Sequence[Tensor]:
    middle = 3 * flat.numel() // 7
    return (flat[:middle], flat[middle:]) if middle else (flat,)
