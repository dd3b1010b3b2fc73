"""Replayed step: what one pipeline rank allocates and frees, action by action of its schedule.

    F      what each block saves for backward takes memory, block by block
    B      blocks in reverse: inner gradients while all of a block is saved, then its weights'
    I, W   as B in halves: what matmuls read and the gradients of their outputs stay from I to W
    RECV   a buffer from when it is posted; SEND frees after a later receive was taken

Of a layer that is recomputed the input stays, and its backward begins with all of it. Of a layer
whose activations are offloaded what is small stays; the rest is on the device during its own
forward and the next layer's, and during its own backward and that of the layer after it. Under
ZeRO-3 values of a block are on the device while it runs and while its neighbour runs.

What `runtime` allocates decides; sizes are those of the model's shape.
"""

from __future__ import annotations

from collections import deque

from hocket.cost.measured_stage import GRADIENT_BYTES, table_bytes, trained_weights
from hocket.cost.replayed_blocks import blocks_of, weights_by_block
from hocket.cost.replayed_gradients import (
    BlockGradients,
    FlatBuckets,
    Gradient,
    Gradients,
    ReplayedBytes,
    ShardedGradients,
)
from hocket.cost.step_problem import StepProblem
from hocket.spec.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
)

SCRATCH = {False: 2**21, True: 2**28}
"""Bytes of the fp32 buffer in which the loss takes its tokens, at most: on a CPU, on a GPU
(`runtime.tensor_parallel.cross_entropy`)."""

Key = tuple[int, int | None]
"""(stage, microbatch)."""


def peak_bytes(job: StepProblem, index: int, *, cuda: bool) -> int:
    """The most bytes at once that a pipeline rank allocates in a step: activations, gradients, what
    collectives fill, and under ZeRO-3 whole parameters."""
    replay = _Replay(job, index, cuda)
    for action in job.schedule.ranks[index]:
        for part in action.parts or (action,):
            replay.run(part)
    replay.finish()
    return replay.live.peak


class _Stage:
    """One stage of the rank."""

    def __init__(self, job: StepProblem, number: int, live: ReplayedBytes, cuda: bool) -> None:
        kinds = job.blocks(number)
        self.first, self.last = number == 0, number == job.schedule.num_stages - 1
        self.live = live
        by_block = weights_by_block(job, kinds)
        held = [(at, w) for at, own in enumerate(by_block) for w in trained_weights(own)]
        width = 0 if job.element_bytes == GRADIENT_BYTES else job.element_bytes
        gradients = [
            Gradient(
                block=at,
                nbytes=job.elements(w) * GRADIENT_BYTES,
                made=job.elements(w) * width,
                late=job.is_late(w),
                ranks=job.states(w),
            )
            for at, w in held
        ]
        self.gradients = _gradients(job, gradients, kinds, live, cuda)
        self.blocks = blocks_of(job, number, by_block, cuda=cuda)
        self.tables = table_bytes(job.shape, kinds, job.microbatch)
        self.deferred = {
            index for block in self.blocks for each in block.deferred for index in each.gradients
        }
        # A weight of both ends has two gradients, which meet when the embedding's is there.
        both = job.shape.tied and kinds[0] == "embedding" and kinds[-1] == "head"
        names = {w.name for w in job.shape.blocks["head"].weights} if both else set()
        tied = [index for index, (at, w) in enumerate(held) if at == 0 and w.name in names]
        self.keeps_first = both
        self.tied_index = tied[0] if tied else -1
        self.tied = gradients[tied[0]].nbytes if tied else 0
        self.tied_made = gradients[tied[0]].made if tied else 0
        self.left = 0  # of the last forward's last layer, on its way to the host
        self.whole: set[int] = set()  # blocks whose values are gathered (ZeRO-3)
        self.gathers = job.layout.zero == 3

    def made(self, which: tuple[int, ...]) -> int:
        """The largest of these gradients as backward makes it."""
        found = [self.gradients.gradients[index] for index in which]
        return max((g.made or g.nbytes for g in found), default=0)

    def come(self, which: tuple[int, ...], halved: bool) -> None:
        """A backward makes these gradients; half of one leaves out those of linear layers."""
        for index in which:
            if not (halved and index in self.deferred):
                self.gradients.arrive(index)

    def gather(self, block: int) -> None:
        if self.gathers and 0 <= block < len(self.blocks) and block not in self.whole:
            self.whole.add(block)
            self.live.take(self.blocks[block].values)

    def free(self, block: int) -> None:
        if block in self.whole:
            self.whole.remove(block)
            self.live.take(-self.blocks[block].values)

    def keeps(self, block: int) -> bool:
        """Whether a block's values stay from its forward to its backward."""
        kind = self.blocks[block].kind
        return kind == "head" or (kind == "embedding" and self.keeps_first)


