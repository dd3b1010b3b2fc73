"""LayerProbe: stands for attention in a forward that keeps nothing; notes what layers hand over."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hocket.models.latent import LatentHeads
from hocket.serving.engine.attention import Options
from hocket.serving.engine.attention_kernels import LayerKind
from hocket.serving.engine.attention_step import StepIndices
from hocket.serving.engine.cache import LayerShape


def unplaced(tokens: int, logits: int, block_size: int) -> StepIndices:
    """A step of one sequence from its beginning, for a forward that keeps nothing."""
    none = torch.zeros(0, dtype=torch.long)
    return StepIndices(
        tokens=torch.zeros(tokens, dtype=torch.long),
        positions=torch.arange(tokens),
        places=torch.arange(tokens),
        num_decode=0,
        lengths=none,
        tables=torch.zeros(0, 0, dtype=torch.long),
        chunks=[],
        wanted=torch.arange(logits),
        block_size=block_size,
    )


class LayerProbe:
    """Stands for attention: notes what layers hand over, and returns something of the shape."""

    def __init__(self) -> None:
        self.kinds: list[LayerKind] = []

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Options
    ) -> Tensor:
        shape = LayerShape(query.shape[1], key.shape[1], key.shape[-1], value.shape[-1], key.dtype)
        self.kinds.append(LayerKind.of(shape, options))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    def attend_latent(self, heads: LatentHeads, query: Tensor, options: Options) -> Tensor:
        like = heads.taken()
        shape = LayerShape(
            query.shape[1], 1, heads.width, heads.latent_size, like.dtype, latent=True
        )
        self.kinds.append(LayerKind.of(shape, options))
        return query.new_zeros(1, query.shape[2], query.shape[1], heads.value_size)
