"""ShardedBlocks: replicas that hold a share of everything, parameters too (ZeRO-3).

    forward    gather 0 | run 0, gather 1 | free 0, run 1, gather 2 | ...            | head
    backward   head | run 2, gather 1 | free 2, reduce-scatter 2, run 1, gather 0 | ...
    optimizer  steps its share; nothing is gathered until the next forward asks

A block is one layer: its values are gathered just before it runs, while the one before it still
runs, and freed after it; in backward once more, in the other order. There its gradients are
reduce-scattered when the next one begins. With one microbatch a layer so moves one and a half times
the bytes of the all-reduce it replaces (Rajbhandari et al. 2020, ZeRO, section 7.2.2), with M of
them M times that: two gathers and one reduce-scatter a microbatch.

What is no layer lies in up to three blocks of its own: what runs `before` the layers, `after`
them, and any `other`. They are gathered once a microbatch: an embedding's values are not read in
backward, and what follows the layers stays from its forward to its backward.

A layer that the model's own code runs without gradients, though its backward may follow (Reformer
makes its inputs again from its outputs), calls no hook there: what has run in no other way is whole
from the beginning of the backward to its end.

Everything happens at places that are the same on every rank (a block begins, a pass ends), and not
when some gradient happens to be there: so ranks cannot differ in the order of their collectives,
whatever part of a block their data uses.

Memory is given and taken in the order of the compute stream. A gather runs on the group's own
stream, behind what was queued when it began, so behind the last reader of memory that it is given;
and a block is freed only when the compute stream has waited for its gather (`_let_go`). With shares
on the host a copy stream brings them, and the gather runs behind that.

Not `torch.distributed.fully_shard`: its parameters are wrapper tensors, where layers, placements,
checkpoints and clipping here read plain local ones; it reduces when a layer's backward is over,
where weights' gradients that are deferred (I and W) have not come, and sums of gradients over
tensor ranks and ties would have to be made before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from hocket.runtime.collectives import all_gather_flat
from hocket.runtime.copy_stream import CopyStream
from hocket.runtime.data_parallel.absent import NAME, come_back, leave
from hocket.runtime.data_parallel.buckets import grad_dtype
from hocket.runtime.data_parallel.flat import (
    Bucket,
    Owners,
    bucket_of,
    give_memory,
    side_by_side,
    take_memory,
)
from hocket.runtime.data_parallel.shares import Shares
from hocket.runtime.mesh import Axis
from hocket.runtime.record import Recorder
from hocket.spec.plan import AFTER, BEFORE, OTHER, StagePlan, block_of
from hocket.spec.schedule import BACKWARD, FORWARD, WEIGHT

Fill = Callable[[Iterable[str]], None]
"""Gives parameters of a stage, by name, their values."""

IN_FLIGHT = 1
"""A block's reduction has until the next block's to end."""


@dataclasses.dataclass(eq=False)
class GatheredBlock:
    """What is gathered and freed together.

    Attributes:
        name: of the layer's module, or `before`, `after`, `other`.
        buckets: one for each dtype, and for what is frozen or reduced late.
        kept: its values stay from its forward to its backward.
        followed: whether its layer has run with gradients; None: it has not run.
        started: marks of the gathers under way.
    """

    name: str
    buckets: list[Bucket]
    kept: bool = False
    followed: bool | None = None
    started: list[tuple[Any, Bucket]] = dataclasses.field(default_factory=list)

    @property
    def is_layer(self) -> bool:
        return self.name not in (BEFORE, AFTER, OTHER)


class ShardedBlocks(Shares):
    """The parameters of one stage in shares: gathered for use, and stepped where they lie.

    Args:
        module: whose parameters are taken over, those that need no gradient too. Between uses
            they have their shapes and no memory.
        plan: names its layers, and what runs before and after them. None: the numbered children of
            `module` are its layers, wherever they are, if each runs as a module.
        late: names whose gradients are summed over other axes before they are reduced.
        axis, replicas, others: as for `ShardedBuckets`. recorder: as for `Shares`.
        on_host: shares live in the host's memory, and are stepped there (Rajbhandari et al. 2021,
            ZeRO-Infinity); of a block that is gathered, this rank's share is on the device for as
            long as that takes.
        fill: gives parameters, by name, their values; called block by block, so that no more than
            one block is ever whole. None: they have them.
    """

    def __init__(
        self,
        module: nn.Module,
        plan: StagePlan | None,
        late: Collection[str],
        *,
        axis: Axis,
        replicas: Axis,
        recorder: Recorder,
        on_host: bool = False,
        fill: Fill | None = None,
        others: Mapping[str, Axis] | None = None,
    ) -> None:
        owners = Owners(axis, replicas, others or {})
        self._on_host = on_host
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self._copies = CopyStream(device)
        members: dict[str, dict[Any, list[tuple[str, nn.Parameter]]]] = {}
        for name, p in module.named_parameters():
            block = block_of(name, plan)
            if plan is None and block != OTHER and not _runs(module.get_submodule(block)):
                block = OTHER
            kind = (
                p.requires_grad, grad_dtype(p), p.dtype, p.device, name in late, *owners.of(name),
            )  # fmt: skip
            setattr(p, NAME, name)
            members.setdefault(block, {}).setdefault(kind, []).append((name, p))
        self._blocks: dict[str, GatheredBlock] = {}
        for name, kinds in members.items():
            self._blocks[name] = GatheredBlock(name, [])
            flats = [side_by_side([p for _, p in found], k[-2]) for k, found in kinds.items()]
            if fill is not None:
                fill([member for found in kinds.values() for member, _ in found])
            for (_, dtype, _, _, is_late, owner, same), found in kinds.items():
                bucket = bucket_of(
                    found, dtype, owner, replicas=same,
                    late=is_late, resident=owner is not axis and owner.size == 1 and not on_host,
                    on_host=on_host, flat=flats.pop(0),
                )  # fmt: skip
                self._free(bucket)
                self._blocks[name].buckets.append(bucket)
        self._layers = [block for block in self._blocks.values() if block.is_layer]
        everything = [bucket for block in self._blocks.values() for bucket in block.buckets]
        stepped = [bucket for bucket in everything if bucket.parameters[0].requires_grad]
        super().__init__(stepped, recorder, in_flight=IN_FLIGHT)
        self._frozen = [bucket for bucket in everything if bucket not in stepped]
        self._kind = ""
        self._learns = False
        self._entered: list[GatheredBlock] = []
        self._among_layers = False
        self._due: set[int] = set()
        self._hook(module, "" if plan is None else plan.decoder)

    def _hook(self, module: nn.Module, decoder: str) -> None:
        """Gather before a layer, or another module that holds parameters, runs; free after it."""
        owner = {id(p): b for b in self._blocks.values() for u in b.buckets for p in u.parameters}
        inside: set[int] = set()
        for number, block in enumerate(self._layers):
            layer = module.get_submodule(block.name)
            inside |= {id(child) for child in layer.modules()}
            # A parameter that several layers share lies in the block of one of them.
            uses = _unique(owner[id(p)] for p in layer.parameters())
            layer.register_forward_pre_hook(partial(self._layer_begins, number, uses))
            layer.register_forward_hook(partial(self._layer_ended, number, uses))
        for child in module.modules():
            uses = _unique(owner[id(p)] for p in child._parameters.values() if p is not None)
            if not uses or id(child) in inside:
                continue
            # An embedding's backward reads no values. Of a model without a plan nobody knows
            # whether they are read elsewhere.
            reads = not isinstance(child, nn.Embedding) or any(b.name == OTHER for b in uses)
            for block in uses:
                block.kept = block.kept or reads
            child.register_forward_pre_hook(partial(self._other_begins, uses))
            if reads:
                child.register_forward_hook(partial(self._other_ended, uses))
        other = self._blocks.get(OTHER)
        if other is not None:
            # It may be read where its own module does not run (ProphetNet's n-gram embedding).
            other.kept = True
            for whole in {module, module.get_submodule(decoder)}:
                whole.register_forward_pre_hook(partial(self._other_begins, [other]))

    # --- what the step sees ------------------------------------------------------------------

    def held(self) -> list[Tensor]:
        return [bucket.mine for bucket in (*self._buckets, *self._frozen)]

    def zero_grad(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # which an absent parameter's `.grad` calls
            super().zero_grad()
        self.reshard()

    def begins(self, kind: str) -> None:
        super().begins(kind)
        self._kind = kind
        self._learns = kind == FORWARD and torch.is_grad_enabled()
        self._entered = []
        self._among_layers = False
        if kind in (BACKWARD, WEIGHT):
            self._due = {id(bucket) for bucket in self._buckets if not bucket.late}
        if kind != FORWARD:
            blind = [block for block in self._layers if block.followed is False]
            for block in blind:
                self._gather(block)
            for block in blind:
                self._use(block)

    def ends(self, kind: str) -> None:
        if kind in (BACKWARD, WEIGHT):
            for block in reversed(self._blocks.values()):
                self._reduce_due(block)
        keeps = kind == FORWARD and torch.is_grad_enabled()
        for block in self._blocks.values():
            if not (keeps and block.kept):
                self._let_go(block)
        self._kind = ""

    def begin_unshard(self) -> None:
        """What was gathered for readers is out of date."""
        for block in self._blocks.values():
            self._let_go(block, keep=False)

    def unshard(self) -> None:
        """Gather everything; what is written into it is taken over by `reshard`."""
        for block in self._blocks.values():
            self._use(block)
            for bucket in block.buckets:
                bucket.opened = True

    def reshard(self) -> None:
        """Free what is whole; of what `unshard` gathered, take over this rank's share first."""
        for block in self._blocks.values():
            self._let_go(block)

    def groups(self) -> list[list[str]]:
        """Names of the parameters by what `reading` and `writing` make whole: one bucket."""
        return [bucket.names for block in self._blocks.values() for bucket in block.buckets]

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Within the block the parameters of `name`'s bucket have their values. Every rank."""
        bucket = self._bucket_of(name)
        if bucket.whole:  # `unshard` gathered everything
            yield
            return
        self._begin(bucket)
        if bucket.gathering is not None:
            bucket.gathering.wait()
            bucket.gathering = None
        come_back(bucket.parameters)
        try:
            yield
        finally:
            self._free(bucket)

    @contextmanager
    def writing(self, name: str) -> Iterator[None]:
        """Within the block the parameters of `name`'s bucket have memory, and are all to be
        written; this rank's share of that is kept. Nothing is sent."""
        bucket = self._bucket_of(name)
        if bucket.whole:
            yield
            return
        bucket.whole = True
        give_memory(bucket.flat)
        bucket.flat[bucket.offsets[-1] :].zero_()
        come_back(bucket.parameters)
        try:
            yield
            with torch.no_grad():
                bucket.mine.copy_(bucket.part())
        finally:
            self._free(bucket)

    def _bucket_of(self, name: str) -> Bucket:
        found = (b for block in self._blocks.values() for b in block.buckets if name in b.names)
        return next(found)

    # --- forward -------------------------------------------------------------------------------

    def _layer_begins(
        self, number: int, uses: list[GatheredBlock], module: nn.Module, args: Any
    ) -> None:
        if self._learns:
            for block in uses:
                block.followed = bool(block.followed) or torch.is_grad_enabled()
        self._among_layers = True
        before = self._blocks.get(BEFORE)
        if before is not None and not before.kept and before not in uses:
            self._let_go(before)
        for block in uses:
            self._use(block)
        if number + 1 < len(self._layers):
            self._gather(self._layers[number + 1])
        elif AFTER in self._blocks:
            self._gather(self._blocks[AFTER])

    def _layer_ended(
        self, number: int, uses: list[GatheredBlock], module: nn.Module, args: Any, output: Any
    ) -> None:
        for block in uses:
            if block.is_layer:
                self._let_go(block)
        _before_backward(output, partial(self._layer_backward, number, uses))

    def _other_begins(self, uses: list[GatheredBlock], module: nn.Module, args: Any) -> None:
        for block in uses:
            self._use(block)
            # A head that is tied to the embedding lies in its block, and runs when layers are over.
            if block.name == BEFORE and self._layers and not self._among_layers:
                self._gather(self._layers[0])

    def _other_ended(
        self, uses: list[GatheredBlock], module: nn.Module, args: Any, output: Any
    ) -> None:
        _before_backward(output, partial(self._other_backward, uses))

    # --- backward ------------------------------------------------------------------------------

    def _layer_backward(self, number: int, uses: list[GatheredBlock], gradient: Tensor) -> None:
        """The gradient of a layer's output is there: it begins, the one after it is over."""
        if self._entered is not uses:
            over, self._entered = self._entered, uses
            after = self._blocks.get(AFTER)
            for block in (*over, *([after] if after is not None and not over else [])):
                if block.is_layer or block.name == AFTER:
                    self._reduce_due(block)
                    if block not in uses:
                        self._let_go(block)
        for block in uses:
            self._use(block)
        if number:
            self._gather(self._layers[number - 1])

    def _other_backward(self, uses: list[GatheredBlock], gradient: Tensor) -> None:
        for block in uses:
            self._use(block)
            if block.name == AFTER and self._layers and not self._entered:
                self._gather(self._layers[-1])

    def _reduce_due(self, block: GatheredBlock) -> None:
        """Reduce a block's gradients, once a backward; more often only if more have come."""
        if self._kind not in (BACKWARD, WEIGHT):
            return  # of half a backward: the weights' own half is still to come
        for bucket in reversed(block.buckets):
            more = bucket.gradient is not None and not bucket.late
            if id(bucket) in self._due or (more and bucket in self._buckets):
                self._due.discard(id(bucket))
                self._reduce(bucket)

    # --- values --------------------------------------------------------------------------------

    def _gather(self, block: GatheredBlock) -> None:
        """Begin to gather a block, if it is not whole."""
        for bucket in block.buckets:
            if bucket.whole:
                continue
            start = self.recorder.mark()
            self._begin(bucket)
            block.started.append((start, bucket))

    def _begin(self, bucket: Bucket) -> None:
        """Give a bucket memory, and begin to gather its values."""
        bucket.whole = True
        give_memory(bucket.flat)
        phase = "other" if self.recorder.phase == "other" else "step"
        with torch.no_grad(), self.recorder.in_phase(phase):
            if not self._on_host:
                with self.recorder.waiting():  # where the backend's collectives block
                    bucket.gathering = all_gather_flat(
                        bucket.flat, bucket.mine, bucket.axis, self.recorder
                    )
                return
            with self._copies.behind_current():
                piece = bucket.part()  # the very place where the gather expects it
                piece.copy_(bucket.mine, non_blocking=True)
                gathering = all_gather_flat(bucket.flat, piece, bucket.axis, self.recorder)
            bucket.gathering = gathering or self._copies.copied()

    def _use(self, block: GatheredBlock) -> None:
        """A block is about to run: its values must be there."""
        self._gather(block)
        for start, bucket in block.started:
            if bucket.gathering is not None:
                with self.recorder.waiting():
                    bucket.gathering.wait()
            come_back(bucket.parameters)
            gathered, bucket.gathering = bucket.gathering is not None, None
            if not gathered or bucket.axis.group is None:
                continue
            self.recorder.add(
                start,
                "communication",
                "all-gather",
                f"all-gather {bucket.axis.name}",
                axis=bucket.axis.name,
                bytes=bucket.flat.numel() * bucket.flat.element_size(),
            )
        block.started.clear()

    def _let_go(self, block: GatheredBlock, *, keep: bool = True) -> None:
        """Free a block's values; `keep`: of what was opened, this rank's share as it is now."""
        if any(bucket.gathering is not None for bucket in block.buckets):
            self._use(block)  # gathered and never used
        for bucket in block.buckets:
            if bucket.whole:
                if bucket.opened and keep:
                    with torch.no_grad():
                        bucket.mine.copy_(bucket.part())
                self._free(bucket)

    @staticmethod
    def _free(bucket: Bucket) -> None:
        if bucket.resident:  # no other rank holds a share of it
            bucket.opened = False
            return
        if bucket.opened:
            bucket.part_from_readers()
        else:
            take_memory(bucket.flat)
        leave(bucket.parameters)
        bucket.whole = bucket.opened = False


def _unique(blocks: Iterable[GatheredBlock]) -> list[GatheredBlock]:
    return list({id(block): block for block in blocks}.values())


def _runs(module: nn.Module) -> bool:
    """Whether a module can be called; lists of modules or parameters cannot."""
    return type(module).forward is not nn.Module.forward


def _before_backward(output: Any, call: Any) -> None:
    """Call it with the gradient of any tensor of a module's output, before that is used."""
    if not torch.is_grad_enabled():
        return
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(call)  # type: ignore[no-untyped-call]
