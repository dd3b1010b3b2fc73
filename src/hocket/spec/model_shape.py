"""ModelShape: what one model costs, as data.

One instance of each kind of block is described: its operations with their sizes, its parameters,
and what it saves for backward. Sizes are per token (times S where a size grows with the sequence),
so that one description serves every batch, sequence length and layout.

`split` says how tensor parallelism divides a thing over t ranks, and sequence parallelism:

    column   outputs n / t            row   inputs k / t          vocab  vocabulary rows / t
    inside   between column and row: everything / t
    outside  replicated: whole on every rank; activations / t under sequence parallelism
    whole    activations inside stacked experts: whole on every rank, also under sequence
             parallelism, where the experts' tokens are gathered
    expert   a weight of stacked experts: / ep, then / t

Context parallelism divides everything that is per token by cp. Expert parallelism leaves the rows
of a product per rank as they are (on average) and divides its `groups`.

`view` says with which kernels a thing is there:

    fused    norms, activations and residuals in one kernel each, flash attention
    core     in addition where attention is no flash kernel: scores and probabilities, times S
    eager    the model's own operations one by one, flash attention (PyTorch without a compiler)
    both     in `fused` and `eager`
    shared   in `eager`, once for all blocks that save it: tables of positions

Activations are of 16 bits: bytes are bytes, an element is two of them (fp32 counts as two
elements, a dropout mask as half of one).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

from hocket.spec import legality
from hocket.spec.cut import Cut, choose_cut, matmul_cost

SPLITS = ("column", "row", "vocab", "inside", "outside", "whole", "expert")
VIEWS = ("fused", "core", "eager", "both", "shared")
PREDICTION = "prediction"
"""The kind of a layer for multi-token prediction."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixProduct:
    """[tokens x count, k] x [k, n].

    Attributes:
        split: `column`, `row`, `vocab` or `outside`.
        count: rows for each token (experts reached by each token; 1 elsewhere).
        groups: matrices among which the rows are divided (experts; divided by ep).
        input: products with the same `input` read the same tensor, and may be run as one.
        bare: its matrix is a parameter of a module that is not a linear layer (a router, stacked
            experts), to which no adapter is added.
        frozen: its matrix is not trained, and backward leaves out the matrix's gradient.
        lora: it runs alongside another matmul (LoRA), whose communication is its own too; where
            `split` is `outside` it sees all tokens, also under sequence parallelism.
        ends: it is done after the last tensor that its block saves for backward: a block that is
            run again stops before it is, and what it would sum over ranks is not summed again.
        gathered: by tensor ranks: its output, split by column, or its input's gradient, by row.
    """

    name: str
    n: int
    k: int
    split: str
    count: float = 1.0
    groups: int = 1
    input: str = ""
    bare: bool = False
    frozen: bool = False
    lora: bool = False
    ends: bool = False
    gathered: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """Softmax(QK^T)V: heads, key/value heads, widths, and the window (None: all).

    `split` is `inside` where heads are divided over t, `outside` where every rank has them all.
    `masked`: its code hands PyTorch a mask of [rows, 1, S, S] (Falcon), which flash kernels reject.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool = True
    window: int | None = None
    split: str = "inside"
    masked: bool = False

    def on_rank(self, tp: int) -> Attention:
        """With the heads of one of `tp` ranks; of fewer key/value heads each rank has one."""
        if self.split != "inside":
            return self
        heads, kv_heads = max(1, self.heads // tp), max(1, self.kv_heads // tp)
        return dataclasses.replace(self, heads=heads, kv_heads=kv_heads)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handed:
    """What a recurrent layer hands on along the sequence, in elements of one row.

    `inputs`: of its convolution, its channels times `width`, which is one less than its taps.
    `state`: of its scan, in fp32; 0: it has none.
    """

    inputs: int
    state: int = 0
    width: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModuleRuns:
    """How a forward runs one module.

    Attributes:
        times: how often (HRM's layers: many times); learned: how often with a gradient.
        inputs, outputs: elements per token of its first input and its output. Llama 4's experts
            get all tokens once for each expert; Electra's embedding has a width of its own.
        reads: number of the tensor that is its first input: the same for all that read it.
        weighted: experts are given routing weights too (Llama 4's are given weighted tokens).
    """

    times: int
    learned: int
    inputs: int
    outputs: int
    reads: int = 0
    weighted: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryBound:
    """An operation limited by memory: elements read and written per token, forward and backward.

    `square`: per token and position of the sequence. `kernels`: launched in a forward;
    `backward_kernels`: in a backward.
    """

    name: str
    forward: float
    backward: float
    split: str
    kernels: int = 1
    backward_kernels: int = 1
    square: bool = False
    view: str = "fused"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """Bytes held per token from forward to backward (`square`: times sequence length as well).

    `selective`: not held under selective recompute (the attention core). Under full recompute a
    block holds none of its entries, but what it was given: hidden x 2 bytes, `outside`.
    """

    name: str
    bytes: float
    split: str
    square: bool = False
    view: str = "both"
    selective: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """One parameter: elements, how it is split, and the units that must divide.

    `units` are query heads, key/value heads (each may be held by several ranks where there are
    fewer of them than ranks), feed-forward units or vocabulary rows; 1 where nothing is split.
    What is `frozen` has neither gradient nor optimizer state. `stored`: its bytes, as a fraction of
    those in the model's precision (a quantized base). `copied_elements`: of a fused matrix (query,
    key and value in one), those in `copied_units` units (key/value heads), not in `units`.
    `copyable`: several ranks may hold one of its `units` where there are fewer than ranks:
    key/value heads, not query heads, nor Falcon's groups of query heads with their key/value head.
    """

    name: str
    elements: int
    split: str
    units: int = 1
    frozen: bool = False
    stored: float = 1.0
    copied_elements: int = 0
    copied_units: int = 1
    copyable: bool = True

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """Elements, and the units in which tensor ranks hold them."""
        whole = (self.elements - self.copied_elements, max(1, self.units))
        copied = (self.copied_elements, max(1, self.copied_units))
        return (whole, copied) if self.copied_elements else (whole,)

    def divides(self, tp: int) -> bool:
        """Whether `tp` ranks can share it."""
        fits = legality.copied_units if self.copyable else legality.units
        own = self.units <= 1 or fits(self.units, tp)
        return own and legality.copied_units(max(1, self.copied_units), tp)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockShape:
    """One kind of block.

    `memory_bound` holds what is there with fused kernels and flash attention (view `fused`);
    `unfused` the same work one operation at a time (view `eager`, in place of `memory_bound`) and
    what attention without a flash kernel adds to either (view `core`). `buffers` are the elements
    of its modules' tensors that are no parameters (MiniMax's decays, [heads, 256, 256] a layer),
    which every rank has whole.
    """

    kind: str
    products: tuple[MatrixProduct, ...] = ()
    attention: tuple[Attention, ...] = ()
    handed: tuple[Handed, ...] = ()
    memory_bound: tuple[MemoryBound, ...] = ()
    saved: tuple[Saved, ...] = ()
    weights: tuple[Weight, ...] = ()
    unfused: tuple[MemoryBound, ...] = ()
    buffers: int = 0

    @property
    def num_parameters(self) -> int:
        """Of the model itself: adapters of frozen weights are not among them."""
        own = [w for w in self.weights if w.frozen] or self.weights
        return sum(w.elements for w in own)

    @property
    def num_trained(self) -> int:
        return sum(w.elements for w in self.weights if not w.frozen)


def block_flops(block: BlockShape, sequence: int, causal: bool = True) -> float:
    """Forward operations of one block for each token."""
    products = sum(2.0 * p.n * p.k * p.count for p in block.products)
    attention = 0.0
    for core in block.attention:
        seen = _positions(sequence, core.window, causal and core.causal)
        attention += 2.0 * core.heads * (core.head_dim + core.value_dim) * seen
    return products + attention


def _positions(sequence: int, window: int | None, causal: bool) -> float:
    """Positions a token attends to, on average."""
    if not causal:
        return float(sequence if window is None else min(window, sequence))
    if window is None or window >= sequence:
        return (sequence + 1) / 2
    return window - window * (window - 1) / (2 * sequence)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A whole model: the kinds of its blocks, and which kind each layer is.

    Attributes:
        layers: kind of each layer, in order.
        blocks: kind to shape; holds every kind in `layers`, and `embedding` and `head`.
        heads, kv_heads: what tensor parallelism must divide (kv_heads may be held by several).
            heads is 1 where no tensor-parallel plan exists.
        tied: the head's matrix is the embedding's: the same name stands in both blocks' weights.
        experts, experts_per_token: 0 for dense models.
        uneven: what is saved does not grow with tokens alone (chunks, states, positions that are
            selected in long sequences): rows of the view `eager` hold for the size that was traced.
        flexible: its own attention (sinks, soft caps) becomes flex attention on a GPU.
        own_attention: attention is code of its layers (BLOOM), which hocket cannot recompute alone.
        prediction_layers: layers for multi-token prediction behind the last one, each of the kind
            `prediction`, with the output head and its loss once more. They are on the last stage.
    """

    name: str
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    layers: tuple[str, ...]
    blocks: dict[str, BlockShape]
    tied: bool = False
    experts: int = 0
    experts_per_token: int = 0
    uneven: bool = False
    flexible: bool = False
    own_attention: bool = False
    prediction_layers: int = 0

    def on_gpu(self) -> ModelShape:
        """Without the scores that its own attention computes and saves on a CPU alone."""
        if not self.flexible:
            return self

        def left(rows: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(row for row in rows if not (row.square and row.view == "eager"))

        blocks = {
            kind: dataclasses.replace(block, saved=left(block.saved), unfused=left(block.unfused))
            for kind, block in self.blocks.items()
        }
        return dataclasses.replace(self, blocks=blocks)

    def with_copies(self, redundant: int) -> ModelShape:
        """With so many more experts in each layer that has some: copies, which hold memory, and
        take tokens off what they are copies of."""
        if not redundant:
            return self

        def enlarged(block: BlockShape) -> BlockShape:
            groups = max((p.groups for p in block.products), default=1)
            if groups == 1:
                return block
            more = tuple(
                dataclasses.replace(p, groups=p.groups + redundant) if p.groups > 1 else p
                for p in block.products
            )
            weights = tuple(
                dataclasses.replace(w, elements=w.elements // groups * (groups + redundant))
                if w.split == "expert"
                else w
                for w in block.weights
            )
            return dataclasses.replace(block, products=more, weights=weights)

        blocks = {kind: enlarged(block) for kind, block in self.blocks.items()}
        return dataclasses.replace(self, blocks=blocks)

    def with_prediction(self, layers: int) -> ModelShape:
        """With layers for multi-token prediction (DeepSeek-V3, Liu et al. 2024, section 2.2): each
        projects hidden states and the embeddings of the tokens ahead, [2H, H], into a layer as the
        model's last one, which the embedding and the output head serve too."""
        if not layers:
            return self
        last, h = self.blocks[self.layers[-1]], self.hidden
        name = f"{PREDICTION}.projection"
        block = dataclasses.replace(
            last,
            kind=PREDICTION,
            products=(
                MatrixProduct(name=name, n=h, k=2 * h, split="column", input=PREDICTION),
                *last.products,
            ),
            memory_bound=(
                # The norms of both and their concatenation.
                MemoryBound(name=PREDICTION, forward=6.0 * h, backward=8.0 * h, split="outside",
                            kernels=3, backward_kernels=3),
                *last.memory_bound,
            ),
            saved=(
                Saved(name=PREDICTION, bytes=4.0 * h, split="outside"),
                Saved(name=f"{name} input", bytes=4.0 * h, split="outside"),
                *last.saved,
            ),
            weights=(
                Weight(name=f"{name}.weight", elements=2 * h * h, split="column", units=h),
                Weight(name=f"{PREDICTION}.norms", elements=2 * h, split="outside"),
                *last.weights,
            ),
        )  # fmt: skip
        blocks = {**self.blocks, PREDICTION: block}
        return dataclasses.replace(self, blocks=blocks, prediction_layers=layers)

    @property
    def handed_width(self) -> int:
        """Earlier inputs that the widest convolution along the sequence reads; 0: there is none."""
        blocks = self.blocks.values()
        return max((each.width for block in blocks for each in block.handed), default=0)

    @property
    def attends(self) -> bool:
        """Whether every layer attends, and none hands a state on along the sequence: what context
        ranks (cp) can split."""
        return not self.uneven and all(self.blocks[kind].attention for kind in self.layers)

    @property
    def _all_layers(self) -> tuple[str, ...]:
        """With those for multi-token prediction."""
        return (*self.layers, *(PREDICTION,) * self.prediction_layers)

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones once."""
        total = sum(self.blocks[kind].num_parameters for kind in self._all_layers)
        embedding, head = self.blocks["embedding"].weights, self.blocks["head"].weights
        held = {weight.name for weight in embedding}
        total += sum(weight.elements for weight in embedding)
        return total + sum(weight.elements for weight in head if weight.name not in held)

    @property
    def num_trained(self) -> int:
        """Parameters that are trained, tied ones once; all, unless some are frozen."""
        total = sum(self.blocks[kind].num_trained for kind in self._all_layers)
        ends = [w for kind in ("embedding", "head") for w in self.blocks[kind].weights]
        return total + sum({w.name: w.elements for w in ends if not w.frozen}.values())

    def cut(self, split: str | Sequence[int], num_stages: int, *, cuda: bool) -> Cut:
        """Layers per stage, as the runtime cuts. Raises LayoutError, as `spec.cut.choose_cut`."""
        costs = self.cut_costs(cuda=cuda)
        return _cut(split if isinstance(split, str) else tuple(split), num_stages, **costs)

    def cut_costs(self, *, cuda: bool) -> dict[str, Any]:
        """What `spec.cut.choose_cut` needs, by name; as `runtime.pipeline.cut.cut_costs`, which
        reads a module."""

        def cost(kind: str) -> float:
            products = (p for p in self.blocks[kind].products if not p.lora)
            return sum(matmul_cost(p.n, p.k, p.count, cuda=cuda) for p in products)

        costs = {kind: cost(kind) for kind in self.blocks}
        return {
            "layer_costs": tuple(costs[kind] for kind in self.layers),
            "after_cost": costs["head"]
            + self.prediction_layers * (costs.get(PREDICTION, 0.0) + costs["head"]),
        }

    def flops_per_token(
        self, sequence: int, *, causal: bool = True, backward: bool = True
    ) -> float:
        """Operations of the model itself for each token, as model FLOP/s utilisation counts them.

        Matrix products and attention, forward and (twice that) backward, nothing recomputed; of a
        frozen matrix no gradient; the embedding's lookup is none.

        Args:
            sequence: length of the sequence a token stands in.
            causal: whether masked positions are left out; many published figures count them.
            backward: False for the forward alone.
        """
        heads = ("head",) * (1 + self.prediction_layers)
        blocks = [self.blocks[kind] for kind in (*self._all_layers, *heads, "embedding")]
        total = sum(block_flops(block, sequence, causal) for block in blocks)
        if not backward:
            return total
        frozen = (p for block in blocks for p in block.products if p.frozen)
        return 3 * total - sum(2.0 * p.n * p.k * p.count for p in frozen)

    def to_json(self) -> dict[str, Any]:
        """A JSON form with an exact inverse: fields at their defaults are left out."""
        return {
            **_said(self),
            "layers": [[kind, len(list(run))] for kind, run in itertools.groupby(self.layers)],
            "blocks": {
                name: {
                    field: [_said(row) for row in getattr(block, field)]
                    for field in _ROWS
                    if field != "handed" or block.handed
                }
                | ({"buffers": block.buffers} if block.buffers else {})
                for name, block in self.blocks.items()
            },
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelShape:
        """The inverse of `to_json`."""
        blocks = {
            name: BlockShape(
                kind=name,
                buffers=block.get("buffers", 0),
                **{f: tuple(kind(**row) for row in block.get(f, ())) for f, kind in _ROWS.items()},
            )
            for name, block in data["blocks"].items()
        }
        layers = tuple(kind for kind, count in data["layers"] for _ in range(count))
        return cls(**{**data, "blocks": blocks, "layers": layers})


_ROWS: dict[str, type[Any]] = {
    "products": MatrixProduct,
    "attention": Attention,
    "handed": Handed,
    "memory_bound": MemoryBound,
    "saved": Saved,
    "weights": Weight,
    "unfused": MemoryBound,
}


def _said(row: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not at their defaults."""
    return {
        field.name: getattr(row, field.name)
        for field in dataclasses.fields(row)
        if getattr(row, field.name) != field.default
    }


@functools.lru_cache(maxsize=512)
def _cut(
    split: str | Cut, num_stages: int, layer_costs: tuple[float, ...], after_cost: float
) -> Cut:
    layers = len(layer_costs)
    return choose_cut(split, layers, num_stages, layer_costs=layer_costs, after_cost=after_cost)
