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
from hocket.serving.engine.top_logits import largest, top_token
from hocket.serving.engine.vocabulary import Vocabulary
from hocket.serving.request import TokenLogprobs


def logits_summary(logits: Tensor, wanted: Tensor, count: int, start: int = 0) -> Tensor:
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
        peak, _ = top_token(logits)
    found[:, 0] = peak
    # By `sum`, which adds in pairs: what softmax divides by is ten times less exact.
    total = (logits - peak.unsqueeze(1)).exp_().sum(-1)
    found[:, 1] = total.masked_fill_(peak.isneginf(), 0)
    local = wanted - start
    mine = (local >= 0) & (local < vocabulary)
    logit = logits.gather(1, local.clamp(0, vocabulary - 1).unsqueeze(1)).squeeze(1).double()
    found[:, 2] = torch.where(mine, logit, -torch.inf)
    return found


def combined_logprobs(summaries: Tensor) -> Tensor:
    """The log-probabilities of P rows from what each rank knows: [P, 1 + 2 n], fp64.

    Args:
        summaries: [ranks, P, 3 + 2 n].

    Returns:
        columns: log-probability of the wanted token, those of the n largest in order, their ids.
    """
    most = (summaries.shape[2] - 3) // 2
    peaks, sums = summaries[..., 0], summaries[..., 1]
    peak = peaks.amax(0)
    normalizer = peak + (sums * (peaks - peak).exp()).sum(0).log()
    chosen = _finite(summaries[..., 2].amax(0) - normalizer).unsqueeze(1)
    if most == 0:
        return chosen
    # Ranks in order hold ascending ids and each rank's equals ascend: a stable sort keeps that.
    values = summaries[..., 3 : 3 + most].movedim(0, 1).flatten(1)
    ids = summaries[..., 3 + most :].movedim(0, 1).flatten(1)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    tops = _finite(values[:, :most] - normalizer.unsqueeze(1))
    return torch.cat([chosen, tops, ids.gather(1, order[:, :most])], 1)


def entries(rows: list[list[float]], wanted: list[int], counts: list[int]) -> list[TokenLogprobs]:
    """What is reported of P rows.

    Args:
        rows: of `combined_logprobs`, on the host.
        wanted: P token ids.
        counts: alternatives to tell of each row, at most n.
    """
    if not rows:
        return []
    most = (len(rows[0]) - 1) // 2
    if most == 0:
        return [TokenLogprobs(token, row[0]) for token, row in zip(wanted, rows, strict=True)]
    return [
        TokenLogprobs(
            token,
            row[0],
            tuple(zip(map(int, row[1 + most : 1 + most + count]), row[1 : 1 + count], strict=True)),
        )
        for token, row, count in zip(wanted, rows, counts, strict=True)
    ]


def logprobs(
    logits: Tensor,
    targets: Tensor,
    most: int,
    vocabulary: Vocabulary,
    recorder: Recorder,
    *,
    rows_at_once: int,
) -> Tensor | None:
    """The log-probabilities of `targets` [P] and of the `most` most probable tokens, as
    `combined_logprobs`
    gives them, where the logits are; None on all but index 0 of a split axis.

    Args:
        logits: [P, V of this rank], of the model's dtype; taken in slices of `rows_at_once`.
    """
    parts = [
        logits_summary(part.float(), target, most, vocabulary.start)
        for part, target in zip(
            torch.split(logits, rows_at_once), torch.split(targets, rows_at_once), strict=True
        )
    ]
    mine = torch.cat(parts)
    if not vocabulary.split:
        return combined_logprobs(mine.unsqueeze(0))
    every = gather(mine, vocabulary.axis, recorder)
    return None if every is None else combined_logprobs(torch.stack(every))


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
    targets = torch.tensor(wanted, dtype=torch.long, device=logits.device)
    found = logprobs(
        logits, targets, max(counts, default=0), vocabulary, recorder, rows_at_once=rows_at_once
    )
    return None if found is None else entries(found.tolist(), wanted, counts)


def _finite(logprobs: Tensor) -> Tensor:
    """Without NaN, which no text form of numbers knows: a row that has one reports nothing."""
    return logprobs.nan_to_num_(nan=-math.inf, posinf=-math.inf, neginf=-math.inf)
