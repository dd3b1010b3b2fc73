"""Attention of split sequences, through transformers' attention and mask interfaces.

A model under context parallelism has the implementation `hocket_context`, whichever it had before:
`sdpa`, or the family's own code where that asks the interface for its core (soft caps, sinks). Its
masks are not tensors of S x S: what transformers makes of windows, chunks, packed documents and
padding is a function of two places in the sequence, which is kept and asked for the blocks that a
rank computes. What stands for it in the model is a tensor of one element.

Positions that a decoder is given are those of a rank's own tokens. Masks are made from the whole
rows, which `runtime.context_parallel` knows (`use_whole_rows`).

Legend: B rows, S tokens of the whole sequence, Q queries, N keys.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from hocket.models.context_scans import ATTRIBUTE, split_states, splits_state
from hocket.models.meta_forward import meta_forward
from hocket.spec.errors import ModelError
from hocket.spec.model_shape import Attention

CONTEXT = "hocket_context"
"""The attention implementation."""

_ROTARY = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies follow the longest position that a rank has."""

Rows = Callable[[], Mapping[str, Tensor] | None]
_whole_rows: list[Rows] = [lambda: None]
_MASKS: Any = WeakTensorKeyDictionary()


@dataclasses.dataclass(frozen=True)
class VisibleKeys:
    """Which keys queries see.

    Attributes:
        function: transformers' mask function of (row, head, place of a query, place of a key).
        padding: [B, S], True where a token is none of padding; None: no row is padded.
        rows: B.
    """

    function: Callable[..., Any]
    padding: Tensor | None
    rows: int

    def __call__(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Places of queries [Q] and keys [N] to [B or 1, 1, Q, N]."""
        row = torch.arange(self.rows, device=queries.device)[:, None, None, None]
        head = torch.zeros(1, dtype=torch.long, device=queries.device)[None, :, None, None]
        seen = self.function(row, head, queries[None, None, :, None], keys[None, None, None, :])
        if self.padding is not None:
            seen = seen & self.padding[:, None, None, :].index_select(3, keys)
        found: Tensor = torch.as_tensor(seen, device=queries.device)
        return found


def use_whole_rows(rows: Rows) -> None:
    """Say where the whole rows of the microbatch that runs are found: `position_ids` [B, S], and
    `attention_mask` [B, S] if rows are padded. None: what runs is no part of a sequence."""
    _whole_rows[0] = rows


def _mask(  # noqa: PLR0917  as transformers calls it
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **options: Any,
) -> Tensor | None:
    """As transformers calls the mask function of an implementation."""
    if use_vmap:
        raise ModelError("its mask is a function of its own, which may look past a block")
    whole = local_size is None or local_size >= kv_length
    if whole and allow_is_causal_skip and attention_mask is None:
        return None
    # Of the whole length, whatever the padding mask's own is.
    found = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    _MASKS[found] = VisibleKeys(mask_function, attention_mask, batch_size)
    return found


def _attention(  # noqa: PLR0917  as transformers calls it
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """As transformers calls an attention function: [B, A, Q, D] to [B, Q, A, E]."""
    if dropout:
        raise ModelError(
            f"attention dropout is {dropout}: context ranks would each draw for their own blocks",
            hint="--dropout 0",
        )
    if position_bias is not None:
        raise ModelError("its attention adds a bias of its own to the scores")
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if causal is False and attention_mask is None:
        raise ModelError("its attention is not causal")
    visible = None
    if attention_mask is not None:
        visible = _MASKS.get(attention_mask)
        if visible is None:
            raise ModelError("its own code computes with the mask before attention gets it")
    given = getattr(module, "sinks", None) if s_aux is None else s_aux
    sinks = given if isinstance(given, Tensor) else None
    out = getattr(module, ATTRIBUTE)(
        query, key, value, scale=scaling, softcap=softcap, sinks=sinks, visible=visible
    )
    return out.transpose(1, 2).contiguous(), None


def _install() -> None:
    """Once in a process."""
    from transformers import masking_utils

    module: Any = masking_utils
    prepare = module._preprocess_mask_arguments
    if hasattr(prepare, "of_whole_rows"):
        return
    transformers.AttentionInterface.register(CONTEXT, _attention)
    masking_utils.AttentionMaskInterface.register(CONTEXT, _mask)

    def prepared(
        config: Any,
        inputs_embeds: Tensor,
        attention_mask: Any,
        past_key_values: Any,
        position_ids: Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        rows = _whole_rows[0]()
        if rows is not None and config._attn_implementation == CONTEXT:
            if isinstance(attention_mask, Tensor) and attention_mask.ndim > 2:
                raise ModelError("its own code makes masks of the tokens that a rank has")
            whole = rows["position_ids"]
            # A model that does not hand its positions on does not tell documents apart.
            position_ids = None if position_ids is None else whole
            attention_mask = rows.get("attention_mask")
            # Of the hidden state only sizes, dtype and device are read.
            inputs_embeds = inputs_embeds[:, :1].expand(-1, whole.shape[1], -1)
        return prepare(
            config, inputs_embeds, attention_mask, past_key_values, position_ids, *args, **kwargs
        )

    compatible = module.packed_sequence_compatibility_function

    def of_documents(function: Any, position_ids: Tensor, packed_sequence_mask: Tensor) -> Any:
        rows = _whole_rows[0]()
        if rows is not None and position_ids.shape != packed_sequence_mask.shape:
            position_ids = rows["position_ids"].expand_as(packed_sequence_mask)
        return compatible(function, position_ids, packed_sequence_mask)

    for name, value in vars(compatible).items():
        setattr(of_documents, name, value)
    module.packed_sequence_compatibility_function = of_documents
    prepared.of_whole_rows = True  # type: ignore[attr-defined]
    if hasattr(prepare, "of_whole_sequences"):
        prepared.of_whole_sequences = True  # type: ignore[attr-defined]
    module._preprocess_mask_arguments = prepared


def leave_graphs() -> None:
    """Let attention over context ranks be called between compiled parts, once in a process: no
    graph holds its messages, nor its masks."""
    outside = torch.compiler.disable(_attention)  # type: ignore[no-untyped-call]
    transformers.AttentionInterface.register(CONTEXT, outside)


def split_sequences(model: nn.Module) -> None:
    """Let a model's layers go over context ranks: its attention becomes `hocket_context`, and its
    recurrent layers hand on their states (`models.context_scans`).

    Raises:
        ModelError: its rotary embedding, its mask or its layers cannot be split, with the reason.
    """
    _install()
    config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
    why = _why_not_split(model) or _numbers_tokens(model) or _counts_tokens(model)
    if why:
        raise ModelError(
            f"{type(model).__name__} cannot be split over cp: {why}", hint="--layout cp1"
        )
    split_states(model)
    model.config._attn_implementation = CONTEXT  # type: ignore[union-attr]
    config._attn_implementation = CONTEXT


def attention_cores(skeleton: nn.Module) -> list[tuple[Attention, bool]]:
    """Each attention of one forward of a model on the meta device, in order: the module that asks
    for it, its sizes, and whether its outputs have a gradient. A module may ask more than once
    (DiffLlama), be run more than once (HRM), and have sizes of its own (Gemma 4)."""
    found: list[tuple[Attention, bool]] = []

    def core(name: str) -> Callable[..., Tensor]:
        def call(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
            one = Attention(
                name=name,
                heads=query.shape[1],
                kv_heads=key.shape[1],
                head_dim=query.shape[3],
                value_dim=value.shape[3],
            )
            found.append((one, torch.is_grad_enabled()))
            return query.new_empty((*query.shape[:3], value.shape[3]))

        return call

    model = copy.deepcopy(skeleton)
    split_sequences(model)
    for name, module in model.named_modules():
        if not splits_state(module):
            setattr(module, ATTRIBUTE, core(name))
    meta_forward(model)
    return found


def own_attention(model: nn.Module) -> str:
    """Why sequences of a model whose layers ask transformers for no attention function cannot be
    split; empty: they hand on states instead, which can."""
    found = _why_not_split(model)
    if not found and any(splits_state(module) for module in model.modules()):
        return ""
    return found or (
        "it computes attention in code of its own, which transformers' attention interface does "
        "not reach"
    )


_STATE = ("mamba", "rwkv", "deltanet", "shortconv", "recurrent", "rglru", "xlstm", "lightning")


def _why_not_split(model: nn.Module) -> str:
    """Why sequences of a model cannot be split, from what it is made of; empty: nothing is known
    against it."""
    split = [f"{name}." for name, module in model.named_modules() if splits_state(module)]
    for name, module in model.named_modules():
        kind, own = type(module).__name__, f"{name}." if name else ""
        if any(own.startswith(each) for each in split):
            continue
        plain = not any(module.children()) or any(each.startswith(own) for each in split)
        if any(word in kind.lower() for word in _STATE) and not plain:  # no norm, no container
            return f"{name} ({kind}) hands a state on along the sequence"
        if isinstance(module, nn.Conv1d):
            return f"{name} is a convolution over the sequence"
        rotary = getattr(module, "rope_type", None)
        if isinstance(rotary, str) and rotary in _ROTARY:
            return f"{name} ({rotary}) has frequencies that follow the longest position of a rank"
    return ""


def _numbers_tokens(model: nn.Module) -> str:
    """Why positions of a model cannot be given; empty: they can."""
    calls = (model.forward, getattr(model, "base_model", model).forward)
    if any("position_ids" in inspect.signature(call).parameters for call in calls):
        return ""
    modules = list(model.modules())
    if any(map(splits_state, modules)) and not any(hasattr(m, "rope_type") for m in modules):
        return ""  # the order of its tokens is that of its states
    return "it takes no position_ids, and would number the tokens of each rank from 0"


def _counts_tokens(model: nn.Module) -> str:
    """Why positions of a model cannot be those of columns; empty: they are."""
    for name, module in model.named_modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return f"{name} counts positions from token ids, of which padding has none"
    return ""
