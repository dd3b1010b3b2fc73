"""Memory: the most that one rank holds at once, in bytes, of many layouts at once.

    state         weights, gradients and optimizer by `spec.precision`, divided over the ranks that
                  share them (`cost.state`): ZeRO-1 the optimizer, ZeRO-2 the gradients too, ZeRO-3
                  all, with two layers whole at a time (Rajbhandari et al. 2020)
    activations   what every microbatch in flight has saved on the first stage, where most are:
                  1F1B min(p, m); interleaved p + (p - 1)/v; GPipe m; ZB-H1 as 1F1B, and so on every
                  rank; ZB-H2 2p - 1; ZB-V p on every rank; sequential 1, of whole stages. Under
                  full recompute a layer saves its input, and one layer is whole while it runs
                  backward (Korthikanti et al. 2022, section 4)
    last stage    one microbatch's logits and their gradient; under GPipe the logits of all, under
                  ZB-H1 the gradients of all in flight, which the head's weights wait for, and in
                  hocket the inputs and output gradients of matmuls in place of what layers saved
    around it     the allocator's slack, the CUDA context, communication buffers
    host          state and activations that are offloaded; of these, two layers' are on the device

The larger of the first and the last stage counts. Legend: p pipeline ranks, m microbatches,
v stages of a rank; r rows.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from hocket.cost.constants import Constants
from hocket.cost.layout_batch import SCHEDULES, Layouts, RankLayers, equal_layers
from hocket.cost.local import activation_ranks, output_split, stream_ranks
from hocket.cost.recomputed import AT_ONCE
from hocket.cost.state import Parameters, held, imbalance_of, local_parameters, local_trained
from hocket.cost.terms import BlockTerms, Divided, Floats, Terms

TRACED_BYTES = 2.0
"""Bytes of an element in the type that shapes are traced in (bf16)."""

PINNED_BYTES = 1 + 1 / 16
"""Bytes of a page-locked buffer for each that it holds: sizes have eight steps to a power of two,
so that up to an eighth is unused, and half of that on average."""

LATE = ("zb-h1", "zb-h2", "zb-v")


@dataclasses.dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the peak rank, [r].

    Attributes:
        allocated: tensors at the worst moment, as torch.cuda.max_memory_allocated counts them.
        peak: of the device, with slack, context and buffers, as nvidia-smi shows it.
        least: of the device without the slack, which the allocator returns when memory runs out.
        weights, gradients, optimizer, activations: parts of `allocated`.
        host: in the host's memory, of the rank that has most there. pinned: of it, activations in
            page-locked buffers.
    """

    allocated: Floats
    peak: Floats
    least: Floats
    weights: Floats
    gradients: Floats
    optimizer: Floats
    activations: Floats
    host: Floats
    pinned: Floats


