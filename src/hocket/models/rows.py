"""Rows: whether each is one sequence, which transformers finds out by reading positions.

Where they only count up it leaves the causal mask to the kernel. On a CUDA device that read waits
for all work queued so far, in every forward of every microbatch, and on fake tensors it cannot look
at all, takes a row for several packed sequences, and builds a mask that a real run never holds. Who
knows what the rows are reports it here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclasses.dataclass(frozen=True, slots=True)
class Documents:
    """Packed documents of a microbatch.

    Attributes:
        cu_seqlens: [N + 1] int32 on the positions' device: first token of each document in the
            rows laid end to end, and their number of tokens; documents of no tokens at the end.
        longest: an upper bound of the documents' lengths.
    """

    cu_seqlens: Tensor
    longest: int


_KNOWN: Any = WeakTensorKeyDictionary()
"""Positions [B, S] to their Documents, or to None: one sequence a row."""

_NUMBERED: Any = WeakTensorKeyDictionary()
"""What `_numbered` makes of such positions to the Documents."""


def note_documents(position_ids: Tensor, documents: Documents | None) -> None:
    """Note the documents in positions, for as long as this very tensor lives. `packed_rows` hands
    them to attention. None: one sequence a row."""
    _KNOWN[position_ids] = documents


def documents_in(position_ids: Tensor) -> Documents | None:
    """The documents of positions that are in this process's memory: a document begins at 0.

    Also at the beginning of each row, which may be the middle of one. Compiled layers are of one
    shape, so both sizes are rounded up to few different ones: N + 1 to a power of two of at least
    16, and `longest` to one of the row's length, its half and its quarter.
    """
    assert position_ids.device.type == "cpu"
    starts = position_ids == 0
    starts[:, 0] = True
    first = starts.flatten().nonzero().flatten()
    if len(first) == len(position_ids):
        return None
    missing = (1 << max(4, len(first).bit_length())) - len(first)
    cu_seqlens = torch.cat([first, first.new_full((missing,), position_ids.numel())]).int()
    longest = int(cu_seqlens.diff().max())
    length = position_ids.shape[1]
    bounds = (-(-length // 4), -(-length // 2), length)
    return Documents(cu_seqlens, next(bound for bound in bounds if bound >= longest))


def mask_documents(mask_function: Any) -> Documents | None:
    """The documents that a mask function of transformers tells apart; None: none, or not known."""
    found: Documents | None = getattr(mask_function, "documents", None)
    return found


def remember_documents() -> None:
    """Let transformers' mask functions carry the documents that were noted. Once in a process."""
    from transformers import masking_utils

    module: Any = masking_utils
    compatible = module.packed_sequence_compatibility_function
    if hasattr(compatible, "remembers"):
        return

    def packed_sequence_compatibility_function(
        mask_function: Any, position_ids: Tensor, packed_sequence_mask: Tensor
    ) -> Any:
        made = compatible(mask_function, position_ids, packed_sequence_mask)
        made.documents = _NUMBERED.get(packed_sequence_mask)
        return made

    packed_sequence_compatibility_function.remembers = True  # type: ignore[attr-defined]
    module.packed_sequence_compatibility_function = packed_sequence_compatibility_function


@contextmanager
def one_sequence_each() -> Iterator[None]:
    """Within, positions are taken to count up from 0, without being read."""
    with _found(lambda position_ids: None):
        yield


@contextmanager
def packed_rows() -> Iterator[None]:
    """Within, a row is taken for several documents, which its positions tell apart, without asking
    whether it may be one."""
    with _found(_numbered):
        yield


def _numbered(position_ids: Tensor) -> Tensor | None:
    """[B, S]: the number of each token's document in its row, as transformers counts them."""
    known = position_ids in _KNOWN
    if known and _KNOWN[position_ids] is None:
        return None
    found = (position_ids.diff(prepend=position_ids[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    if known:
        _NUMBERED[found] = _KNOWN[position_ids]
    return found


@contextmanager
def _found(sequences: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    from transformers import masking_utils

    module: Any = masking_utils
    before = module.find_packed_sequence_indices
    module.find_packed_sequence_indices = sequences
    try:
        yield
    finally:
        module.find_packed_sequence_indices = before
