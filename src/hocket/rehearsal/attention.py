"""Attention kernels: those that training takes on a GPU, on fake tensors.

torch chooses in C++ by asking the device, which is not there; the rules are those of
`aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`. Where cuDNN's kernel is preferred (compute
capability 9.0 and 10.0), flash attention stands for it: it saves the same tensors. So it does for
the kernels that flex attention generates, unless layers are compiled (`rehearsal.generated`).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from hocket.models import attention
from hocket.runtime.context_parallel import attend as context_attention
from hocket.runtime.context_parallel import ring
from hocket.spec.attention_kernel import OPERATIONS

_ops: Any = torch.ops.aten
_HALF = (torch.bfloat16, torch.float16)


class AttentionCounter:
    """Counts the kernels that are chosen.

    Args:
        capability: compute capability of the GPU.

        generated: the kernels of flex attention are generated, and nothing stands for them.

    Attributes:
        chosen: kernel (`flash`, `flash-varlen`, `flex`, `efficient`, `math`; over context ranks
            also `tiles`) to its calls; of a ring each part is one.
    """

    def __init__(self, capability: tuple[int, int], *, generated: bool = False) -> None:
        self.capability = capability
        self.generated = generated
        self.chosen: Counter[str] = Counter()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, `scaled_dot_product_attention` of CUDA tensors chooses here, and the kernels of
        `models.attention` are counted."""
        before = F.scaled_dot_product_attention
        functional: Any = F

        def attend(  # noqa: PLR0917 the signature is torch's
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            if not query.is_cuda:
                return before(
                    query,
                    key,
                    value,
                    attn_mask,
                    dropout_p,
                    is_causal,
                    scale=scale,
                    enable_gqa=enable_gqa,
                )
            kernel = self.kernel(query, key, value, attn_mask)
            self.count(kernel)
            call = _Call(query, key, value, attn_mask, dropout_p, is_causal, scale)
            return call.run(kernel)

        given = attention._varlen

        def varlen(*arguments: Any) -> Tensor:
            self.count("flash-varlen")
            return given(*arguments)

        def part(*given: Any) -> tuple[Tensor, Tensor]:
            query, key, value, scores, mask, _ = given
            fused = mask is None and context_attention._kernel(query, key, value, scores)
            self.count("flash" if fused else "tiles")
            return context_attention.attend_part(*given)

        functional.scaled_dot_product_attention = attend
        try:
            with (
                mock.patch.object(ring, "attend_part", part),
                mock.patch.object(attention, "_varlen", varlen),
                nullcontext()
                if self.generated
                else mock.patch.object(attention, "_flex", self._flex),
            ):
                yield
        finally:
            functional.scaled_dot_product_attention = before

    def count(self, kernel: str) -> None:
        """One call. Those inside a graph are counted when the graph runs."""
        if not torch.compiler.is_compiling():
            self.chosen[kernel] += 1

    def of_graphs(self, launches: Counter[str]) -> dict[str, int]:
        """The calls of a step whose layers were compiled, by what ran."""
        found = Counter({"tiles": self.chosen["tiles"]})  # which no graph holds
        for name, number in launches.items():
            if name in OPERATIONS or name == "_varlen_attn":
                found[OPERATIONS.get(name, "flash-varlen")] += number
            elif "flex_attention" in name and "triton_tem" in name and "backward" not in name:
                found["flex"] += number
        return dict(+found)

    def _flex(  # noqa: PLR0917
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, scale: float | None,
        softcap: float | None, sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        """What stands for a generated kernel: it saves query, key, value, output and lse."""
        self.count("flex")
        equal = query.shape[-1] == value.shape[-1]  # groups of heads are read in place
        call = _Call(query, key, value, None, 0.0, True, scale)
        out, lse = call.outputs("flash" if equal else "efficient")[:2]
        if sinks is None:
            return out
        kept = torch.sigmoid(lse[..., : out.shape[2]] - sinks.float().unsqueeze(-1))
        return (out * kept.unsqueeze(-1)).to(out.dtype)

    def kernel(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
        """The kernel for [B, A, S, D] tensors."""
        sizes = {query.shape[-1], key.shape[-1], value.shape[-1]}
        half = query.dtype in _HALF
        if query.ndim != 4 or (query.dtype not in (*_HALF, torch.float32)):
            return "math"
        if (
            half
            and mask is None
            and self.capability >= (8, 0)
            and len(sizes) == 1
            and max(sizes) <= 256
        ):
            return "flash"
        aligned = all(size % (8 if half else 4) == 0 for size in sizes)
        return "efficient" if aligned else "math"


@dataclasses.dataclass
class _Call:
    """The arguments of one attention: query [B, A, S, D]; key and value may have fewer heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout: float
    causal: bool
    scale: float | None

    def run(self, kernel: str) -> Tensor:
        """The output of one kernel."""
        return self.outputs(kernel)[0]

    def outputs(self, kernel: str) -> tuple[Tensor, ...]:
        """All that one kernel returns: output, and log-sum-exp where it has one."""
        query, key, value, mask, drop = self.query, self.key, self.value, self.mask, self.dropout
        if kernel == "flash":
            out = _ops._scaled_dot_product_flash_attention(
                query, key, value, drop, self.causal, False, scale=self.scale
            )
            return out  # type: ignore[no-any-return]
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:  # torch repeats keys and values for the kernels that have no groups
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        if kernel == "math":
            out = _ops._scaled_dot_product_attention_math(
                query, key, value, mask, drop, self.causal, None, scale=self.scale
            )
            return out  # type: ignore[no-any-return]
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
        if mask is not None:
            mask = mask.expand(*query.shape[:2], *mask.shape[-2:])
        out = _ops._scaled_dot_product_efficient_attention(
            query, key, value, mask, torch.is_grad_enabled(), drop, self.causal, scale=self.scale
        )
        return out  # type: ignore[no-any-return]
