"""Log-probabilities of tokens, from rows of logits whose vocabulary is split over ranks.

Of each row a rank tells its largest logit, the sum of exponentials beneath it, the logit of the
wanted token if it is its own, and its n largest with their ids. From these few numbers the first
rank has the log-softmax of the whole row: rows of logits are not moved.

Legend: P rows, V vocabulary of this rank, n alternatives.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hocket.runtime.collectives import gather
from hocket.runtime.record import Recorder
from hocket.serving.engine.likeliest import largest, likeliest
from hocket.serving.engine.vocabulary import Vocabulary
from hocket.serving.request import TokenLogprobs


def summary(logits: Tensor, wanted: Tensor, count: int, start: int = 0) -> Tensor:
    """What this rank knows of some rows: [P, 3 + 2 n], fp64.

    Args:
        logits: [P, V of this rank], fp32.
        wanted: [P] token ids.
        count: n.
        start: first token id of this rank.

    Returns:
        columns: largest logit, sum of exp(logit - largest), logit of the wanted token or -inf,
        the n largest in order (-inf where there are fewer), their ids.
    """
    num_rows, vocabulary = logits.shape
    found = torch.zeros(num_rows, 3 + 2 * count, dtype=torch.float64, device=logits.device)
    found[:, :3] = found[:, 3 : 3 + count] = -torch.inf
    found[:, 1] = 0
    if vocabulary == 0 or num_rows == 0:
        return found
    held = min(count, vocabulary)
    if held:
        values, ids = largest(logits, held)
        found[:, 3 : 3 + held] = values
        found[:, 3 + count : 3 + count + held] = ids + start
        peak = values[:, 0]
    else:
        peak, _ = likeliest(logits)
    found[:, 0] = peak
    # By `sum`, which adds in pairs: what softmax divides by is ten times less exact.
    total = (logits - peak.unsqueeze(1)).exp_().sum(-1)
    found[:, 1] = total.masked_fill_(peak.isneginf(), 0)
    local = wanted - start
    mine = (local >= 0) & (local < vocabulary)
    logit = logits.gather(1, local.clamp(0, vocabulary - 1).unsqueeze(1)).squeeze(1).double()
    found[:, 2] = torch.where(mine, logit, -torch.inf)
    return found


def combine(summaries: Tensor, wanted: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """The log-probabilities of P rows from what each rank knows.

    Args:
        summaries: [ranks, P, 3 + 2 n].
        wanted: P token ids.
        counts: alternatives to tell of each row, at most n.
    """
    most = (summaries.shape[2] - 3) // 2
    peaks, sums = summaries[..., 0], summaries[..., 1]
    peak = peaks.amax(0)
    normalizer = peak + (sums * (peaks - peak).exp()).sum(0).log()
    chosen = _finite(summaries[..., 2].amax(0) - normalizer).tolist()
    if most == 0:
        return [TokenLogprobs(*pair) for pair in zip(wanted, chosen, strict=True)]
    # Ranks in order hold ascending ids and each rank's equals ascend: a stable sort keeps that.
    values = summaries[..., 3 : 3 + most].movedim(0, 1).flatten(1)
    ids = summaries[..., 3 + most :].movedim(0, 1).flatten(1)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    tops = _finite(values[:, :most] - normalizer.unsqueeze(1)).tolist()
    names = ids.gather(1, order[:, :most]).long().tolist()
    return [
        TokenLogprobs(token, logprob, tuple(zip(name[:count], top[:count], strict=True)))
        for token, logprob, name, top, count in zip(
            wanted, chosen, names, tops, counts, strict=True
        )
    ]


def token_logprobs(
    logits: Tensor,
    wanted: list[int],
    counts: list[int],
    vocabulary: Vocabulary,
    recorder: Recorder,
    *,
    rows_at_once: int,
) -> list[TokenLogprobs] | None:
    """The log-probabilities of `wanted` [P] tokens; None on all but index 0 of a split axis.

    Args:
        logits: [P, V of this rank], of the model's dtype; taken in slices of `rows_at_once`.
        counts: alternatives to tell of each row.
    """
    most = max(counts, default=0)
    targets = torch.tensor(wanted, dtype=torch.long, device=logits.device)
    parts = [
        summary(part.float(), target, most, vocabulary.start)
        for part, target in zip(
            torch.split(logits, rows_at_once), torch.split(targets, rows_at_once), strict=True
        )
    ]
    mine = torch.cat(parts)
    if not vocabulary.split:
        return combine(mine.unsqueeze(0).cpu(), wanted, counts)
    every = gather(mine, vocabulary.axis, recorder)
    return None if every is None else combine(torch.stack(every).cpu(), wanted, counts)


def _finite(logprobs: Tensor) -> Tensor:
    """Without NaN, which no text form of numbers knows: of a row that has one, nothing is told."""
    return logprobs.nan_to_num_(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
