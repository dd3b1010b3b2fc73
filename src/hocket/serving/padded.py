"""Engine: generation by a model's own code and cache, over tensor- and pipeline-parallel ranks.

One round makes one token per row. It passes through the stages in order; the last one chooses
the tokens and tells them to all others:

    first stage    tokens [B, S] -> embedding, layers -> hidden        (1)
    next stages    hidden [B, S, H] received, layers  -> hidden        (2)
    last stage     norm, head -> logits of the last position -> tokens (3)
    all            tokens [B], broadcast over the pipeline             (4)

How rows run together is `Rows`, which `serving.row_trial` chooses: padded on the left and masked
(S is the longest prompt in the first round and 1 afterwards), in batches of equal length, or each
by itself and whole in every round.

Legend: B rows, S positions of one round, H hidden, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from hocket.runtime import collectives
from hocket.runtime.collectives import all_gather
from hocket.runtime.mesh import Axis, Mesh
from hocket.runtime.pipeline.cut import Missing
from hocket.runtime.pipeline.stage import Stage
from hocket.runtime.record import Recorder
from hocket.runtime.tensor_parallel.layers import VocabParallelHead
from hocket.serving.engine.draw import uniform
from hocket.serving.request import SamplingParams, check_prompts, refuse_replicas
from hocket.spec.plan import StagePlan

Rows = Literal["padded", "equal", "whole"]

OnTokens = Callable[[int, "list[int | None]"], None]
"""Called with the number of the round and, per row, its token; None for a row that has ended."""


class Engine:
    """Generation on one rank; every rank of the mesh makes the same calls.

    Args:
        stages: the stages this rank holds, with their values, in order.
        mesh: the ranks.
        config: the model's configuration.
        stage_ranks: stage to pipeline index that holds it. None: stage i lies on index i.
        positions: positions the model has; None: no bound.
        replicas: data ranks may each continue prompts of their own.
        rows: how rows run together. Where rows of several lengths are padded or a cache is kept,
            the model's code must give what it gives for each row by itself.

    Raises:
        LayoutError: there are data ranks, and `replicas` is not set.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        mesh: Mesh,
        config: Any,
        *,
        stage_ranks: Sequence[int] | None = None,
        positions: int | None = None,
        replicas: bool = False,
        rows: Rows = "whole",
    ) -> None:
        if not replicas:
            refuse_replicas(mesh.layout)
        self.stages = {stage.index: stage for stage in stages}
        self.mesh = mesh
        self.config = config
        num_stages = stages[0].num_stages
        self.stage_ranks = tuple(range(num_stages)) if stage_ranks is None else tuple(stage_ranks)
        self.positions = positions
        self.vocabulary = VocabularyRange(axis=mesh.axis("tp"))
        self.rows = rows
        argument = model_cache_argument(stages[0].module)
        self.cache_argument = "past_key_values" if argument is None else argument
        for stage in stages:
            stage.module.eval()
            if stage.is_last:
                self.vocabulary = _vocabulary(stage, mesh)

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        options: SamplingParams,
        on_tokens: OnTokens | None = None,
    ) -> list[list[int]]:
        """The tokens that follow each prompt, without it and without the token that ended it.

        Raises:
            OptionError: an empty prompt, a token outside the vocabulary, or more positions than
                the model has.
        """
        check_prompts(prompts, options, int(self.config.vocab_size), self.positions)
        batches = [self._batch(rows, prompts) for rows in _together(prompts, self.rows)]
        order = torch.tensor([row for batch in batches for row in batch.rows])
        found: list[list[int]] = [[] for _ in prompts]
        ended = [False] * len(prompts)
        for count in range(options.max_new_tokens):
            chosen = self._round(batches, order.argsort(), options, count)
            emitted: list[int | None] = []
            for row, token in enumerate(chosen.tolist()):
                ended[row] = ended[row] or token in options.stop
                if not ended[row]:
                    found[row].append(token)
                emitted.append(None if ended[row] else token)
            if on_tokens is not None:
                on_tokens(count, emitted)
            if all(ended):
                break
            for batch in batches:
                batch.append(chosen[batch.rows])
        return found

    def _batch(self, rows: list[int], prompts: Sequence[Sequence[int]]) -> PromptBatch:
        longest = max(len(prompts[row]) for row in rows)
        tokens = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros(len(rows), longest, dtype=torch.long)
        for place, row in enumerate(rows):
            tokens[place, longest - len(prompts[row]) :] = torch.tensor(prompts[row])
            mask[place, longest - len(prompts[row]) :] = 1
        device = self.mesh.device
        caches: dict[int, StageCache] | None = None
        if self.rows != "whole":
            caches = {
                index: StageCache(
                    self.config, held_layers(stage.module, stage.plan) or range(self._num_layers)
                )
                for index, stage in self.stages.items()
            }
        return PromptBatch(rows, tokens.to(device), mask.to(device), caches)

    @property
    def _num_layers(self) -> int:
        return int(self.config.get_text_config(decoder=True).num_hidden_layers)

    def _round(
        self, batches: Sequence[PromptBatch], place: Tensor, options: SamplingParams, count: int
    ) -> Tensor:
        """One token per row, known on every rank: [B]. `place`: of each row in the batches."""
        axis, recorder = self.mesh.axis("pp"), self.mesh.recorder
        chosen = batches[0].tokens.new_empty(len(place))
        logits = self.row_logits(batches, place)
        if logits is not None:  # (3)
            chosen = next_tokens(logits, options, count, self.vocabulary, recorder)
        collectives.broadcast(chosen, axis, recorder, source=self.stage_ranks[-1])  # (4)
        return chosen

    def row_logits(self, batches: Sequence[PromptBatch], place: Tensor) -> Tensor | None:
        """Of the last position of each row, [B, V of this rank]; None where the last stage is not
        here. `place`: of each row in the batches."""
        found = [self._logits(batch) for batch in batches]
        last = [logits for logits in found if logits is not None]
        return torch.cat(last)[place.to(self.mesh.device)] if last else None

    def _logits(self, batch: PromptBatch) -> Tensor | None:
        """Of the last position, [B, V of this rank]; None where the last stage is not here."""
        axis, recorder = self.mesh.axis("pp"), self.mesh.recorder
        here, given = axis.index, batch.given
        hidden: Tensor | None = None
        for index, where in enumerate(self.stage_ranks):
            if where != here:
                continue
            stage = self.stages[index]
            if index > 0 and self.stage_ranks[index - 1] != here:  # (2)
                hidden = torch.empty(
                    stage.hidden_shape(given), dtype=stage.dtype, device=self.mesh.device
                )
                collectives.irecv(hidden, axis, self.stage_ranks[index - 1], recorder).wait()
            cache: dict[str, Any] = {}
            if batch.caches is not None:
                cache = {self.cache_argument: batch.caches[index], "use_cache": True}
            output = stage.output(given, hidden, **cache, **_last_only(stage))  # (1)
            if stage.is_last:
                logits: Tensor = output.logits[:, -1]
                return logits
            hidden = output
            if self.stage_ranks[index + 1] != here:
                sent = hidden.contiguous()
                collectives.isend(sent, axis, self.stage_ranks[index + 1], recorder).wait()
        return None


