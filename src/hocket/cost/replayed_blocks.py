"""Replayed blocks: the bytes of each block of a stage for one microbatch, as a step allocates them.

    kept         from F to B, and what is recomputed or on the host in between
    deferred     inputs and gradients of outputs that stay from I to W, matmul by matmul
    working      the widest inner gradients
    phases       how I goes back through a block: what it frees and keeps, norm by norm

Sizes are those of the model's shape.
"""

from __future__ import annotations

import dataclasses

from hocket.cost.local import (
    activation_ranks,
    output_split,
    stream_ranks,
    tensor_elements,
    weight_gradient_operands,
    weight_prefix,
)
from hocket.cost.measured_stage import (
    ENDS,
    behind_first_adapter,
    narrowing,
    placed_weights,
    row_bytes,
    saved_rows,
    trained_weights,
)
from hocket.cost.recomputed import freed, made_at_once, rows_after
from hocket.cost.step_problem import StepProblem
from hocket.spec import recompute
from hocket.spec.capabilities import OFFLOADED_BYTES
from hocket.spec.model_shape import BlockShape, MatrixProduct, Weight

INDICES = (
    "topk", "sort", "argsort", "floor_divide", "empty_like", "eq", "ne", "lt", "gt", "le", "ge",
)  # fmt: skip
"""Operations whose saved output is no activation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deferred:
    """A matmul whose weight gradient is computed in W, in bytes.

    Attributes:
        gradients: indices of those of its weight and bias.
        output: the gradient of its output.
        input: its input, 0 where a product that W comes to later reads it, too.
    """

    gradients: tuple[int, ...]
    output: int
    input: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """I has gone back to a norm of a block, in bytes.

    Attributes:
        taken: allocated since the phase before, less what was freed.
        gradients: indices of the norm's, which come now.
        working: of the norm's own backward.
    """

    taken: int
    gradients: tuple[int, ...]
    working: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockBytes:
    """One block of a stage and one microbatch, in bytes.

    Attributes:
        kind: of block.
        kept: from its forward to its backward. again: made again when its backward begins.
        moved: to the host's memory between them.
        deferred: matmuls in the order of W. What they need is kept from I to W.
        working: inner gradients at their widest; of the head in the backward of its norm, with
            what else it saved. working_then: behind the first gradients.
        phases: of I.
        first: indices of the gradients that come while these live; then: of the others.
        values: of its parameters.
    """

    kind: str
    kept: int
    again: int
    moved: int
    deferred: tuple[Deferred, ...]
    working: int
    working_then: int
    phases: tuple[Phase, ...]
    first: tuple[int, ...]
    then: tuple[int, ...]
    values: int

    @property
    def layer(self) -> bool:
        return self.kind not in ENDS

    @property
    def pending(self) -> int:
        """Bytes kept from I to W."""
        return sum(each.input + each.output for each in self.deferred)


def weights_by_block(job: StepProblem, kinds: list[str]) -> list[list[Weight]]:
    """The parameters of each block of a stage; a tied one where it comes first."""
    held = placed_weights(job.shape, kinds)
    return [[weight for at, weight in held if at == number] for number in range(len(kinds))]


def blocks_of(
    job: StepProblem, number: int, held: list[list[Weight]], *, cuda: bool
) -> list[BlockBytes]:
    kinds = job.blocks(number)
    again = len(job.again(number, "full"))
    asked = recompute.modules(job.layout.recompute)
    modules_again = len(job.again(number, job.layout.recompute)) if asked else 0
    offloads = job.layout.offloads("activations")
    found: list[BlockBytes] = []
    index = 0
    for at, kind in enumerate(kinds):
        block = job.shape.blocks[kind]
        layer = kind not in ENDS
        rows = dict(saved_rows(job.shape, kind, job.microbatch, job.element_bytes))
        if cuda and layer:
            rows = _with_repeated_heads(job, block, rows)
        if layer and number == 0 and job.adapted and not any(b.layer for b in found):
            rows = behind_first_adapter(block, rows)
        # The executor holds what a stage is given.
        if at == 0:
            rows.pop("input", None)
        made = 0
        before, gone = rows, {}
        if layer and modules_again > 0:
            modules_again -= 1
            made = made_at_once(block, rows, asked)
            gone = dict(freed(block, asked))
            rows = rows_after(rows, gone)
        at_once = made
        moved = sum(n for n in rows.values() if n >= OFFLOADED_BYTES) if layer and offloads else 0
        kept = sum(rows.values()) + job.adapter_bytes(kind) - moved
        if layer and again:
            again -= 1
            # Of its input alone; the first one's is that of the stage.
            kept, made = (0 if at == 0 else job.stream_bytes), kept
            made -= kept
        own = range(index, index + len(trained_weights(held[at])))
        index = own.stop
        named = list(zip(own, trained_weights(held[at]), strict=True))
        deferred = _deferred(job, block, named)
        narrow = narrowing(block)
        first = tuple(i for i, w in named if w.name.startswith(narrow))
        working, then = _working(job, block, rows) if layer else (0, 0)
        if kind == "head":
            working = _head_norm(job, block, rows)
        narrowed = deferred[narrow].input if layer and narrow in deferred else 0
        widest = Phase(taken=0, gradients=first, working=working + narrowed)
        found.append(
            BlockBytes(
                kind=kind,
                kept=kept,
                again=made,
                moved=moved,
                deferred=tuple(deferred.values()),
                phases=_phases(job, block, before, gone, named, widest=widest, again=at_once)
                if layer
                else (),
                working=working,
                working_then=then,
                first=first,
                then=tuple(i for i in own if i not in first),
                values=round(sum(job.elements(w) * w.stored for w in held[at]) * job.element_bytes),
            )
        )
    return found


def _deferred(
    job: StepProblem, block: BlockShape, named: list[tuple[int, Weight]]
) -> dict[str, Deferred]:
    """What W computes of a block, by the beginning of its weights' names; `named`: its gradients'
    indices."""
    found: dict[str, Deferred] = {}
    for p, _, (split, elements) in weight_gradient_operands(block):
        prefix = weight_prefix(block, p)
        found[prefix] = Deferred(
            gradients=tuple(i for i, w in named if w.name.startswith(prefix)),
            output=_output_bytes(job, p),
            input=_tensor_bytes(job, split, elements),  # freed after the first that reads it
        )
    return dict(reversed(found.items()))


def _phases(
    job: StepProblem,
    block: BlockShape,
    rows: dict[str, int],
    gone: dict[str, float],
    named: list[tuple[int, Weight]],
    *,
    widest: Phase,
    again: int,
) -> tuple[Phase, ...]:
    """What I frees and keeps of the saved tensors, from the last one back: up to the input of the
    matmul that takes the widest tensor, and to each norm that is written out in fp32.

    Args:
        gone: which part of a row is not saved but made where I reaches it; `again` of them with the
            widest tensors.
        widest: the phase of that matmul.
    """
    products = [p for p in block.products if not (p.frozen or p.bare)]
    streams = {p.name for p in block.products if p.split == "row"}  # and their adapters
    streams |= {f"{name}.lora_B" for name in streams}
    narrow = narrowing(block)
    wide = {p.input for p in products if weight_prefix(block, p) == narrow} & rows.keys()
    up = gone.keys() & dict(freed(block, ("mla_up",)))
    found: list[Phase] = [] if wide else [widest]
    taken, late, made = -again, 0, 0
    for name, nbytes in reversed(rows.items()):
        module, _, operation = name.partition(":")
        readers = [p for p in products if p.input == name]
        kept = round(nbytes * (1.0 - gone.get(name, 0.0)))
        if name in wide:
            found.append(dataclasses.replace(widest, taken=taken + again))
            taken = -again
        if readers:
            # The gradient of the stream is there before; then a sum takes its place.
            taken += late + nbytes - kept
            late = sum(_output_bytes(job, p) for p in readers if p.name in streams)
            taken += sum(_output_bytes(job, p) for p in readers if p.name not in streams)
        elif operation == "rsqrt" and any(w.name == f"{module}.weight" for w in block.weights):
            gradients = tuple(i for i, w in named if w.name.startswith(f"{module}."))
            own = (n for row, n in rows.items() if row in gone and row.startswith(f"{module}:"))
            working = norm_bytes(job, block) + max(own, default=0) + made
            found.append(Phase(taken=taken, gradients=gradients, working=working))
            taken, late, made = late - kept, 0, 0
        else:
            taken -= kept
            made += nbytes if name in up else 0
    return tuple(found)


def _with_repeated_heads(
    job: StepProblem, block: BlockShape, rows: dict[str, int]
) -> dict[str, int]:
    """The saved tensors of a block, with what the memory-efficient kernel saves on a GPU beyond the
    keys and values of their own heads: PyTorch repeats them for each query head, and makes numbers
    of a mask. Flash attention takes half precision alone, and no mask; flex attention, which
    windows go to, takes groups of heads; a core that is recomputed saves what it was given."""
    if "core_attn" in recompute.modules(job.layout.recompute):
        return rows
    elements = 0.0
    for core in block.attention:
        if core.window is not None or (job.workload.dtype != "fp32" and not core.masked):
            continue
        split = job.layout.tp if core.split == "inside" else 1
        missing = core.heads / split - max(1.0, core.kv_heads / split)
        elements += max(0.0, missing) * (core.head_dim + core.value_dim)
        elements += job.microbatch.sequence if core.masked else 0
    found: dict[str, int] = {}
    for name, nbytes in rows.items():
        found[name] = nbytes
        if elements and name.endswith(":attention"):
            more = round(elements * job.microbatch.tokens * job.element_bytes)
            found["repeated keys and values"] = more
    return found


def norm_bytes(job: StepProblem, block: BlockShape) -> int:
    """Five tensors in fp32 in the backward of a norm that is written out, as wide as the stream;
    0 where norms are one kernel."""
    if not any(row.name.endswith(":rsqrt") for row in block.saved):
        return 0
    elements = job.microbatch.tokens * job.shape.hidden // stream_ranks(job.layout)
    return 5 * 4 * elements


def _head_norm(job: StepProblem, block: BlockShape, rows: dict[str, int]) -> int:
    """What is there in the backward of a head's norm that is written out, as wide as what it
    normalizes (several streams: hyper-connections), while all layers have their saved tensors: the
    logits alone are freed. 0 where norms are one kernel."""
    modules = tuple(f"{name[: -len('rsqrt')]}" for name in rows if name.endswith(":rsqrt"))
    wide = max((n for name, n in rows.items() if name.startswith(modules)), default=0)
    working = max(norm_bytes(job, block), 5 * wide) if modules else 0
    return working and working + sum(rows.values()) - rows["logits"]


def _output_bytes(job: StepProblem, product: MatrixProduct) -> int:
    """Of the gradient of a matmul's output."""
    return _tensor_bytes(job, output_split(product.split), product.n * product.count)


