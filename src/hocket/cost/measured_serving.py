"""Serving on a measured machine: seconds of one engine step of a replica, and what its ranks hold.

A step computes the new tokens of all its requests packed in one row, without padding:

    products      of T rows, those that read the same tensor in one; of few rows by the kernel that
                  reads a weight once, from wherever all weights of the rank have room
    the rest      of a layer like Llama's a few kernels; else the model's own operations, one call
                  each, of so many bytes
    attention     kernels by what is attended to: rows that decode, chunks of prompts
    head, sample  of the rows alone whose next token is asked for
    messages      two sums a layer over tp, the hidden state to the next stage, the plan to all

Nothing is fitted to a layout: sizes come from the model's traced shape, calls from the engine's
code, seconds from `hocket probe`. What this machine does for HTTP and text is left out.

Legend: T tokens of a step, b requests that decode, c their mean context, n tokens of prompts, k
their mean attended context, t tensor ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hocket.cost.measured_links import MeasuredLinks
from hocket.cost.measured_rates import Rates
from hocket.cost.serving_rank import (
    RankCore,
    RankMatmul,
    StepLoad,
    context_collectives,
    fused_elements,
    own_tokens,
    rank_matmuls,
)
from hocket.cost.serving_replica import ServingReplica
from hocket.cost.terms import Floats
from hocket.spec.model_shape import BlockShape
from hocket.spec.step_prices import Collective

STEP_CALLS, ROW_CALLS = 700, 24
"""Small operations that a step costs outside its layers, and for each row that decodes:
planning and telling it, the plan's indices, positions, the model's own code around its layers, the
sampled rows. As it came out on one machine with a model of four layers."""

ATTENTION_CALLS, ATTENTION_VIEWS = 28, 22
"""Operations and views in which one layer writes its keys and values and attends, decoding."""

OWN_VIEWS = 30
"""Views that a layer's own code takes besides: heads, rotary halves, parts of merged products;
counted in a Llama's, the trace of a model holds none."""

SCORE_PASSES = 6
"""Times that decoding reads or writes each score: mask, largest, difference, exponential, sum."""

FEW = 64
"""Rows up to which products are the kernel's."""

LAYER = (3, 1, 2, 1)
"""Products of a layer like Llama's that read one tensor: query, key and value; the attention's end;
gate and up; the end."""

LLAMA_KERNELS = 7
"""Of such a layer with everything fused: two norms, two rotations, two sums, the gate."""

LAYER_CALLS, WHOLE_CALLS = 20, 2
"""Calls of a kernel that such a layer takes as long as, besides what it computes: where prompts are
read, and where up to `FEW` rows decode, in one call."""

SMALL = 512
"""Bytes of a plan or a result between ranks."""


