"""Masks of whole sequences, where a decoder is given slices of them.

transformers builds every mask for as many queries as the hidden state has tokens. With sequence
parallelism that is a slice, and attention sees the whole: the length is then that of the positions
or of the padding mask, which are whole. Without a cache these have the hidden state's own length
everywhere else, and nothing changes.

A mask of ones, by which some models learn the length (`SequencePlan.mask`), goes no further: what
transformers does with it begins by reading it from the device, and ends with a mask of S x S or
with none at all.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def _is_one_number(mask: Tensor) -> bool:
    """Whether a mask [B, S] is one number expanded, as `runtime.pipeline.stage` makes it: a 1."""
    return mask.ndim == 2 and mask.stride() == (0, 0) and mask.shape[1] > 1


def of_whole_sequences() -> None:
    """Let masks be as long as the positions say. Once in a process."""
    from transformers import masking_utils

    module: Any = masking_utils
    prepare = module._preprocess_mask_arguments
    if hasattr(prepare, "of_whole_sequences"):
        return

    def prepared(
        config: Any,
        inputs_embeds: Tensor,
        attention_mask: Any,
        past_key_values: Any,
        position_ids: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        length = inputs_embeds.shape[1]
        if past_key_values is None:
            for said in (position_ids, attention_mask):
                if isinstance(said, Tensor) and said.ndim == 2:
                    length = max(length, said.shape[-1])
        if isinstance(attention_mask, Tensor) and _is_one_number(attention_mask):
            attention_mask = None
        if length != inputs_embeds.shape[1]:
            # Of the hidden state only sizes, dtype and device are read.
            inputs_embeds = inputs_embeds[:, :1].expand(-1, length, -1)
        return prepare(
            config, inputs_embeds, attention_mask, past_key_values, position_ids, *args, **kwargs
        )

    prepared.of_whole_sequences = True  # type: ignore[attr-defined]
    module._preprocess_mask_arguments = prepared
