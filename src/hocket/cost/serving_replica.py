"""ServingReplica: what the ranks of one replica of a server hold, on GPUs and on CPU cores.

Weights and cache follow from the model's shape and the layout. A step's bytes are those of the
layer with the widest tensors, as the engine's code makes them, or of the logits.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

from hocket.cost.local import divided, held_elements, stacked_experts
from hocket.cost.measured_rates import BYTES
from hocket.cost.measured_stage import ENDS, SHARED, stage_blocks, weights
from hocket.cost.served_experts import expert_bytes
from hocket.cost.serving_rank import RankCore, cached_elements, rank_core, rank_matmuls
from hocket.cost.serving_shape import cached_shape
from hocket.spec.capabilities import MULTIPLE_OF_8_BITS, NOT_QUANTIZED, STACKED
from hocket.spec.cut import stage_layers
from hocket.spec.layout import Layout
from hocket.spec.model_shape import BlockShape, MatrixProduct, ModelShape

TOKEN_BYTES = 8
"""Of a token's number and of its position."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingReplica:
    """What one replica is.

    Attributes:
        shape: of the model, traced in `dtype`. layout: as `spec.serving.replica_layout` has it.
        dtype: `fp32` or `bf16`. quantization: of the weights of linear layers, None or `fp8`.
        block_size: tokens of a block of the cache. cpu: whether its ranks compute on a CPU.
        routing_bytes: of a routing weight; fp32 unless it is known, as most families have it.
        cached_bytes: of an entry of the cache; 0: as of activations.
    """

    shape: ModelShape
    layout: Layout
    dtype: str = "fp32"
    quantization: str | None = None
    block_size: int = 16
    cpu: bool = True
    routing_bytes: int = 4
    cached_bytes: int = 0

    @property
    def element_bytes(self) -> int:
        """Of weights."""
        return BYTES[self.dtype]

    @property
    def half(self) -> bool:
        """Whether weights are in bf16 under a computation in fp32: on a CPU, of a model without
        experts."""
        products = (p for block in self.shape.blocks.values() for p in block.products)
        return self.cpu and self.dtype == "bf16" and all(p.groups == 1 for p in products)

    @functools.cached_property
    def state_bytes(self) -> int:
        """Of activations, and of what ranks send each other."""
        return BYTES["fp32"] if self.half else self.element_bytes

    @functools.cached_property
    def stages(self) -> tuple[tuple[str, ...], ...]:
        """The kinds of the blocks of each stage, cut as the runtime cuts."""
        shape, number = self.shape, self.layout.pp
        bounds = shape.cut(self.layout.pipeline_split, number, cuda=not self.cpu)
        return tuple(
            tuple(stage_blocks(shape, stage_layers(bounds, s), s == 0, s == number - 1))
            for s in range(number)
        )

    @functools.cached_property
    def blocks(self) -> dict[str, BlockShape]:
        """By kind, with the key/value heads that are cached."""
        return cached_shape(self.shape).blocks

    @functools.cached_property
    def cores(self) -> dict[str, list[RankCore]]:
        """The attention of the blocks of each kind, on one rank."""
        at = self.layout
        return {k: [rank_core(c, b, at) for c in b.attention] for k, b in self.blocks.items()}

    # --- memory ------------------------------------------------------------------------------

    def weight_bytes(self, stage: int) -> int:
        """Of the weights on the largest tensor rank of a stage."""
        kinds = self.stages[stage]
        experts = stacked_experts(p for kind in kinds for p in self.shape.blocks[kind].products)
        few, total = self._eight_bit_weights(kinds), 0
        for one in weights(self.shape, kinds):
            held, product = held_elements(one, self.layout, experts), few.get(one.name)
            own = None if product is None else _eight_bit_bytes(held, product, self.layout)
            total += held * self.element_bytes if own is None else own
        return total

    def _eight_bit_weights(self, kinds: Iterable[str]) -> dict[str, MatrixProduct]:
        """Names of the weights of a stage that are stored in 8 bits where their sizes allow it
        (`runtime.fp8_weights`), with the matmul of each."""
        found: dict[str, MatrixProduct] = {}
        if self.quantization is None:
            return found
        for block in (self.shape.blocks[kind] for kind in kinds if kind not in ENDS):
            for p in block.products:
                if p.groups == 1 and p.name.rpartition(".")[2] not in NOT_QUANTIZED:
                    found[f"{p.name}.weight"] = p
                elif p.groups > 1:
                    own = [f"{p.name}.{stack}" for stack in STACKED]
                    same = p.groups * p.n * p.k
                    names = [w.name for w in block.weights if w.name in own and w.elements == same]
                    found |= dict.fromkeys(names, p)
        return found

    def cache_bytes(self, stage: int) -> int:
        """Of one cached token on a rank of a stage; over context ranks the mean of them, of which
        each has its tokens of every block."""
        elements = sum(cached_elements(self.blocks[k], self.layout) for k in self.stages[stage])
        return round(elements * (self.cached_bytes or self.state_bytes))

    def stage_bytes(self, tokens: int, rows: int) -> list[dict[str, int]]:
        """Of each stage the bytes of `weights`, of the largest `step` (of so many tokens, after
        which the tokens of so many rows are drawn) and of one cached `token`, on the rank with
        the most."""
        return [
            {
                "weights": self.weight_bytes(stage),
                "step": self.step_bytes(stage, tokens, rows),
                "token": self.cache_bytes(stage),
            }
            for stage in range(self.layout.pp)
        ]

    def step_bytes(self, stage: int, tokens: int, rows: int) -> int:
        """What a rank makes and drops in the largest step, at its peak: in the layer with
        the widest tensors, or in fp32 logits, which come after it."""
        kinds = set(self.stages[stage])
        blocks = [self.blocks[kind] for kind in kinds if kind != "head"]
        layers = max((self._layer_elements(block) for block in blocks), default=0)
        own = 0.0 if self.cpu else 2 * TOKEN_BYTES / self.state_bytes
        if not self.cpu:  # where kernels read and write heads in place
            layers = max([layers, *map(self._attention_elements, blocks)])
        head = rows * self.shape.vocab / self.layout.tp * 4 if "head" in kinds else 0
        hidden, width = self.shape.hidden, self.state_bytes
        sizes = {"hidden": hidden, "width": width, "weight": self.routing_bytes}
        experts = max((expert_bytes(b, self.layout, tokens, **sizes) for b in blocks), default=0.0)
        standing = own + 4 * hidden + (0 if self.cpu else self._tables) if experts else 0.0
        most = max(tokens * (layers + own) * width, tokens * standing * width + experts)
        return round(max(most, head))

    @functools.cached_property
    def _tables(self) -> float:
        """Of one token, elements of cosines and sines."""
        rows = {row.name: row for one in self.shape.blocks.values() for row in one.saved}
        return sum(row.bytes for row in rows.values() if row.view == SHARED) / self.state_bytes

    def _layer_elements(self, block: BlockShape) -> float:
        """Of one token, at the peak of a block; without its experts (`expert_bytes`)."""
        linear = (one for one in rank_matmuls(block, self.layout, 1) if not one.grouped)
        sizes = (one.rows * one.n for one in linear)
        return 2 * max(sizes, default=0) + 4 * self.shape.hidden

    def _attention_elements(self, block: BlockShape) -> float:
        """Of one token, at the peak of attention as the model's own code does it: in the
        rotation of the queries (two products and their sum), or when its result is multiplied."""
        tables = self._tables
        normed = any(".q_norm." in f".{w.name}" for w in block.weights)
        found = 0.0
        for one in self.cores[block.kind]:
            query, key = one.heads * one.head_dim, one.kv_heads * one.head_dim
            projected = query + key + one.kv_heads * one.value_dim
            standing = 3 * self.shape.hidden + tables + projected
            rotated = (query + key if normed else 0) + 3 * query
            multiplied = query + key + one.heads * one.value_dim + self.shape.hidden
            found = max(found, standing + max(rotated if tables else 0, multiplied))
        return found


def _eight_bit_bytes(held: int, product: MatrixProduct, layout: Layout) -> int | None:
    """Of a weight of `held` elements on one rank, with a scale of each output; None: its sizes keep
    its precision."""
    stacked = product.groups > 1
    tp, matrices = (layout.expert_tp, product.groups // layout.ep) if stacked else (layout.tp, 1)
    k = int(divided(product.split, product.n, product.k, tp)[1])
    outputs = held // max(1, k)
    odd = outputs // matrices % MULTIPLE_OF_8_BITS or k % MULTIPLE_OF_8_BITS
    return None if odd else held + 4 * outputs
