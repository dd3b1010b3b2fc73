"""Products: of few rows, by torch or by the kernel, whichever was faster here.

A step of decoding multiplies as many rows as requests run. The library for whole matrices, made
for many rows, then moves the weight through memory twice or copies it into blocks of its own; the
kernel reads it once, and is over when the last of it has come:

    rows          1     2     4     8    11    16    32    64
    torch      19.2  27.5  34.5  43.8  49.9  52.3  60.2  60.2   ms, 302 MB of weights in fp32, one
    kernel     19.5  19.2  19.9  20.2  20.9  23.1  35.4  65.2   thread of an Intel Xeon with AVX-512

    in bfloat16, under fp32 (`engine.half`):
    torch      19.1  19.3  19.0  19.7     -  20.5  23.6  34.7   ms, 151 MB; the same processor,
    kernel      9.2   9.6  11.3  11.8     -  11.7  13.8  20.3   which has matrix tiles

On another processor, or with more threads, it may be otherwise, so both are timed once: for each
shape of weight, at the numbers of rows above which the choice may change.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hocket.runtime.native.kernels import CpuKernels
from hocket.runtime.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from hocket.serving.engine.projections import Merged, MergedLinear

MOST_ROWS = 64
"""Of more rows, products are the library's."""
_LEAST_OUTPUTS = {torch.float32: 16, torch.bfloat16: 32}
_ROWS = tuple(2**power for power in range(MOST_ROWS.bit_length()))
"""Tried; a number between is decided as the next."""
_TRIALS = 5
_TRIED_WEIGHTS = 1 << 24
"""In a trial, together: they must come from memory, as in a step."""
_MOST_OF_ONE = 1 << 22
_TIE = 1.03
"""Times as long as torch that the kernel may take: it sums more exactly, and ties are settled the
same way each time."""
_WIDE = 1_500_000
"""Multiplications of a product (the stage's mean) that several threads share with profit. On two
cores a product of 235,000 weights took as long with one row and less with eight."""
_SPLIT = (ColumnParallelLinear, RowParallelLinear)

Choice = tuple[bool, ...]
"""For each of the numbers of rows tried, whether the kernel is taken."""
Lost = tuple[float, ...]
"""For each of them, the seconds by which the kernel is slower than torch."""


_EXACTLY: list[bool] = []
"""Not empty inside `exactly`."""


@contextlib.contextmanager
def exactly() -> Iterator[None]:
    """Inside the block, products by weights in bfloat16 do not round what they multiply: two ways
    to compute the same differ no more than in fp32."""
    _EXACTLY.append(True)
    try:
        yield
    finally:
        _EXACTLY.pop()


def is_exact() -> bool:
    """Whether this is inside `exactly`."""
    return bool(_EXACTLY)