def peak_memory(
    model: Terms,
    layouts: Layouts,
    seq_len: Floats,
    constants: Constants,
    *,
    ranks: RankLayers | None = None,
) -> MemoryEstimate:
    """What the peak rank of every layout holds.

    Args:
        seq_len: tokens of a sample, [r] or one number.
        ranks: layers of pipeline ranks, where they are not equally many.
    """
    at = layouts
    shape = at.dp.shape
    seq_len = np.broadcast_to(np.asarray(seq_len, dtype=np.float64), shape)
    tokens = at.microbatch * seq_len / at.cp
    ranks = ranks or equal_layers(model, at)
    # Shares of all layers.
    stage, begin, end = (n / model.layers for n in (ranks.most, ranks.first, ranks.last))
    live_layer = saved = deferred = widest = np.zeros(shape)
    none = Parameters(np.zeros(shape), np.zeros(shape))
    layer_weights = largest = (none, none)  # all parameters, and those that are trained
    buffers = np.zeros(shape)
    for count, block in model.kinds:
        whole, kept, made = saved_bytes(block, model, at, seq_len, constants)
        saved = saved + count * kept * tokens
        widest = np.maximum(widest, kept * tokens)
        deferred = deferred + count * _deferred(block, at, constants) * tokens
        again = np.where(at.recomputes("full"), whole, made)
        again = again + _working(block, model, at, constants)
        live_layer = np.maximum(live_layer, again * tokens)
        buffers = buffers + count * block.buffers * constants.weight_bytes / model.layers
        layer = _local(block, at)
        layer_weights = _sum(layer_weights, _times(layer, count))
        largest = _larger(largest[0], layer[0]), _larger(largest[1], layer[1])
    ends = _local(model.embedding, at), _local(model.head, at)
    of_prediction, behind = np.zeros(shape), (none, none)
    for count, block in model.prediction:  # layers of the last stage
        of_prediction = count * tokens * saved_bytes(block, model, at, seq_len, constants)[1]
        layer = _local(block, at)
        behind = _times(layer, count)
        largest = _larger(largest[0], layer[0]), _larger(largest[1], layer[1])
    flight = _in_flight(at)
    logits = _end(model.head, at, constants) * tokens * (1 + model.predictions)
    single = np.minimum(_outputs(model.head, at, constants) * tokens, logits)
    looked_up = _end(model.embedding, at, constants) * tokens

    bent = (at.schedule == SCHEDULES.index("zb-v")) & (at.pp > 1)  # both ends on the first rank
    split = (at.schedule == SCHEDULES.index("zb-h1")) | (at.schedule == SCHEDULES.index("zb-h2"))
    alone = (at.pp == 1) & (model.tied == 0)
    first = _sum(_times(layer_weights, begin), ends[0])
    first = _sum(first, _times(ends[1], np.where(bent | alone, 1.0, 0.0)))
    last = _sum(_times(layer_weights, end), _times(ends[1], np.where(bent, 0.0, 1.0)))
    if model.prediction:
        first = _sum(first, _times(behind, np.where(bent | (at.pp == 1), 1.0, 0.0)))
        last = _sum(last, _times(behind, np.where(bent, 0.0, 1.0)))
        # The embedding of the tokens ahead, where the last stage has none.
        again = (at.pp > 1) & ~bent & (model.tied == 0)
        last = _sum(last, _times(ends[0], np.where(again, 1.0, 0.0)))
    middle = _times(layer_weights, np.where(at.pp > 2, stage, 0.0))
    freed = np.asarray(constants.logits_in_place) > 0  # before the last layer is made again

    begun = np.where(bent, ranks.bent, ranks.first * flight + _early(at, ranks)) / model.layers
    # What deferred weights' gradients need is made again by the inputs' half, and waits from there.
    remade = np.where(freed & (split | bent), np.maximum(deferred - saved, 0.0), 0.0)
    saved_first = saved * begun
    turn = 0.5 / np.maximum(np.minimum(at.pp, at.microbatches), 1.0)  # ZB-V: one of all in flight
    waits = np.where(bent, ranks.bent * turn, ranks.first) / model.layers
    saved_first = saved_first + remade * waits
    saved_first = saved_first + np.where(bent | (at.pp == 1), of_prediction, 0.0)
    # A stage's output stays until its own gradient comes; stages that take turns post two receives.
    sent = _stream(model, at, constants) * tokens * np.where(freed & (at.pp > 1), 1.0, 0.0)
    ends_first = looked_up * flight
    ends_first = ends_first + sent * (flight * at.virtual + np.where(at.virtual > 1, 2.0, 0.0))
    logits_first = np.where(bent | (at.pp <= 1), logits, 0.0)
    whole = at.schedule == SCHEDULES.index("gpipe")  # every forward comes before a backward
    late = np.where(split | bent | whole, flight, 1.0)
    waiting = np.maximum(saved + (late - 1) * deferred, late * deferred)
    waiting = np.where(bent, np.maximum(saved * late, (late - 0.5) * deferred), waiting)
    saved_last = end * np.where(freed & (split | bent), waiting, saved * late)
    saved_last = saved_last + np.where(bent, 0.0, late * of_prediction)
    more = np.where(split, single, np.where(whole, logits, 0.0)) * (late - 1)
    left = np.where(bent | (freed == 0), 0.0, more)
    of_logits = np.where(freed, logits + more, logits * (late + 1) / 2)
    logits_last = np.where(bent, 0.0, of_logits)
    # The first stage has most in flight; a lighter first stage leaves the second as the peak.
    less = np.where(split | bent, 0.0, 1 / np.maximum(at.pp, 1.0))
    in_second = np.maximum(flight * (1 - less), 1.0)
    saved_second = saved * np.where(bent, ranks.bent_inner / model.layers, stage * in_second)
    waits = np.where(bent, ranks.bent_inner * turn / model.layers, stage * (in_second - 1))
    saved_second = saved_second + remade * waits
    inner = np.where(at.pp > 2, 1.0, 0.0)
    zero, one = np.zeros(shape), np.ones(shape)
    # What deferred weight gradients are computed from stays on the device, whatever is offloaded;
    # on the way up under ZB-V.
    pending = 0.5 * deferred / model.layers * np.where(bent, [ranks.bent, ranks.bent_inner], 0.0)
    first_rank = _Rank(
        weights=first,
        with_head=np.where(bent | (at.pp <= 1), one, zero),
        layers=ranks.first,
        saved=saved_first,
        pending=pending[0],
        others=ends_first,
        of_loss=logits_first,
        left=zero,
    )
    last_rank = _Rank(
        weights=last,
        with_head=1.0 - bent,
        layers=ranks.last,
        saved=saved_last,
        pending=deferred * end * np.where(split, late, zero),
        others=zero,
        of_loss=logits_last,
        left=left,
    )
    middle_rank = _Rank(
        weights=middle,
        with_head=zero,
        layers=ranks.most,
        saved=saved_second * inner,
        pending=pending[1],
        others=sent * in_second * at.virtual * inner,
        of_loss=zero,
        left=zero,
    )
    away = at.offloads_activations
    totals = []
    host = pinned = zero
    for rank in (first_rank, last_rank, middle_rank):
        there = np.where(rank is middle_rank, inner, one)
        with_layer, tables = there * live_layer, there * rank.layers * buffers
        head = _times(ends[1], rank.with_head)
        # The head's gradient as it is made, in addition to the logits; ZeRO-3 widens it, and copies
        # it. A tied matrix has two, which are added where the embedding's is made.
        made = np.where(freed, constants.weight_bytes * head[1].total, 0.0)
        tied = np.where(freed & (model.tied > 0) & (at.pp == 1), 1.0, 0.0)
        gathered = np.where(at.zero >= 3, constants.weight_bytes, 0.0)  # from forward to backward
        carried = tied * (constants.gradient_bytes * head[1].total + gathered * head[0].total)
        wide = np.where(freed & (at.zero >= 3), 2 + tied, 0.0)
        wide = wide * constants.gradient_bytes * head[1].total
        # When the loss is taken, and when a layer runs backward; at once where logits stay.
        for later, more in (
            (False, np.maximum(rank.of_loss + made, wide)),
            (True, with_layer + carried + rank.left),
        ):
            state = held(*rank.weights, largest, at, constants, head=head, later=later)
            more = np.where(freed, more, rank.of_loss + with_layer)
            # Offloaded, what is here is of the last layer of each stage, whose copies are under
            # way, and in a backward of the one that comes next.
            moving = widest * np.minimum(at.virtual + later, rank.layers)
            kept = np.where(away, moving + rank.pending, rank.saved) + rank.others
            kept = kept + tables
            totals.append((state.weights, state.gradients, state.optimizer, kept + more))
        # At the end of a backward both gradients of a tied matrix are added into a third.
        state = held(*rank.weights, largest, at, constants, head=(none, none), later=True)
        both = carried + 2 * tied * constants.gradient_bytes * head[1].total
        both = both + tables + rank.others
        totals.append((state.weights, state.gradients, state.optimizer, both))
        locked = np.where(away, PINNED_BYTES * rank.saved, 0.0)
        host, pinned = np.maximum(host, state.host + locked), np.maximum(pinned, locked)
    sums = np.stack([sum(parts, np.zeros(shape)) for parts in totals])
    peak_rank = sums.argmax(axis=0)
    parts = [np.choose(peak_rank, [np.broadcast_to(t[i], shape) for t in totals]) for i in range(4)]
    allocated = sums.max(axis=0)
    return MemoryEstimate(
        allocated=allocated,
        peak=allocated * (1 + constants.memory_slack) + constants.memory_overhead,
        least=allocated + constants.memory_overhead,
        weights=parts[0],
        gradients=parts[1],
        optimizer=parts[2],
        activations=parts[3],
        host=host,
        pinned=pinned,
    )