class MeasuredServing:
    """Prices of one replica, as `simulation.traffic` asks for them.

    Args:
        replica: what it is.
        rates, links: of the machine.
        slowdown: how many times longer a rank takes because of those that compute at the same time.
    """

    def __init__(
        self, replica: ServingReplica, rates: Rates, links: MeasuredLinks, slowdown: float = 1.0
    ) -> None:
        self.replica = replica
        self.rates = rates
        self.links = links
        self.slowdown = slowdown
        self._calls = {d.operation: d.forward for d in rates.measured.dispatch}
        measured = {one.name for one in rates.measured.kernels}
        self._few = "half" if replica.half else "rows" if replica.dtype == "fp32" else ""
        self._kernels = measured >= {self._few, "decode", "chunk", "call"}
        self._known: dict[StepLoad, tuple[float, float]] = {}

    def _called(self, operation: str) -> float:
        """One small operation without autograd, in seconds."""
        return self._calls.get(operation, 0.0)

    @property
    def stages(self) -> int:
        return self.replica.layout.pp

    def step_seconds(self, prefill_tokens: Any, prefill_context: Any, decode_batch: Any,
                     decode_context: Any) -> Floats:  # fmt: skip
        """Of a step through every stage. Arguments broadcast."""
        return self._each(0, prefill_tokens, prefill_context, decode_batch, decode_context)

    def stage_seconds(self, prefill_tokens: Any, prefill_context: Any, decode_batch: Any,
                      decode_context: Any) -> Floats:  # fmt: skip
        """Of a step on its slowest stage."""
        return self._each(1, prefill_tokens, prefill_context, decode_batch, decode_context)

    def prefill_seconds(self, tokens: int, chunk: int) -> float:
        """Of a prompt alone, in chunks of at most `chunk` tokens, to its first token.

        With several stages its chunks are on their way at the same time.
        """
        chunks = [min(chunk, tokens - at) for at in range(0, tokens, chunk)]
        starts = [sum(chunks[:number]) for number in range(len(chunks))]
        dp = self.replica.layout.dp  # ranks, of which one has the prompt
        attended = zip(chunks, starts, strict=True)
        each = [self._step(dp * n, first + n / 2, 0.0, 1.0) for n, first in attended]
        slowest = [on_one for _, on_one in each]
        return sum(slowest[:-1]) + each[-1][0] if self.stages > 1 else sum(all_ for all_, _ in each)

    def decode_seconds(self, batch: float, context: float) -> float:
        """Of a round that gives each of `batch` requests a token."""
        parts = min(max(batch, 1.0), float(self.stages))
        most = max(batch / parts, float(self.replica.layout.dp))  # one on the rank with the most
        through, slowest = self._step(0.0, 0.0, most, context)
        return max(through, parts * slowest)

    def _each(self, which: int, *arguments: Any) -> Floats:
        n, k, b, c = np.broadcast_arrays(*(np.asarray(a, dtype=np.float64) for a in arguments))
        flat = zip(n.ravel(), k.ravel(), b.ravel(), c.ravel(), strict=True)
        found = [self._step(*map(float, one))[which] for one in flat]
        return np.array(found, dtype=np.float64).reshape(n.shape)

    # --- one step ----------------------------------------------------------------------------

    def _step(self, n: float, k: float, b: float, c: float) -> tuple[float, float]:
        """(through all stages, on the slowest) of n prompt tokens and b decoding requests."""
        step = StepLoad(n, k, b, c).of_data_rank(self.replica.layout.dp)
        found = self._known.get(step)
        if found is None:
            each = [self._stage(stage, step) for stage in range(self.stages)]
            found = self._known[step] = (sum(each), max(each))
        return found

    def _stage(self, stage: int, step: StepLoad) -> float:
        replica = self.replica
        if step.tokens <= 0:
            return 0.0
        kinds = replica.stages[stage]
        work = wait = 0.0
        for kind in dict.fromkeys(kinds):
            one, asleep = self._block(stage, kind, step)
            work += kinds.count(kind) * one
            wait += kinds.count(kind) * asleep
        work += (STEP_CALLS + ROW_CALLS * step.decode_batch) * self._called("add")
        hidden = round(step.tokens * replica.shape.hidden * replica.state_bytes)
        sent = [hidden] if stage + 1 < self.stages else []
        if replica.layout.world_size > 1:  # the plan, and from the last stage the result
            sent.append(SMALL)
        for nbytes in sent:
            more, asleep = _both(self.links.message(nbytes))
            work, wait = work + more, wait + asleep
        return work * self.slowdown + wait

    def _block(self, stage: int, kind: str, step: StepLoad) -> tuple[float, float]:
        """(a processor's seconds, waiting) of one block."""
        replica, rates, layout = self.replica, self.rates, self.replica.layout
        block, tp = replica.blocks[kind], layout.tp
        # A prompt's last chunk asks for one row; which it is in, the mean does not know.
        head = max(step.decode_batch, 1.0)
        tokens = head if kind == "head" else float(own_tokens(step, layout.cp, gpu=not replica.cpu))
        held = float(replica.weight_bytes(stage))
        work = sum(self._matmul(one, held) for one in rank_matmuls(block, layout, tokens))
        work += self._between(
            kind, tokens, whole=not step.prefill_tokens and step.decode_batch <= FEW
        )
        for core in replica.cores[kind]:
            work += self._attention(core, step, held) / layout.cp
        sums: list[Collective | None] = []
        hidden = round(tokens * replica.shape.hidden * replica.state_bytes)
        experts = [p for p in block.products if p.groups > 1]
        whole = bool(experts) and layout.etp is not None and tp > 1
        if experts and layout.ep > 1:  # there and back, of the tokens that this rank brings
            size = hidden * max(1, round(experts[0].count)) // (tp if whole else 1)
            sums += [self.links.collective("all-to-all", "expert", size, layout.ep)] * 2
            sums.append(self.links.collective("all-to-all", "expert", SMALL, layout.ep))
        if whole:  # each expert is: tensor ranks divide the tokens
            sums.append(self.links.collective("all-gather", "tp", hidden, tp))
        if tp > 1:
            count = sum(p.split == "row" and not (whole and p.groups > 1) for p in block.products)
            if kind == "embedding":
                count = int(any(w.split == "vocab" for w in block.weights))
            summed = self.links.sum if self._kernels else self.links.all_reduce
            sums += [summed("tp", hidden, tp)] * count
        for core in replica.cores[kind] if layout.cp > 1 else ():
            each = context_collectives(core, layout, step, replica.state_bytes, gpu=not replica.cpu)
            for name, size in each:
                if size > 0:
                    sums.append(self.links.collective(name, "cp", round(float(size)), layout.cp))
        if kind == "head":
            columns = replica.shape.vocab / tp
            work += rates.stream(tokens * columns * 4)
            if tp > 1:  # the best of each rank
                size = round(tp * 16 * tokens)
                sums.append(self.links.collective("all-gather", "tp", size, tp))
        pairs = [_both(one) for one in sums]
        return work + sum(own for own, _ in pairs), sum(asleep for _, asleep in pairs)

    def _between(self, kind: str, tokens: float, *, whole: bool) -> float:
        """What lies between the products of a block, attention left out.

        `whole`: the engine may compute a layer in one call.
        """
        rates, tp = self.rates, self.replica.layout.tp
        block = self.replica.shape.blocks[kind]
        # Traced in the weights' type.
        tokens *= self.replica.state_bytes / self.replica.element_bytes
        if self._kernels and _like_llama(block):
            sizes = [
                2.0 * elements for elements in fused_elements(block, self.replica.layout, tokens)
            ]
            calls = WHOLE_CALLS if whole else LAYER_CALLS
            return calls * rates.kernel_call() + sum(map(rates.stream, sizes))
        work = (len(block.products) + len(block.memory_bound)) * self._called("module")
        for row in block.unfused:
            if row.view == "eager" and not (kind == "head" and row.split == "vocab"):
                split = tp if row.split in ("inside", "vocab", "column", "row") else 1
                each = 2.0 * row.forward * tokens / split / max(row.kernels, 1)
                work += row.kernels * max(rates.stream(each), self._called("add"))
        return work + len(self.replica.cores[kind]) * OWN_VIEWS * self._called("view")

    def _matmul(self, one: RankMatmul, held: float) -> float:
        """Of matmuls that run as one, among `held` bytes of weights."""
        rates = self.rates
        sizes = (one.rows / one.experts, one.n, one.k)
        m, wide, deep = (max(1, round(size)) for size in sizes)
        nbytes = float(wide * deep * self.replica.element_bytes)
        few = rates.rows(m, nbytes, held, self._few) if self._kernels and m <= FEW else None
        if few is not None and not one.grouped:
            return few
        # The engine stores weights in fp32 as [in, out].
        form = "nn" if self._kernels and self._few == "rows" else "nt"
        seconds = max(rates.product(form, m, wide, deep), rates.stream(nbytes))
        if self.replica.half:  # what goes in is rounded to bf16, what comes out made fp32
            seconds += rates.stream(6.0 * m * deep) + rates.stream(6.0 * m * wide)
        return float(one.experts * (seconds + self._called("linear")))

    def _attention(self, core: RankCore, step: StepLoad, held: float) -> float:
        """One layer's, in a stage that holds so many bytes of weights.

        Rows that decode attend to latent vectors as to one key/value head that is as wide; what
        makes queries and values fit them is estimated as the matmul that expands keys and values.
        """
        rates, replica = self.rates, self.replica
        heads, kv_heads = core.heads, core.kv_heads
        rows, prompt = step.decode_batch, step.prefill_tokens
        seen, attended = (
            float(max(1.0, core.seen(context)))
            for context in (step.decode_context, step.prefill_context)
        )
        by_kernel = self._kernels and core.head_dim == core.value_dim
        latent = core.latent
        wide = core._replace(head_dim=latent, value_dim=latent) if latent else core
        cached_heads = 1 if latent else kv_heads
        work = 0.0
        if not by_kernel:
            work += ATTENTION_CALLS * self._called("add") + ATTENTION_VIEWS * self._called("view")
        if rows and self._kernels and wide.head_dim == wide.value_dim:
            # What lies between two visits of a layer's keys is that of so many layers.
            own = 8.0 * rows * cached_heads * seen * wide.head_dim
            layers = max(1.0, held / own)
            known = rates.kernel("decode", (rows, heads, cached_heads, seen, wide.head_dim, layers))
            assert known is not None
            work += known[0]
        elif rows:
            blocks = rows * -(-seen // replica.block_size)
            width = wide.head_dim + wide.value_dim
            cached = rows * seen * cached_heads * width * replica.state_bytes
            group = max(1, heads // cached_heads)
            one = rates.product("nn", group, replica.block_size, wide.head_dim)
            other = rates.product("nn", group, wide.value_dim, replica.block_size)
            work += max(blocks * cached_heads * (one + other), rates.stream(cached))
            work += rates.streams(SCORE_PASSES * rows * heads * seen * 4, SCORE_PASSES)
        if prompt:
            length = max(2, round(prompt))
            if by_kernel:
                known = rates.kernel("chunk", (heads, kv_heads, length, core.head_dim))
            else:
                known = rates.kernel("attention", (1, heads, length, core.head_dim))
            forward = (
                known[0]
                if known
                else 2 * heads * rates.product("nn", length, length, core.head_dim)
            )
            # The kernel's own area is a triangle: each token sees half of them on average.
            work += forward * attended / max(prompt / 2, 1.0)
        return work


def _like_llama(block: BlockShape) -> bool:
    """Whether the engine computes a layer by kernels from product to product: two norms, one group
    of heads turned by position, a gate by SiLU."""
    sources = [p.input or p.name for p in block.products]
    together = tuple(sources.count(one) for one in dict.fromkeys(sources))
    kernels = sum(row.kernels for row in block.memory_bound if row.forward)
    return together == LAYER and len(block.attention) == 1 and kernels == LLAMA_KERNELS


def _both(one: Collective | None) -> tuple[float, float]:
    return (0.0, 0.0) if one is None else (one.give + one.take, one.wait)