class SelectedGemm:
    """What multiplies by one weight [out, in], in fp32.

    Args:
        weight: in fp32, stored as [in, out], or in bfloat16, stored as it is.
        kernels: None: torch multiplies.

    Attributes:
        half: whether the weight is in bfloat16.
        turned: the weight as [in, out].
    """

    def __init__(
        self,
        weight: Tensor,
        kernels: CpuKernels | None = None,
        choice: Choice = (),
        lost: Lost | None = None,
    ) -> None:
        self.weight, self.kernels, self.choice = weight, kernels, choice
        self.lost = lost or (0.0,) * len(choice)
        self.turned = weight.t()
        self.half = weight.dtype == torch.bfloat16
        self._depth = weight.shape[1]

    def __call__(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """`x` [..., in] times the weight, plus `added` [out], or [T, out] if `x` is [T, in]."""
        rows = x.numel() // self._depth
        if (
            self.kernels is None
            or not 0 < rows <= MOST_ROWS
            or not self.choice[(rows - 1).bit_length()]
            or (self.half and (is_exact() or x.dtype != torch.float32))
        ):
            return self.by_torch(x, added)
        multiply, weight = self.kernels.product, self.turned
        if self.half:
            multiply, weight = self.kernels.half_product, self.weight
        if x.stride(-1) != 1 or x.dim() < 2 or rows != x.shape[-2]:
            flat = x.reshape(rows, self._depth).contiguous()
            return multiply(flat, weight, added).view(*x.shape[:-1], -1)
        return multiply(x, weight, added)

    def by_torch(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """The same, by the library."""
        if self.half:
            flat = x.reshape(-1, self._depth)  # of more dims, a view would be multiplied in batches
            if is_exact():
                y = F.linear(flat, self.weight.float())
            else:
                y = F.linear(flat.to(torch.bfloat16), self.weight).to(x.dtype)
            y = y.view(*x.shape[:-1], self.weight.shape[0])
            return y if added is None else y.add_(added)
        if added is not None and added.dim() == 2:
            return torch.addmm(added, x, self.turned)
        return F.linear(x, self.weight, added)


class Turned:
    """A Product as layers that are split over ranks call it: with the weight, which it knows."""

    def __init__(self, held: SelectedGemm) -> None:
        self.held = held

    def __call__(self, x: Tensor, _: Tensor) -> Tensor:
        return self.held(x)


class ChosenLinear(nn.Linear):
    """A linear layer (by class swap) that multiplies by the faster way."""

    held: SelectedGemm

    def forward(self, input: Tensor) -> Tensor:
        return self.held(input, self.bias)


def choose_products(
    module: nn.Module,
    kernels: CpuKernels,
    *,
    threads: Callable[[int], int] = lambda rows: 1,
    tried: bool = True,
) -> int:
    """Let the linear layers of a module use the kernel where it is faster, in place.

    Call after the weights have been merged and laid out for good: in fp32 the kernel is for those
    that are stored as [in, out], in bfloat16 for those of `engine.half`.

    Args:
        threads: that torch uses for so many rows.
        tried: by a trial, here and now; else the kernel is used for all numbers of rows.

    Returns:
        How many weights are multiplied by the kernel for some number of rows.
    """
    found: list[tuple[Any, Tensor]] = []
    merged: set[int] = set()
    child: Any
    for child in module.modules():
        if isinstance(child, MergedLinear):
            if id(child.merged) not in merged:
                merged.add(id(child.merged))
                found.append((child.merged, child.merged.weight))
        elif type(child) in (nn.Linear, ChosenLinear) or (
            isinstance(child, _SPLIT) and not child.transposed
        ):
            found.append((child, child.weight.data))
    found = [(one, weight) for one, weight in found if _fits(one, weight)]
    shapes = {weight.shape for _, weight in found}
    everything = (True,) * len(_ROWS), (0.0,) * len(_ROWS)
    choices = dict.fromkeys(shapes, everything)
    if tried:
        choices = _choices([weight for _, weight in found], kernels, threads)
    count = 0
    for one, weight in found:
        choice, lost = choices[weight.shape]
        if not any(choice):
            continue
        count += 1
        held = SelectedGemm(weight, kernels, choice, lost)
        if isinstance(one, Merged):
            one.product = held  # type: ignore[method-assign, assignment]
        elif isinstance(one, _SPLIT):
            one.product = Turned(held)
            one.held = held  # type: ignore[assignment]
        else:
            one.__class__ = ChosenLinear
            one.held = held
    return count


def _fits(one: Any, weight: Tensor) -> bool:
    """Whether the kernel can multiply by a weight of `one`."""
    least = _LEAST_OUTPUTS.get(weight.dtype)
    if least is None or weight.device.type != "cpu" or weight.shape[0] < least:
        return False
    if weight.dtype == torch.float32:
        stored = weight.t()
    elif isinstance(getattr(one, "product", one), SelectedGemm | Turned | ChosenLinear):
        stored = weight
    else:  # the module computes in bfloat16, and not from it
        return False
    return stored.stride(1) == 1 and stored.stride(0) >= stored.shape[1]


@torch.inference_mode()
def _choices(
    weights: list[Tensor], kernels: CpuKernels, threads: Callable[[int], int]
) -> dict[torch.Size, tuple[Choice, Lost]]:
    """For each shape, for which numbers of rows the kernel takes no more time than torch, and how
    much more it takes.

    As a step does, a pass goes over weights in their order; of a large model, over some of them and
    the beginning of each. What counts is the time that this thread computed: while a server starts,
    its ranks, its front and whatever else runs take turns on the cores, and a product that was put
    aside for some milliseconds is not a slow one. Of several threads it is the time that passed.
    """
    trial: list[tuple[torch.Size, SelectedGemm]] = []
    seen: set[torch.Size] = set()
    whole: dict[torch.Size, float] = {}  # weights as long as one, in those that are tried
    total = 0
    for weight in weights:
        if total >= _TRIED_WEIGHTS and weight.shape in seen:
            continue
        if weight.dtype == torch.bfloat16:
            cut = weight[: max(_LEAST_OUTPUTS[weight.dtype], _MOST_OF_ONE // weight.shape[1])]
        else:
            cut = weight[:, : max(1, _MOST_OF_ONE // weight.shape[0])]
        trial.append((weight.shape, SelectedGemm(cut, kernels, (True,) * len(_ROWS))))
        seen.add(weight.shape)
        whole[weight.shape] = whole.get(weight.shape, 0.0) + cut.numel() / weight.numel()
        total += cut.numel()
    alone = torch.get_num_threads()
    choices: dict[torch.Size, tuple[Choice, Lost]] = dict.fromkeys(seen, ((), ()))
    for rows in _ROWS:
        team = threads(rows)
        torch.set_num_threads(team)
        clock = time.thread_time if team == 1 else time.perf_counter
        best = [dict.fromkeys(seen, float("inf")) for _ in range(2)]
        inputs = [torch.zeros(1, rows, held.weight.shape[1]) for _, held in trial]
        for _ in range(_TRIALS):  # in turns: whatever disturbs one disturbs the other
            for way in (0, 1):
                spent = dict.fromkeys(seen, 0.0)
                for (shape, held), x in zip(trial, inputs, strict=True):
                    began = clock()
                    if way:
                        held(x)
                    else:
                        held.by_torch(x)
                    spent[shape] += clock() - began
                for shape, seconds in spent.items():
                    best[way][shape] = min(best[way][shape], seconds)
        for shape in seen:
            (choice, lost), more = choices[shape], best[1][shape] - best[0][shape]
            faster = best[1][shape] <= _TIE * best[0][shape]
            choices[shape] = (*choice, faster), (*lost, more / whole[shape])
    torch.set_num_threads(alone)
    return choices


def wide_step(module: nn.Module) -> int:
    """Tokens from which on the products of a stage are worth several threads."""
    sizes = [p.numel() for p in module.parameters() if p.dim() > 1]
    return max(1, -(-_WIDE * len(sizes) // max(1, sum(sizes))))
