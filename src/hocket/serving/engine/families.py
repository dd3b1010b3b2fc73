"""Which models can be served from pages, and why another cannot.

A model fits if all that its layers keep of earlier tokens is what they hand to transformers'
attention interface, keys and values, and what they hand to transformers' cache as convolution and
recurrent states. Some layers keep something of another kind, and some families compute attention
themselves. What cannot be seen in the modules shows on
its proxy model: served in chunks, from scattered, shared blocks, preempted and restarted, it must
give the logits of a plain forward.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from hocket.models.failure import failure_place
from hocket.models.proxy import ProxyModel, proxy_of
from hocket.models.skeleton import config_of
from hocket.runtime.mesh import Mesh
from hocket.runtime.pipeline.stage import Stage
from hocket.serving.engine import attention
from hocket.serving.engine.refusal import no_attention, refuse
from hocket.serving.engine.runner import StageRunner
from hocket.serving.request import SamplingParams
from hocket.serving.scheduling.admission import Admission
from hocket.serving.scheduling.step import ALL, BatchRow, Snapshot, StepPlan
from hocket.spec.errors import HocketError, ModelError

__all__ = ["no_attention", "refuse", "self_check"]

_TOLERANCE = 1e-4
_BLOCK = 4


def self_check(config: Any) -> float:
    """Serve the tiny proxy model of a configuration, and compare with its plain forward.

    Args:
        config: a transformers configuration, or a dictionary of one.

    Returns:
        The largest difference of a logit, as a share of the largest logit.

    Raises:
        ModelError: the model cannot be served, with the reason.
    """
    if isinstance(config, dict):
        config = config_of(config)
    kind = config.model_type
    if not hasattr(config, "num_hidden_layers"):
        raise ModelError(
            f"{kind!r} is made of several models; hocket serves the language model alone",
            hint="the text configuration of the model",
        )
    proxy = proxy_of(config)
    plain: Any = proxy.build(attention="eager")
    refuse(proxy.config, plain)
    try:
        module = _paged(proxy, plain)
    except ModelError as error:
        # Falcon looks its own attention class up by the implementation's name.
        if attention.NAME in error.message:
            raise no_attention(config, plain) from None
        raise
    try:
        worst = _compare(proxy, plain, module)
    except HocketError:
        raise
    except Exception as error:  # a family may fail in its own way on packed tokens
        raise ModelError(
            f"{kind!r} cannot be served: its code fails on tokens of several sequences in one "
            f"row without a mask, in {failure_place(error)}"
        ) from error
    if not worst <= _TOLERANCE:
        raise ModelError(
            f"{kind!r} cannot be served: from pages its proxy model gives other logits than its "
            f"plain forward (they differ by {worst:.1e} of the largest); its layers keep or read "
            "something besides keys, values and positions of earlier tokens"
        )
    return worst


def _paged(proxy: ProxyModel, plain: nn.Module) -> nn.Module:
    """The proxy model with paged attention and the values of `plain`."""
    module = proxy.build(attention=attention.NAME)
    module.load_state_dict(plain.state_dict())
    own = dict(module.named_buffers())
    for name, buffer in plain.named_buffers():
        own[name].copy_(buffer)
    return module


@torch.no_grad()
def _compare(proxy: ProxyModel, plain: Any, module: nn.Module) -> float:
    """Serve sequences in random chunks; two share a beginning, one is preempted half-way."""
    draw = random.Random(5)
    longest = 30
    vocabulary = int(plain.get_input_embeddings().weight.shape[0])
    first = [draw.randrange(3, vocabulary) for _ in range(longest)]
    sequences = [first, [draw.randrange(3, vocabulary) for _ in range(21)], [7]]
    sequences.append(first[: 3 * _BLOCK] + [draw.randrange(3, vocabulary) for _ in range(9)])
    runner = StageRunner(
        Stage(module), Mesh.single(), proxy.config, block_size=_BLOCK, max_num_seqs=len(sequences),
        max_num_batched_tokens=64, max_model_len=longest + _BLOCK,
    )  # fmt: skip
    runner.num_snapshots = 1
    runner.allocate(48)
    expected = [
        plain(input_ids=torch.tensor([tokens]), use_cache=False).logits[0] for tokens in sequences
    ]
    served = _Served(runner, sequences, draw)
    worst = served.compare(expected)
    scale = max(float(e.abs().max()) for e in expected)
    return worst / max(scale, 1e-6)


class _Served:
    """A scheduler of a few lines: random chunks, one shared beginning, one preemption."""

    def __init__(
        self, runner: StageRunner, sequences: list[list[int]], draw: random.Random
    ) -> None:
        self.runner, self.sequences, self.draw = runner, sequences, draw
        self.free = list(range(48))
        draw.shuffle(self.free)
        self.done = [0] * len(sequences)
        self.blocks: list[list[int]] = [[] for _ in sequences]

    def compare(self, expected: list[Tensor]) -> float:
        """The largest difference of a logit, over every position of every sequence."""
        worst = 0.0
        preempted = False
        admitted = set(range(len(self.sequences) - 1))
        lent = len(self.sequences) - 1
        for number in range(200):
            released: list[int] = []
            admissions = [self._admit(slot) for slot in sorted(admitted)]
            admitted = set()
            if not preempted and self.done[1] > 8:
                preempted = True
                self.free = self.blocks[1] + self.free
                self.done[1], self.blocks[1] = 0, []
                released.append(1)
                admissions.append(self._admit(1))
            if not self.blocks[lent] and self.done[0] >= 3 * _BLOCK:
                # The blocks of the first sequence's beginning, computed already, are shared.
                self.blocks[lent] = self.blocks[0][:3]
                self.done[lent] = 3 * _BLOCK
                admissions.append(self._admit(lent))
                shared = list(self.blocks[lent])
            else:
                shared = []
            counts = {
                slot: min(self.draw.choice((1, 1, 1, 2, 5)), len(tokens) - self.done[slot])
                for slot, tokens in enumerate(self.sequences)
                if self.done[slot] < len(tokens) and (slot != lent or self.blocks[lent])
            }
            if not counts:
                if all(d == len(s) for d, s in zip(self.done, self.sequences, strict=True)):
                    break
                continue
            rows: list[BatchRow] = []
            tokens: list[int] = []
            snapshots: list[Snapshot] = []
            for slot in sorted(counts, key=lambda slot: counts[slot] != 1):
                count, done = counts[slot], self.done[slot]
                need = -(-(done + count) // _BLOCK) - len(self.blocks[slot])
                new = [self.free.pop() for _ in range(need)]
                self.blocks[slot] += new
                if slot == lent and shared:
                    new = shared + new
                    snapshots.append(Snapshot(len(rows), load=0))
                if slot == 0 and done < 3 * _BLOCK <= done + count:
                    snapshots.append(Snapshot(len(rows), save=0, cut=3 * _BLOCK - done))
                rows.append(BatchRow(slot, done, count, ALL, new))
                tokens += self.sequences[slot][done : done + count]
                self.done[slot] += count
            plan = StepPlan(number, rows, tokens, admissions, released, snapshots)
            logits = self.runner.run(plan)
            at = 0
            for row in rows:
                want = expected[row.slot][row.start : row.start + row.count]
                found = logits[at : at + row.count]
                difference = (want - found).abs().max()
                worst = max(worst, float(difference.nan_to_num(nan=float("inf"))))
                at += row.count
        return worst

    def _admit(self, slot: int) -> Admission:
        tokens = self.sequences[slot]
        return Admission(
            slot=slot, sampling=SamplingParams(max_new_tokens=1, seed=0), prompt_length=len(tokens)
        )