Both = tuple[Parameters, Parameters]
"""All parameters, and those that are trained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rank:
    """One pipeline rank of every layout, [r].

    Attributes:
        weights: its parameters. with_head: 1 where the head is among them. layers: how many.
        saved: bytes that its layers save for backward, of all microbatches in flight.
        pending: of what is saved, what deferred weight gradients are computed from.
        others: bytes that are saved outside layers. of_loss: of logits and their gradient.
        left: of them, those of other microbatches.
    """

    weights: Both
    with_head: Floats
    layers: Floats
    saved: Floats
    pending: Floats
    others: Floats
    of_loss: Floats
    left: Floats


def _local(block: BlockTerms, at: Layouts) -> Both:
    return local_parameters(block, at), local_trained(block, at)


def _sum(one: Both, other: Both) -> Both:
    return one[0] + other[0], one[1] + other[1]


def _times(one: Both, factor: Floats) -> Both:
    return one[0].times(factor), one[1].times(factor)


def _larger(one: Parameters, other: Parameters) -> Parameters:
    return Parameters(np.maximum(one.dense, other.dense), np.maximum(one.expert, other.expert))


def saved_bytes(
    block: BlockTerms, model: Terms, at: Layouts, seq_len: Floats, constants: Constants
) -> tuple[Floats, Floats, Floats]:
    """Bytes per token of a layer: all that its backward needs, what is held until then, and what of
    modules that run again is there at once when it has come to them."""
    width = constants.element_bytes / TRACED_BYTES
    outside = block.saved.outside + constants.expert_outputs * block.saved_expert_outputs
    inside = block.saved.inside - 0.5 * constants.quantized_inputs * block.saved_inputs.inside
    outside = outside - 0.5 * constants.quantized_inputs * block.saved_inputs.outside
    more = imbalance_of(at, constants) - 1.0
    inside = inside + more * block.saved_routed.inside
    outside = outside + more * block.saved_routed.outside
    plain = width * Divided(inside, outside, block.saved.whole).on_rank(at)
    flash = np.broadcast_to(constants.flash, at.dp.shape) > 0
    square = np.where(flash, block.saved_square_own, block.saved_square)
    scores = square * seq_len / at.tp
    core = width * (block.saved_core / at.tp + scores)
    inputs = _stream(model, at, constants)
    whole = plain + core
    half = np.asarray(constants.selective_halves) > 0
    cores = np.where(half, 0.5 * (whole + inputs), plain)
    kept = np.where(at.recomputes("core_attn"), cores, whole)
    freed = made = np.zeros(at.dp.shape)
    for kind, rows in block.freed:
        nbytes = np.where(at.recomputes_in(block, kind), width * rows.on_rank(at), 0.0)
        freed = freed + nbytes
        made = np.maximum(made, AT_ONCE.get(kind, 0) * nbytes)
    kept = kept - freed
    own = np.asarray(constants.eager_saved) > 0
    late = np.isin(at.schedule, [SCHEDULES.index(name) for name in LATE]) & (at.pp > 1)
    # Of other software it is not known when what deferred weights' gradients need runs again: it is
    # taken as kept. Of its own memory the rest is fitted.
    kept = np.where(late & (freed > 0) & ~own, whole, kept)
    kept = np.where(at.recomputes("full"), np.where(late & ~own, whole, inputs), kept)
    return whole, kept, np.where(own, made, 0.0)


def _deferred(block: BlockTerms, at: Layouts, constants: Constants) -> Floats:
    """Bytes per token that the gradients of a layer's weights are computed from."""
    found: Floats = constants.element_bytes * block.deferred.on_rank(at)
    return found


