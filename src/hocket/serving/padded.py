"""Engine: generation of padded rows with a cache, over tensor- and pipeline-parallel ranks.

One round makes one token per row. It passes through the stages in order; the last one chooses
the tokens and tells them to all others:

    first stage    tokens [B, S] -> embedding, layers -> hidden        (1)
    next stages    hidden [B, S, H] received, layers  -> hidden        (2)
    last stage     norm, head -> logits of the last position -> tokens (3)
    all            tokens [B], broadcast over the pipeline             (4)

S is the longest prompt in the first round and 1 afterwards. Shorter prompts are padded on the
left and masked. Legend: B rows, S positions of one round, H hidden, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hocket.runtime import collectives
from hocket.runtime.mesh import Mesh
from hocket.runtime.pipeline.stage import Stage
from hocket.runtime.tensor_parallel.layers import VocabParallelHead
from hocket.serving.cache import StageCache, held_layers
from hocket.serving.request import SamplingParams, check_prompts, refuse_replicas
from hocket.serving.sampling import VocabularyRange, next_tokens

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
        device, rows = self.mesh.device, len(prompts)
        longest = max(map(len, prompts))
        tokens = torch.zeros(rows, longest, dtype=torch.long)
        mask = torch.zeros(rows, longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        tokens, mask = tokens.to(device), mask.to(device)
        positions = (mask.cumsum(dim=-1) - 1).clamp_min(0)
        caches = {
            index: StageCache(
                self.config, held_layers(stage.module, stage.plan) or range(self._num_layers)
            )
            for index, stage in self.stages.items()
        }
        found: list[list[int]] = [[] for _ in prompts]
        ended = [False] * rows
        for count in range(options.max_new_tokens):
            batch = {"input_ids": tokens, "position_ids": positions, "attention_mask": mask}
            chosen = self._round(batch, caches, options, count)
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
            tokens = chosen.unsqueeze(-1)
            positions = positions[:, -1:] + 1
            mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=-1)
        return found

    @property
    def _num_layers(self) -> int:
        return int(self.config.get_text_config(decoder=True).num_hidden_layers)

    def _round(
        self,
        batch: dict[str, Tensor],
        caches: dict[int, StageCache],
        options: SamplingParams,
        count: int,
    ) -> Tensor:
        """One token per row, known on every rank: [B]."""
        axis, recorder = self.mesh.axis("pp"), self.mesh.recorder
        here = axis.index
        hidden: Tensor | None = None
        chosen = batch["input_ids"].new_empty(batch["input_ids"].shape[0])
        for index, where in enumerate(self.stage_ranks):
            if where != here:
                continue
            stage = self.stages[index]
            if index > 0 and self.stage_ranks[index - 1] != here:  # (2)
                hidden = torch.empty(
                    stage.hidden_shape(batch), dtype=stage.dtype, device=self.mesh.device
                )
                collectives.irecv(hidden, axis, self.stage_ranks[index - 1], recorder).wait()
            output = stage.output(  # (1)
                batch, hidden, past_key_values=caches[index], use_cache=True, **_last_only(stage)
            )
            if stage.is_last:  # (3)
                chosen = next_tokens(
                    output.logits[:, -1], options, count, self.vocabulary, recorder
                )
                continue
            hidden = output
            if self.stage_ranks[index + 1] != here:
                sent = hidden.contiguous()
                collectives.isend(sent, axis, self.stage_ranks[index + 1], recorder).wait()
        collectives.broadcast(chosen, axis, recorder, source=self.stage_ranks[-1])  # (4)
        return chosen


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
