"""What ranks run in the tests of states and inputs that chunks hand on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hocket.runtime.context_parallel import ContextParallel
from hocket.runtime.context_parallel.split import token_indices
from hocket.runtime.mesh import Mesh
from hocket.spec.layout import Layout

ROWS, KEYS, VALUES, CHANNELS, LENGTH, WIDTH = 2, 3, 5, 4, 48, 3


def _draw(*shape: int) -> Tensor:
    draw = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def _mine(context: Any) -> tuple[ContextParallel, list[int]]:
    mesh = Mesh(Layout(cp=context.world_size), context.rank)
    axis = mesh.axis("cp")
    return ContextParallel(axis, mesh.recorder), [axis.index, 2 * axis.size - 1 - axis.index]


def states(context: Any, matrix: bool) -> dict[str, float]:
    """The largest differences from a loop over all chunks: of states and both gradients."""
    given, mine = _mine(context)
    count = 2 * context.world_size
    ends = _draw(count, ROWS, KEYS, VALUES)
    decay = 0.5 * _draw(count, ROWS, KEYS, KEYS if matrix else 1)
    grad = _draw(count + 1, ROWS, KEYS, VALUES)[1:]
    whole = [each.clone().requires_grad_() for each in (ends, decay)]
    state, before = torch.zeros(ROWS, KEYS, VALUES, dtype=torch.float64), []
    for f, factor in zip(*whole, strict=True):
        before.append(state)
        state = (factor @ state if matrix else factor * state) + f
    torch.stack(before).backward(grad)

    part = [each[mine].clone().requires_grad_() for each in (ends, decay)]
    found = given.previous_states(part[0], part[1], matrix=matrix)
    found.backward(grad[mine])
    pairs = {"state": (found, torch.stack(before)[mine])}
    for name, here, there in zip(("ends", "decay"), part, whole, strict=True):
        pairs[name] = here.grad, there.grad[mine]
    return {name: float((a - b).abs().max()) for name, (a, b) in pairs.items()}


def inputs(context: Any) -> dict[str, float]:
    """The same of a causal convolution written out over the whole sequence."""
    given, _ = _mine(context)
    here = token_indices(LENGTH, context.rank, context.world_size)
    x, weight = _draw(ROWS, CHANNELS, LENGTH), _draw(CHANNELS, 1, WIDTH + 1)
    grad = _draw(ROWS, CHANNELS, LENGTH + 1)[..., 1:]
    whole = x.clone().requires_grad_()
    padded = torch.nn.functional.pad(whole, (WIDTH, 0))
    expected = torch.nn.functional.conv1d(padded, weight, groups=CHANNELS)
    expected.backward(grad)

    part = x[..., here].clone().requires_grad_()
    before = given.previous_inputs(part, WIDTH)
    outs = [
        torch.nn.functional.conv1d(torch.cat([earlier, chunk], -1), weight, groups=CHANNELS)
        for earlier, chunk in zip(before, part.chunk(2, -1), strict=True)
    ]
    torch.cat(outs, -1).backward(grad[..., here])
    return {
        "out": float((torch.cat(outs, -1) - expected[..., here]).abs().max()),
        "grad": float((part.grad - whole.grad[..., here]).abs().max()),
    }


def sent(context: Any) -> dict[str, tuple[int, int]]:
    """Counts and bytes of states and inputs handed on, forward and backward."""
    given, _ = _mine(context)
    ends = _draw(2, ROWS, KEYS, VALUES).requires_grad_()
    decay = _draw(2, ROWS, KEYS, 1).requires_grad_()
    x = _draw(ROWS, CHANNELS, LENGTH // context.world_size).requires_grad_()
    with given.recorder.in_phase("microbatch"):
        given.previous_states(ends, decay).sum().backward()
        given.previous_inputs(x, WIDTH).sum().backward()
    return {row["name"]: (row["count"], row["bytes"]) for row in given.recorder.collectives()}