def _outputs(block: BlockTerms, at: Layouts, constants: Constants) -> Floats:
    """Bytes per token of what the matmuls of a block return."""
    found = np.zeros(at.dp.shape)
    for one in block.products:
        ranks = activation_ranks(output_split(one.split), at)
        found = found + constants.element_bytes * one.n * one.count / ranks
    return found


def _stream(model: Terms, at: Layouts, constants: Constants) -> Floats:
    """Bytes per token of what goes from layer to layer."""
    found: Floats = constants.element_bytes * model.hidden / stream_ranks(at)
    return found


def _working(block: BlockTerms, model: Terms, at: Layouts, constants: Constants) -> Floats:
    """Bytes per token of a layer's inner gradients at their widest, in addition to the gradient of
    its output, which sequence parallelism gathers."""
    width, split = constants.element_bytes / TRACED_BYTES, stream_ranks(at)
    by_rank = np.maximum(block.working.inside / at.tp, block.working.outside / split)
    widest = width * np.maximum(by_rank, block.working.whole)
    gathered = constants.element_bytes * model.hidden * (1 - 1 / split)
    found: Floats = widest + np.where(widest > 0, gathered, 0.0)  # of others' stacks it is fitted
    return found


def _end(block: BlockTerms, at: Layouts, constants: Constants) -> Floats:
    """Bytes per token of the embedding or the head; the gradient of logits is a second copy, where
    the loss does not overwrite them."""
    width = constants.element_bytes / TRACED_BYTES
    # Shapes of the model's own code have them in fp32, as transformers' loss saves them.
    copies = np.where(np.asarray(constants.logits_in_place) > 0, 0.5, 2.0)
    inside, outside = copies * block.saved.inside, block.saved.outside
    found: Floats = width * (inside / at.tp + outside / stream_ranks(at))
    return found