class PromptBatch:
    """Rows that run together.

    Attributes:
        rows: which. tokens, mask: [B, S], so far. caches: by stage; None: the whole rows run.
        given: what the model is given in the next round.
    """

    def __init__(
        self,
        rows: list[int],
        tokens: Tensor,
        mask: Tensor,
        caches: dict[int, StageCache] | None,
    ) -> None:
        self.rows, self.tokens, self.mask, self.caches = rows, tokens, mask, caches
        self.given = self._given(tokens.shape[1])

    def append(self, chosen: Tensor) -> None:
        self.tokens = torch.cat([self.tokens, chosen.unsqueeze(-1)], dim=-1)
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.rows), 1)], dim=-1)
        self.given = self._given(self.tokens.shape[1] if self.caches is None else 1)

    def _given(self, last: int) -> dict[str, Tensor]:
        """The last tokens, their positions, and the mask of all; of whole rows the tokens alone, as
        a class may number them in its own way (RoBERTa from 2)."""
        if self.caches is None:
            return {"input_ids": self.tokens}
        positions = (self.mask.cumsum(dim=-1) - 1).clamp_min(0)
        return {
            "input_ids": self.tokens[:, -last:],
            "position_ids": positions[:, -last:],
            "attention_mask": self.mask,
        }


def _together(prompts: Sequence[Sequence[int]], rows: Rows) -> list[list[int]]:
    """The numbers of the rows that run together."""
    if rows == "padded":
        return [list(range(len(prompts)))]
    if rows == "whole":
        return [[row] for row in range(len(prompts))]
    found: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        found.setdefault(len(prompt), []).append(row)
    return list(found.values())


def model_cache_argument(module: nn.Module) -> str | None:
    """The argument in which a model's own code takes a `Cache` of transformers and fills it; None:
    it takes none, and what is passed under another name would be ignored."""
    hints = typing.get_type_hints(type(module).forward)
    for name in ("past_key_values", "cache_params"):
        if Cache in (hints.get(name), *typing.get_args(hints.get(name))):
            return name
    return None


def _last_only(stage: Stage) -> dict[str, Any]:
    """Ask the head for the last position alone, where the model can."""
    if not stage.is_last:
        return {}
    known = inspect.signature(stage.module.forward).parameters
    return {"logits_to_keep": 1} if "logits_to_keep" in known else {}


def _vocabulary(stage: Stage, mesh: Mesh) -> VocabularyRange:
    """The part of the vocabulary that the last stage's logits cover."""
    for module in stage.module.modules():
        if isinstance(module, VocabParallelHead):
            return VocabularyRange(
                axis=mesh.axis("tp"), start=module.start, sizes=tuple(module.sizes)
            )
    alone = mesh.axis("tp")
    return VocabularyRange(axis=type(alone)("tp"))


class StageCache(DynamicCache):
    """A cache for the layers `held`; the other layers' lengths are those of a held one.

    Args:
        config: the model's configuration, which tells the kind of each layer.
        held: indices of the layers of this stage, among all of the model's.
    """

    def __init__(self, config: Any, held: Collection[int]) -> None:
        super().__init__(config=config)
        self.held = sorted(held)
        # Of every kind (full, sliding window), the first held layer stands in for foreign ones.
        first: dict[type, Any] = {}
        for index in self.held:
            first.setdefault(type(self.layers[index]), self.layers[index])
        for index, layer in enumerate(self.layers):
            if index not in self.held:
                self.layers[index] = first.get(type(layer), layer)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen so far."""
        if self.held and layer_idx not in self.held:
            layer_idx = self.held[0]
        return int(super().get_seq_length(layer_idx))


def held_layers(module: nn.Module, plan: StagePlan | None) -> list[int]:
    """Indices of the layers that a cut module still holds."""
    if plan is None:
        return []
    layers = module.get_submodule(plan.layers)
    return [i for i, layer in enumerate(layers.children()) if not isinstance(layer, Missing)]


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
        [uniform(options.seed or 0, row, position) for row in range(scores.shape[0])],
        dtype=cumulative.dtype,
        device=cumulative.device,
    ).unsqueeze(-1)
    # The first token whose cumulative probability exceeds the draw: never one of probability 0.
    return torch.searchsorted(cumulative, at * cumulative[..., -1:], right=True).squeeze(-1)
