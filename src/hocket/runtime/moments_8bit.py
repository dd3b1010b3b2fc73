"""Optimizer moments in 8 bits: block-wise quantization (Dettmers et al. 2022, 8-bit Optimizers).

    codes    one byte a value: an index of 256 values of the dynamic map, signed for the mean of the
             gradient, unsigned for that of its square
    absmax   fp32, the largest absolute value of each block of 256: `exp_avg_absmax`

Blocks are 256 consecutive values of the tensor that a rank steps, as in bitsandbytes' AdamW8bit,
whose kernels these are. A shard of tp or ZeRO begins its own blocks, so that its scales differ from
those of the whole tensor. A state is resharded by its values: dequantized with the blocks it was
written in, quantized in those of the new shard.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from hocket.runtime.base_4bit import load_library
from hocket.spec.precision import MOMENT_BLOCK

MEAN, SQUARE = "exp_avg", "exp_avg_sq"
SCALES = "_absmax"
"""Ends the name of the scales of a quantized moment."""


@functools.cache
def code_values(key: str) -> tuple[float, ...]:
    """The 256 values of a moment's map. A rehearsal calls it before it makes up a device."""
    with unset_fake_temporarily():
        return tuple(load_library().create_dynamic_map(signed=key == MEAN).tolist())


def add_quantized(state: MutableMapping[Any, Any], like: Tensor) -> None:
    """Both moments of a tensor that was never stepped, and their scales: zeros."""
    for key in (MEAN, SQUARE):
        state[key] = torch.zeros_like(like, dtype=torch.uint8)
        blocks = -(-like.numel() // MOMENT_BLOCK)
        state[key + SCALES] = torch.zeros(blocks, dtype=torch.float32, device=like.device)


def quantize_moment(state: Mapping[str, Tensor], key: str, values: Tensor) -> None:
    """Store the values of a moment, rounded."""
    codes, scales = state[key], state[key + SCALES]
    if codes.numel():
        given = values.to(codes.device, torch.float32).contiguous()
        found = _operators().quantize_blockwise(given, _map(key, codes.device), MOMENT_BLOCK)
        codes.copy_(found[0].view(codes.shape))
        scales.copy_(found[1])


def dequantize_moment(codes: Tensor, scales: Tensor, key: str) -> Tensor:
    """The values of a moment, in fp32."""
    if not codes.numel():
        return torch.empty(codes.shape, device=codes.device)
    code = _map(key, codes.device)
    found: Tensor = _operators().dequantize_blockwise(
        codes.contiguous(), scales, code, MOMENT_BLOCK, torch.float32
    )
    return found


def moment_values(state: Mapping[str, Tensor], key: str) -> Tensor:
    """A moment in fp32, whether it is quantized or not."""
    held = state[key]
    return dequantize_moment(held, state[key + SCALES], key) if key + SCALES in state else held


class AdamW8bit(torch.optim.Optimizer):
    """AdamW whose moments are stored in 8 bits, stepped by bitsandbytes' kernels.

    Unlike the library's class it waits for no device, and its state has torch's names.

    Args:
        groups: as for torch.optim.AdamW, each with `bits`: 8, or 32 for moments in fp32.
        lr, betas, eps: as for torch.optim.AdamW.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        code_values(MEAN), code_values(SQUARE)

    def state_of(self, tensor: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """The state of a tensor: made, if it was never stepped."""
        state: dict[str, Any] = self.state[tensor]
        if not state:
            # On the host: a kernel takes the number of steps as an argument.
            state["step"] = torch.zeros((), dtype=torch.float32)
            if group["bits"] == 8:
                add_quantized(state, tensor)
            else:
                state |= {key: torch.zeros_like(tensor) for key in (MEAN, SQUARE)}
        return state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every tensor that has a gradient."""
        assert closure is None
        operators = _operators()
        for group in self.param_groups:
            first, second = group["betas"]
            for tensor in group["params"]:
                if tensor.grad is None or not tensor.numel():
                    continue
                state = self.state_of(tensor, group)
                state["step"] += 1
                number = _number(state["step"])
                gradient = tensor.grad.contiguous()
                moments = state[MEAN], state[SQUARE]
                decay = group["weight_decay"]
                if group["bits"] == 8:
                    operators.optimizer_update_8bit_blockwise(
                        "adam", gradient, tensor, *moments, first, second, 0.0, 0.0, group["eps"],
                        number, group["lr"], _map(MEAN, tensor.device), _map(SQUARE, tensor.device),
                        state[MEAN + SCALES], state[SQUARE + SCALES], decay, 1.0, False,
                    )  # fmt: skip
                else:
                    operators.optimizer_update_32bit(
                        "adam", gradient, tensor, *moments, None, 0.0, 0.0, first, second, 0.0, 0.0,
                        group["eps"], decay, number, group["lr"], 1.0, False,
                    )  # fmt: skip


def _operators() -> Any:
    load_library()
    return torch.ops.bitsandbytes


def _number(steps: Tensor) -> int:
    """The number of steps; 1 of a tensor without values (a forecast of memory, a rehearsal)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return 1 if isinstance(steps, FakeTensor) else int(steps)


_MAPS: dict[tuple[str, torch.device], Tensor] = {}


def _map(key: str, device: torch.device) -> Tensor:
    """The values of a map on a device, made once; among tensors without values, each time."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return torch.tensor(code_values(key), device=device)
    found = _MAPS.get((key, device))
    if found is None:
        found = _MAPS[key, device] = torch.tensor(code_values(key), device=device)
    return found