def _early(at: Layouts, ranks: RankLayers) -> Floats:
    """Layers times microbatches that the first rank holds beyond its layers times those in flight
    where stages take turns: its first stage has 2p - 1 in flight, its others p."""
    p, m = at.pp, at.microbatches
    turns = (at.virtual > 1) & (p > 1) & (at.schedule != SCHEDULES.index("gpipe"))
    more = np.minimum(2 * p - 1, m) - np.minimum(p, m)
    found: Floats = np.where(turns, ranks.early * more, 0.0)
    return found


def _in_flight(at: Layouts) -> Floats:
    """Microbatches whose activations the first stage holds, of whole stages."""
    p, m, v = at.pp, at.microbatches, at.virtual
    flight = np.minimum(p, m)
    flight = np.where((v > 1) & (p > 1), np.minimum(p + (p - 1) / v, m), flight)
    flight = np.where(at.schedule == SCHEDULES.index("gpipe"), m, flight)
    flight = np.where(at.schedule == SCHEDULES.index("zb-v"), np.minimum(p, m), flight)
    flight = np.where(at.schedule == SCHEDULES.index("sequential"), 1.0, flight)
    two = np.minimum(2 * p - 1, m)
    return np.where(at.schedule == SCHEDULES.index("zb-h2"), two, flight)
