"""Sampling: the next token of each row, from logits whose vocabulary is split over ranks.

Greedy decoding moves one value and one index per row and rank. Sampling moves one row of logits,
after which every rank of the tensor axis draws the same token: the random number is a function of
seed, row and position, and of nothing else.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import hashlib

import torch
from torch import Tensor

from hocket.runtime.collectives import all_gather
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.serving.request import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class VocabularyRange:
    """Which part of the vocabulary this rank's logits cover.

    Attributes:
        axis: the ranks that hold the others; one rank holds all.
        start: first token id of this rank.
        sizes: token ids held by each rank of the axis.
    """

    axis: Axis
    start: int = 0
    sizes: tuple[int, ...] = ()


def next_tokens(
    logits: Tensor,
    options: SamplingParams,
    position: int,
    vocabulary: VocabularyRange,
    recorder: Recorder,
) -> Tensor:
    """The next token of each row: [B], equal on every rank of the axis.

    Args:
        logits: [B, V of this rank].
        options: how to choose.
        position: how many tokens were chosen before.
        vocabulary: the part that `logits` covers.
        recorder: counts what is moved.
    """
    logits = logits.float()
    if options.temperature == 0:
        return _most_probable(logits, vocabulary, recorder)
    whole = all_gather(logits, vocabulary.axis, recorder, dim=-1, sizes=vocabulary.sizes or None)
    return draw_row_tokens(whole, options, position)


def _most_probable(logits: Tensor, vocabulary: VocabularyRange, recorder: Recorder) -> Tensor:
    """The largest logit's token; of equals the first, as argmax over the whole row would."""
    axis = vocabulary.axis
    if axis.size == 1:
        return logits.argmax(dim=-1)
    if logits.shape[-1] == 0:
        best = logits.new_full(logits.shape[:-1], float("-inf"))
        index = torch.zeros_like(best)
    else:
        best, found = logits.max(dim=-1)
        # the first of equals: `max` does not promise which one it names
        found = (logits == best.unsqueeze(-1)).int().argmax(dim=-1)
        index = (found + vocabulary.start).double()
    pairs = torch.stack([best.double(), index.double()], dim=-1).unsqueeze(0)
    every = all_gather(pairs, axis, recorder, dim=0)  # [ranks, B, 2]
    winner = every[..., 0].argmax(dim=0)
    return every[..., 1].gather(0, winner.unsqueeze(0)).squeeze(0).long()


def draw_row_tokens(logits: Tensor, options: SamplingParams, position: int) -> Tensor:
    """One token per row [B] from whole rows of logits [B, V], in the order of temperature,
    top-k, top-p that transformers uses.
    """
    scores = logits.double() / options.temperature
    if options.top_k is not None and options.top_k < scores.shape[-1]:
        least = scores.topk(options.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if options.top_p is not None and options.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        probability = ordered.softmax(dim=-1)
        before = probability.cumsum(dim=-1) - probability
        dropped = torch.zeros_like(scores, dtype=torch.bool)
        dropped.scatter_(-1, order, before >= options.top_p)
        scores = scores.masked_fill(dropped, float("-inf"))
    cumulative = scores.softmax(dim=-1).cumsum(dim=-1)
    at = torch.tensor(
        [_row_uniform(options.seed or 0, row, position) for row in range(scores.shape[0])],
        dtype=cumulative.dtype,
        device=cumulative.device,
    ).unsqueeze(-1)
    # The first token whose cumulative probability exceeds the draw: never one of probability 0.
    return torch.searchsorted(cumulative, at * cumulative[..., -1:], right=True).squeeze(-1)


def _row_uniform(seed: int, row: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone, on every machine."""
    digest = hashlib.blake2b(f"{seed}/{row}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / float(1 << 53)
