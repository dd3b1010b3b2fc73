"""Split: which tokens of a sequence each context rank has.

A causal sequence is cut into 2c chunks, and rank r of c gets chunk r from the front and chunk r
from the back, so that all have as many pairs of queries and keys (zigzag; Brandon et al. 2023,
Striped Attention, section 3, and Zhu 2024, zigzag ring attention):

    c = 2      chunk 0   1   2   3          rank 0 has 0 and 3, rank 1 has 1 and 2
    keys each        1   2   3   4          5 chunks of keys for each rank

Positions are those in the whole sequence, and the label of a token is found before the cut: that of
a chunk's last token is the first token of the next chunk, on another rank.

Legend: B rows, S tokens of the whole sequence, c context ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hocket.runtime.loss import targets
from hocket.runtime.mesh import Axis
from hocket.spec.errors import OptionError

Microbatch = Mapping[str, Tensor]

_WHOLE: list[Mapping[str, Tensor]] = []
"""The whole rows of the microbatch that a stage is running, if it runs parts of sequences."""


def chunks(seq_len: int, rank: int, degree: int) -> tuple[slice, slice]:
    """One rank's two chunks of a sequence.

    Raises:
        OptionError: S is not a multiple of 2c.
    """
    if seq_len % (2 * degree):
        near = max(2 * degree, seq_len - seq_len % (2 * degree))
        raise OptionError(
            f"sequences of {seq_len} tokens do not divide into 2 x cp = {2 * degree} chunks",
            hint=f"--seq-len {near}",
        )
    size = seq_len // (2 * degree)
    back = 2 * degree - 1 - rank
    return slice(rank * size, (rank + 1) * size), slice(back * size, (back + 1) * size)


def token_indices(
    seq_len: int, rank: int, degree: int, device: torch.device | None = None
) -> Tensor:
    """Places [S / c] in the whole sequence of one rank's tokens, ascending. Raises OptionError."""
    parts = chunks(seq_len, rank, degree)
    return torch.cat([torch.arange(p.start, p.stop, device=device) for p in parts])


class SequencePart(dict[str, Tensor]):
    """One rank's part of a microbatch.

    Attributes:
        whole: `position_ids` [B, S] of the whole rows and, where rows are padded, `attention_mask`.
    """

    whole: Mapping[str, Tensor]


def part_of(microbatch: Microbatch, axis: Axis, *, labels_shifted: bool) -> SequencePart:
    """This rank's tokens of a microbatch; its labels are shifted.

    Args:
        microbatch: tensors [B, S, ...].
        axis: the context ranks.
        labels_shifted: whether its labels are those of the next token already.
    """
    ids = next(v for k, v in microbatch.items() if k in ("input_ids", "inputs_embeds", "labels"))
    rows, length = ids.shape[:2]
    here = chunks(length, axis.index, axis.size)
    given = dict(microbatch)
    if "position_ids" not in given:
        given["position_ids"] = torch.arange(length, device=ids.device).expand(rows, -1)
    if "labels" in given:
        given["labels"] = targets(given["labels"], labels_shifted)
    found = SequencePart()
    for name, value in given.items():
        if value.ndim < 2 or value.shape[1] != length:
            raise OptionError(
                f"{name} has the shape {list(value.shape)}; cp splits rows of {length} tokens: "
                "[rows, tokens, ...]"
            )
        found[name] = torch.cat([value[:, chunk] for chunk in here], 1)
    found.whole = {k: v for k, v in given.items() if k in ("position_ids", "attention_mask")}
    return found


def with_positions(microbatches: Sequence[Microbatch]) -> Sequence[Microbatch]:
    """Microbatches of a model that numbers tokens from its attention mask: with the `position_ids`
    that it would find in whole rows, -1 for padding, where there is a mask and none are given."""
    found: list[Microbatch] = []
    for given in microbatches:
        mask = given.get("attention_mask")
        if mask is None or mask.ndim != 2 or "position_ids" in given:
            found.append(given)
        else:
            counted = mask.long()
            found.append({**given, "position_ids": counted.cumsum(1) * counted - 1})
    return found


def context_parts(
    microbatches: Sequence[Microbatch], axis: Axis, *, labels_shifted: bool
) -> Sequence[Microbatch]:
    """`part_of` of each; the microbatches themselves where no sequence is split."""
    if axis.size == 1:
        return microbatches
    return [part_of(each, axis, labels_shifted=labels_shifted) for each in microbatches]


@contextmanager
def running(microbatch: Microbatch) -> Iterator[None]:
    """Within, `whole_rows` are those that a microbatch is a part of."""
    if not isinstance(microbatch, SequencePart):
        yield
        return
    _WHOLE.append(microbatch.whole)
    try:
        yield
    finally:
        _WHOLE.pop()


def whole_rows() -> Mapping[str, Tensor] | None:
    """`position_ids` [B, S], and `attention_mask` if rows are padded, of what runs; None: what runs
    is no part of a sequence."""
    return _WHOLE[-1] if _WHOLE else None