class _Replay:
    def __init__(self, job: StepProblem, index: int, cuda: bool) -> None:
        self.job, self.live = job, ReplayedBytes()
        self.hidden, self.stream = job.hidden_bytes, job.stream_bytes
        self.stages = {
            stage: _Stage(job, stage, self.live, cuda) for stage in job.schedule.stages_of(index)
        }
        self.index = index
        self.place = job.schedule.stage_ranks
        self.scratch = _scratch(job, cuda)
        # In half precision the softmax is taken again in backward.
        self.scratch_again = 0 if job.element_bytes == GRADIENT_BYTES else self.scratch
        self.final: dict[int, Action] = {}
        for action in job.schedule.ranks[index]:
            for part in action.parts or (action,):
                if part.kind in (BACKWARD, WEIGHT):
                    self.final[part.stage] = part
        # Sends whose tensors are referenced, how many the host knows to be complete, and how many
        # were before each posted receive.
        self.cuda = cuda
        self.sends: deque[Key] = deque()
        self.released = self.complete = self.before_taken = 0
        self.posted: dict[tuple[str, int, int | None], int] = {}
        self.outputs: dict[Key, int] = {}

    def run(self, action: Action) -> None:
        kind, key = action.kind, (action.stage, action.microbatch)
        if kind == FORWARD:
            self._taken(RECV_F, action)
            self._forward(self.stages[action.stage], key)
        elif kind in (BACKWARD, INPUT):
            self._taken(RECV_B, action)
            self._backward(self.stages[action.stage], action)
        elif kind == WEIGHT:
            self._weight(self.stages[action.stage], action)
        elif kind in (RECV_F, RECV_B):
            self.live.take(self.stream)
            self.posted[kind, *key] = self.released + len(self.sends)
        elif kind in (SEND_F, SEND_B):
            self._release(self.complete)
            if kind == SEND_F:
                self.outputs[key] = self.outputs.get(key, 0) + 1
            self.sends.append(key if kind == SEND_F else (-1, None))
        elif kind == REDUCE_GRAD:
            self.stages[action.stage].gradients.launch()

    def finish(self) -> None:
        self._release(self.released + len(self.sends))
        for stage in self.stages.values():
            stage.gradients.finish()

    # --- messages ------------------------------------------------------------------------------

    def _taken(self, kind: str, action: Action) -> None:
        sends = self.posted.pop((kind, action.stage, action.microbatch), None)
        if sends is None:
            return
        if self.cuda:
            self._release(sends)
        else:
            # A neighbour has taken what was sent before the receive that was taken before; the
            # next send looks.
            self.complete, self.before_taken = max(self.complete, self.before_taken), sends

    def _release(self, count: int) -> None:
        while self.released < count:
            key = self.sends.popleft()
            self.released += 1
            if key[0] < 0:  # the gradient of an input
                self.live.take(-self.stream)
            else:
                self._drop_output(key)

    def _drop_output(self, key: Key) -> None:
        """One of those that refer to a stage's output has done with it."""
        self.outputs[key] -= 1
        if not self.outputs[key]:
            del self.outputs[key]
            self.live.take(-self.stream)

    # --- a forward -----------------------------------------------------------------------------

    def _forward(self, stage: _Stage, key: Key) -> None:
        live, blocks = self.live, stage.blocks
        stage.gradients.begins(FORWARD)
        live.take(stage.tables)
        if self._is_here(key[0] - 1):  # the same tensor
            self.outputs[key[0] - 1, key[1]] += 1
        for at, block in enumerate(blocks):
            stage.gather(at)
            if block.layer and at and not blocks[at - 1].layer and not stage.keeps(at - 1):
                stage.free(at - 1)
            stage.gather(at + 1)
            live.take(block.kept + block.moved)
            if block.layer:
                # What the layer before saved is on the host by now.
                live.take(-stage.left)
                stage.left = block.moved
                stage.free(at)
        if stage.last:
            live.touch(self.scratch)
        else:
            self.outputs[key] = 1
            live.take(self.stream)
        for at in list(stage.whole):
            if not stage.keeps(at):
                stage.free(at)

    # --- a backward ----------------------------------------------------------------------------

    def _backward(self, stage: _Stage, action: Action) -> None:
        live, blocks, key = self.live, stage.blocks, (action.stage, action.microbatch)
        halved = action.kind == INPUT
        stage.gradients.begins(action.kind)
        if self.final.get(action.stage) == action:
            stage.gradients.last()
        carried = 0  # the gradient that goes from block to block, but for the one that was given
        tied = 0
        for at in reversed(range(len(blocks))):
            block = blocks[at]
            released = block.kept + block.again + block.moved - (block.pending if halved else 0)
            if block.kind == "head":
                live.touch(self.scratch_again)
                stage.gather(at)
                stage.gather(at - 1)
                live.take(self.stream)
                carried = self.stream
                if not halved:
                    # The logits' gradient is freed before the weight's is widened.
                    live.touch(max(stage.made(block.first), stage.tied_made or stage.tied))
                    tied = stage.tied
                live.take(-released)
                live.touch(tied and stage.tied_made + tied)
                live.take(tied)
                stage.come(block.first + block.then, halved)
                live.touch(block.working)
                continue
            if not block.layer:
                own = (block.first + block.then)[::-1]
                stage.come(tuple(i for i in own if i != stage.tied_index), halved)
                if tied:
                    # It is widened; then the two are added, into a third.
                    live.touch(max(stage.tied_made + tied, 2 * tied))
                    live.take(-tied)
                stage.come(tuple(i for i in own if i == stage.tied_index), halved)
                live.take(-released)
                continue
            stage.gradients.layer_begins(at)
            for other in list(stage.whole):
                if other > at:
                    stage.free(other)
            stage.gather(at)
            if at + 1 == len(blocks) or not blocks[at + 1].layer:
                live.take(block.moved - stage.left)
                stage.left = 0
            if at and blocks[at - 1].layer:
                stage.gather(at - 1)
                live.take(blocks[at - 1].moved)
            live.take(block.again)
            if not halved:
                live.touch(block.working)
                stage.come(block.first, halved)
                live.touch(block.working_then)
            for phase in block.phases if halved else ():
                live.take(phase.taken)
                released += phase.taken
                live.touch(phase.working)
                stage.come(phase.gradients, halved)
                live.touch(phase.working)
            live.take(-released)
            live.touch(self.hidden)
            before = {i for phase in block.phases for i in phase.gradients} if halved else set()
            stage.come(tuple(i for i in block.then if i not in before), halved)
            live.touch(self.hidden)
            if not carried:
                carried = self.stream
                live.take(carried)
        stage.gradients.ends(action.kind)
        live.take(-stage.tables)
        for at in list(stage.whole):
            stage.free(at)
        if stage.first:  # else it is kept for the stage before
            live.take(-carried)
        else:
            live.take(self.stream - carried)
            if self._is_here(key[0] - 1):
                self._drop_output((key[0] - 1, key[1]))
            else:
                live.take(-self.stream)  # what was received
        if not stage.last:
            self._drop_output(key)
            live.take(-self.stream)  # the output's gradient

    def _weight(self, stage: _Stage, action: Action) -> None:
        live = self.live
        stage.gradients.begins(WEIGHT)
        if self.final.get(action.stage) == action:
            stage.gradients.last()
        for block in reversed(stage.blocks):
            if block.kind == "head" and stage.tied:
                stage.gradients.arrive(stage.tied_index, apart=True)
            for each in block.deferred:
                if self.job.layout.sequence_parallel:
                    live.touch(self.hidden)  # an input, gathered again
                for index in each.gradients:
                    stage.gradients.arrive(index, apart=True)
                live.take(-each.input - each.output)
        stage.gradients.ends(WEIGHT)

    def _is_here(self, stage: int) -> bool:
        return stage >= 0 and self.place[stage] == self.index


# --- sizes ----------------------------------------------------------------------------------------


def _gradients(
    job: StepProblem, found: list[Gradient], kinds: list[str], live: ReplayedBytes, cuda: bool
) -> Gradients:
    zero = job.layout.zero
    if zero == 3:
        after = len(kinds) - 1 if kinds[-1] == "head" else None
        return BlockGradients(live, found, after=after)
    if zero:
        return ShardedGradients.of_stage(live, found, job.bucket_mb, zero)
    if job.layout.data_degree > 1:
        return FlatBuckets(live, found, job.bucket_mb, cuda=cuda)
    return Gradients(live, found)


def _scratch(job: StepProblem, cuda: bool) -> int:
    """Bytes of the buffer in which the loss takes its tokens: of this rank's vocabulary rows."""
    shape, head = job.shape, job.shape.blocks["head"]
    split = any(p.split == "vocab" for p in head.products)
    rows = -(-shape.vocab // job.layout.tp) if split else shape.vocab
    return min(SCRATCH[cuda], job.microbatch.tokens * rows * 4)
