"""Shares of stages by hand: whole layers, split as Megatron-LM does."""

from __future__ import annotations

from typing import Any

from hocket.cost.stage_communication import StageShare


def layers_share(
    num_layers: int, *, stage: int = 0, embedding: bool = False, head: bool = False, **fields: Any
) -> StageShare:
    """`num_layers` layers of two split halves, with a split embedding or output head. `fields` are
    those of the class that layers do not tell (`gradient_bytes` ...)."""
    return StageShare(
        stage=stage,
        forward_sums=2 * num_layers + embedding,
        backward_sums=2 * num_layers + head,
        split_loss=head,
        **fields,
    )