def _tensor_bytes(job: StepProblem, split: str, elements: float) -> int:
    """Of an activation of so many elements per token on one rank."""
    ranks = activation_ranks(split, job.layout)
    return round(elements / ranks * job.microbatch.tokens * job.element_bytes)


def _working(job: StepProblem, block: BlockShape, saved: dict[str, int]) -> tuple[int, int]:
    """Of a layer's inner gradients, with what is not of their width: at their widest, and when the
    first weights have their gradients. Experts' outputs are weighted in fp32, before them: three
    such tensors, and their gradient in the dtype of the products."""
    others = job.hidden_bytes - job.stream_bytes + _fp8_bytes(job, block)
    last = _last_of_experts(block)
    split = [p for p in last.values() if p.split in ("row", "outside")]
    weighted = max((p.n * p.count * (3 * 4 + job.element_bytes) for p in split), default=0)
    inner = _widest(job, block, saved)
    return max(round(weighted * job.microbatch.tokens), inner) + others, inner + others


def _last_of_experts(block: BlockShape) -> dict[str, MatrixProduct]:
    """The last matmul of each set of experts, by its module."""
    return {p.name.rpartition(".")[0] or p.name: p for p in block.products if p.groups > 1}


def _widest(job: StepProblem, block: BlockShape, saved: dict[str, int]) -> int:
    """Gradients of the widest inner tensors at once: of two (gate and up), or of what an operation
    gave and of what it was given; of a recurrence what was traced. `saved`: what the block saves,
    in bytes."""
    rows = [p for p in block.products if p.split in ("row", "outside")]
    if not rows or block.kind in ENDS:
        return 0
    down = max(rows, key=lambda p: p.k * p.count)
    tp = job.layout.tp if down.split == "row" else 1
    by_token = 2 * down.k * down.count / tp * job.element_bytes * job.microbatch.tokens
    inner = [
        nbytes
        for name, nbytes in saved.items()
        if not name.startswith(("input", *_last_of_experts(block))) and not _is_index(name)
    ]
    traced = [row_bytes(row, job.microbatch) for row in block.saved if row.view == "backward"]
    return round(max(by_token, 2 * max(inner, default=0), sum(traced)))


def _is_index(name: str) -> bool:
    """Whether a saved tensor holds positions or truth values, which have no gradient."""
    return name.partition(":")[2].partition("#")[0] in INDICES


def _fp8_bytes(job: StepProblem, block: BlockShape) -> int:
    """What torchao makes to cast the widest operand of a layer's matmuls to fp8: it is scaled and
    clamped in fp32."""
    if job.workload.dtype != "fp8" or block.kind in ENDS:
        return 0
    tp, tokens = job.layout.tp, job.microbatch.tokens
    found = [p for p in block.products if not p.bare]
    operands = [
        tensor_elements(w, tp) for w in block.weights for p in found if w.name.startswith(p.name)
    ]
    operands += [round(tokens * p.k * p.count / (tp if p.split == "row" else 1)) for p in found]
    return (4 + 4 + 1) * max(operands, default=0)
