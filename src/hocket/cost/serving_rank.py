"""Serving rank: what one rank of a server holds and computes, on catalogue GPUs and on machines
that were measured; `cost.serving_step` and `cost.measured_serving` take the seconds of these sizes.

    linear     [T, k] x [k, n]         cost.local divides n or k by t
    experts    T k t_e / t rows        of E / e experts of this rank, those that any token chooses;
                                       n or k divided by t_e
    attention  A / t query heads       over K / t cached heads, one at least; over one latent
                                       vector, which no rank divides
    cache      K / t (D + V)           elements of a token; or the latent vector's

`at` is a replica: its `Layout`, or `ReplicaColumns` [r]; the results are numbers or arrays as its
degrees are.

Legend: T tokens that a rank computes, t tensor ranks, e expert ranks, t_e tensor ranks of an
expert, k experts of a token, E experts, A query heads, K cached heads, D and V their widths.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hocket.cost.local import divided, together
from hocket.cost.serving_shape import latent_width
from hocket.spec.model_shape import Attention, BlockShape
from hocket.spec.serving import SPLIT_TOKENS


class StepLoad(NamedTuple):
    """What one step does: prompt tokens with their mean attended context, decoding sequences with
    theirs. Of a replica, or of one of its data ranks; numbers or arrays."""

    prefill_tokens: Any
    prefill_context: Any
    decode_batch: Any
    decode_context: Any

    @property
    def tokens(self) -> Any:
        return self.prefill_tokens + self.decode_batch

    def of_data_rank(self, dp: Any) -> StepLoad:
        """The part of a replica's load that one of its `dp` data ranks has."""
        return self._replace(
            prefill_tokens=self.prefill_tokens / dp, decode_batch=self.decode_batch / dp
        )


class RankMatmul(NamedTuple):
    """Matmuls that run as one: [rows, k] x [k, n] of `experts` matrices of this rank, those that
    any token reaches; 1 and not `grouped`: a linear layer."""

    split: str
    rows: Any
    n: Any
    k: Any
    experts: Any = 1
    grouped: bool = False


def is_split(load: StepLoad, cp: Any, *, gpu: bool) -> Any:
    """Whether context ranks divide the tokens of a step, as `serving.engine` does: not few, and on
    a GPU no step that decodes alone."""
    split = load.tokens >= SPLIT_TOKENS * cp
    return split & (load.prefill_tokens > 0) if gpu else split


def own_tokens(load: StepLoad, cp: Any, *, gpu: bool) -> Any:
    """Tokens of a step that one context rank computes: its part, or all."""
    return np.where(is_split(load, cp, gpu=gpu), load.tokens / cp, load.tokens)


def fused_elements(block: BlockShape, at: Any, tokens: Any) -> list[Any]:
    """Elements read and written by each operation of a block between its matmuls, fused."""
    rows = [row for row in block.memory_bound if row.forward > 0]
    return [row.forward * tokens / (1 if row.split == "outside" else at.tp) for row in rows]


def rank_matmuls(block: BlockShape, at: Any, tokens: Any, imbalance: Any = 1.0) -> list[RankMatmul]:
    """Matmuls of a block on one rank, which computes so many tokens; `imbalance`: rows of the
    expert rank that gets most, over the mean."""
    found = []
    for same in together(block.products):
        first, columns = same[0], sum(p.n for p in same)
        rows = tokens * first.count
        if first.groups == 1:
            sizes = divided(first.split, columns, first.k, at.tp)
            found.append(RankMatmul(first.split, rows, *sizes))
            continue
        # As many tokens come from other ranks as leave; of tensor ranks that divide them, each
        # brings its part.
        rows = rows * at.expert_tp / at.tp
        sizes = divided(first.split, columns, first.k, at.expert_tp)
        held, chosen = _at_least_one(first.groups / at.ep), first.count / first.groups
        # By the tokens of all ranks that share the experts; one at least on a rank that gets one.
        reached = held * touched_share(min(chosen, 1.0), rows * at.ep / first.count)
        reached = np.maximum(reached, np.minimum(rows, 1.0))
        found.append(RankMatmul(first.split, rows * imbalance, *sizes, reached, grouped=True))
    return found


POPULARITY = 0.5
"""Variance of how often the experts of one layer are chosen, relative to the mean's square."""


def touched_share(chosen: Any, tokens: Any) -> Any:
    """Share of the experts that `tokens` tokens reach, each of which chooses a share `chosen`.

    Popularity differs between experts by a gamma distribution of variance `POPULARITY` (mean 1),
    so that an expert is reached by none with (1 + v x)^(-1/v) where evenly chosen ones are by
    exp(-x), x = -tokens log(1 - chosen).
    """
    drawn = -tokens * np.log1p(-np.minimum(chosen, 1 - 1e-9))
    found = 1 - (1 + POPULARITY * drawn) ** (-1 / POPULARITY)
    return np.maximum(found, np.minimum(chosen, tokens))


class RankCore(NamedTuple):
    """An attention core on one rank: query heads, heads whose keys and values it caches, their
    widths; `latent`: elements of the latent vector that it caches in their place, or 0."""

    heads: Any
    kv_heads: Any
    head_dim: int
    value_dim: int
    latent: int
    window: int | None

    @property
    def cached(self) -> Any:
        """Elements of one cached token."""
        return self.latent or self.kv_heads * (self.head_dim + self.value_dim)

    def seen(self, context: Any) -> Any:
        """Positions that a token attends to, of `context` before it."""
        return context if self.window is None else np.minimum(context, self.window)


def rank_core(core: Attention, block: BlockShape, at: Any) -> RankCore:
    whole = core.split == "outside"
    return RankCore(
        heads=core.heads if whole else _at_least_one(core.heads / at.tp),
        kv_heads=core.kv_heads if whole else _at_least_one(core.kv_heads / at.tp),
        head_dim=core.head_dim,
        value_dim=core.value_dim,
        latent=latent_width(core, block),
        window=core.window,
    )


def context_collectives(
    core: RankCore, at: Any, load: StepLoad, width: Any, *, gpu: bool
) -> list[tuple[str, Any]]:
    """Collectives of context ranks in one layer, as `serving.engine` has them, and their bytes:
    queries, keys and values of the step's tokens where they are divided, of `width` bytes an
    element; logarithms, and what each attended to, in fp32."""
    tokens, split = load.tokens, is_split(load, at.cp, gpu=gpu)
    result = 4.0 * tokens * core.heads * core.value_dim
    given = tokens * (core.heads * core.head_dim + core.cached) * width
    return [
        ("all-gather", np.where(split, given, 0.0)),
        ("all-gather", 4.0 * tokens * core.heads * at.cp),
        ("reduce-scatter", np.where(split, result, 0.0)),
        ("all-reduce", np.where(split, 0.0, result)),
    ]


def cached_elements(block: BlockShape, at: Any, length: Any = np.inf) -> Any:
    """Elements that one token leaves in the cache of one rank in a block, on average over a request
    of `length` tokens, of which layers with a window hold no more than it (vLLM's hybrid cache
    manager, TensorRT-LLM's cyclic cache); infinite: as if no layer had one."""
    total: Any = 0.0
    for core in block.attention:
        kept: Any = 1.0
        if core.window is not None:
            kept = np.where(np.isinf(length), 1.0, np.minimum(core.window / length, 1.0))
        total = total + rank_core(core, block, at).cached * kept
    return total / at.cp


def _at_least_one(value: Any) -> Any:
    return np.maximum(value, 1.0) if isinstance(value, np.ndarray) else max(value, 1)
