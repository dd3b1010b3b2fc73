"""The executor: the one interpreter of a Schedule.

What each action does on the rank that holds its stage s, for microbatch m:

    RECV_F  post the receive of the hidden state from stage s - 1    (F waits for it)
    F       run the stage; the last one ends in its loss
    SEND_F  begin to send the output to stage s + 1
    RECV_B  post the receive of the output's gradient from stage s + 1    (B, I wait for it)
    B       run backward; the activations are freed
    SEND_B  begin to send the gradient of the input to stage s - 1
    I, W    the two halves of B: all but the weights of linear layers, then those weights
    REDUCE_GRAD  launch what is left of the stage's data-parallel reduction

Stages that lie on one rank hand tensors over directly. Messages carry no names: both ends of a
pair keep the same order. All messages of a rank share one process group, whose NCCL communicator
runs them one by one in the order in which they are enqueued: the order of the line, in which
`schedules.validate` has simulated them with every action blocking.

Lifetime of tensors on CUDA: a received tensor is allocated before its receive is enqueued and
consumed by the compute stream after a wait on it. A sent tensor is referenced until the compute
stream has waited for an operation that the communicator runs later, so that the allocator reuses
its memory after it was sent; the host never waits. (Not executed on a GPU yet.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hocket.runtime.collectives import CollectiveWork, irecv, isend
from hocket.runtime.linear import WeightGradients, defer_weight_gradients
from hocket.runtime.mesh import Axis
from hocket.runtime.pipeline.stage import Microbatch, Stage
from hocket.runtime.record import Recorder
from hocket.runtime.tensor_parallel.cross_entropy import loss_dtype
from hocket.spec.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    OVERLAP_F_B,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
    Schedule,
)

Microbatches = Mapping[int, Microbatch] | Sequence[Microbatch]
Key = tuple[int, int]
"""(stage, microbatch)."""


class Reducer(Protocol):
    """What sums one stage's gradients over the data ranks (`data_parallel.Buckets`)."""

    def begins(self, kind: str) -> None:
        """A forward or backward of the stage begins: F, B, I or W."""

    def ends(self, kind: str) -> None:
        """It is over."""

    def last_backward(self) -> None:
        """The backward that begins now is the step's last: reduce gradients as they come."""

    def launch(self) -> None:
        """Every gradient is there: begin to reduce what is left."""


class Executor:
    """Runs one rank's line of a Schedule.

    Args:
        stages: the stages that this rank holds.
        schedule: the whole board; this rank's line is `schedule.ranks[axis.index]`.
        axis: the pipeline axis.
        recorder: of this rank.
        device: where received tensors are made.
        reducers: stage to what sums its gradients; a stage without one keeps its own.
        before_forward: called with (stage, microbatch) before each F (keys of random numbers).
    """

    def __init__(
        self,
        stages: Iterable[Stage],
        schedule: Schedule,
        axis: Axis,
        recorder: Recorder,
        *,
        device: torch.device | str = "cpu",
        reducers: Mapping[int, Reducer] | None = None,
        before_forward: Callable[[int, int], None] | None = None,
    ) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.schedule = schedule
        self.axis = axis
        self.recorder = recorder
        self.device = torch.device(device)
        # On CUDA the host runs ahead of the device: that a send is complete it would learn late.
        self._host_knows = self.device.type == "cpu"
        self.reducers = dict(reducers or {})
        self.before_forward = before_forward
        self._place = schedule.stage_ranks
        self._tokens: Tensor  # of an evaluation
        self._loss_dtype = loss_dtype(next(iter(self.stages.values())).dtype)
        self._actions = schedule.ranks[axis.index]
        assert set(self.stages) == set(schedule.stages_of(axis.index)), (
            set(self.stages),
            schedule.stages_of(axis.index),
        )
        self._deferred = WeightGradients()
        if any(action.kind in (INPUT, WEIGHT) for action in self._actions):
            for stage in self.stages.values():
                defer_weight_gradients(stage.module, self._deferred)
        self._run = {
            FORWARD: self._forward,
            BACKWARD: self._backward,
            INPUT: self._input,
            WEIGHT: self._weight,
            SEND_F: self._send,
            SEND_B: self._send,
            RECV_F: self._receive,
            RECV_B: self._receive,
            REDUCE_GRAD: self._reduce,
            OVERLAP_F_B: self._overlap,
        }
        self._reset({}, 1.0, grad=True)

    # --- what the engine calls ---------------------------------------------------------------

    def step(self, microbatches: Microbatches, num_tokens: float) -> Tensor:
        """One step's forwards and backwards; gradients are added to `.grad`.

        Args:
            microbatches: by number, each a dict of tensors [B, S, ...]. Every pipeline rank is
                given all of them.
            num_tokens: valid tokens of the global batch; the sum of losses is divided by it, so
                that the gradients, summed over the data ranks, are those of the global mean.

        Returns:
            This rank's share of the global mean loss, detached, fp32 (fp64 of an fp64 model): 0
            where the last stage is elsewhere.
        """
        return self.run(self._actions, microbatches, num_tokens)

    def run(
        self, actions: Iterable[Action], microbatches: Microbatches, num_tokens: float
    ) -> Tensor:
        """As `step`, for any finite sequence of actions of this rank."""
        self._reset(microbatches, 1.0 / num_tokens, grad=True)
        line = list(actions)
        self._final.update(_final_backwards(line))
        run, beat = self._run, self.recorder.beat
        for index, action in enumerate(line):
            if beat is not None:
                beat.action(index, action.microbatch)
            run[action.kind](action)
        if beat is not None:
            beat.action(-1, None)
        return self._finish()

    @torch.no_grad()
    def evaluate(self, microbatches: Microbatches) -> tuple[Tensor, Tensor]:
        """Forward only, for any number of microbatches.

        Returns:
            (sum of losses, number of tokens) of this rank's last stage, fp32: zeros elsewhere.
        """
        self._reset(microbatches, 1.0, grad=False)
        self._tokens = torch.zeros((), device=self.device)
        for action in self._forwards(len(microbatches)):
            self._run[action.kind](action)
        return self._finish(), self._tokens

    # --- one step's state ----------------------------------------------------------------------

    def _reset(self, microbatches: Microbatches, scale: float, *, grad: bool) -> None:
        self._microbatches = microbatches
        self._scale = scale
        self._grad = grad
        self._inputs: dict[Key, Tensor] = {}  # leaves that backward ends in
        self._outputs: dict[Key, Tensor] = {}  # roots that backward begins from
        self._input_grads: dict[Key, Tensor] = {}
        self._output_grads: dict[Key, Tensor] = {}
        self._sends: deque[tuple[CollectiveWork, Tensor]] = deque()
        self._released = 0  # sends that were complete, or followed by one that was
        self._posted: dict[Action, tuple[CollectiveWork, Tensor, int]] = {}  # and sends before it
        self._final: dict[int, Action] = {}
        self._pending: dict[Key, Any] = {}
        self._losses: list[Tensor] = []

    def _finish(self) -> Tensor:
        self._release(self._released + len(self._sends))
        assert not self._posted, f"received and never taken: {list(self._posted)}"
        losses, self._losses = self._losses, []
        self._microbatches = {}
        if not losses:
            return torch.zeros((), dtype=self._loss_dtype, device=self.device)
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()

    def _forwards(self, count: int) -> Iterator[Action]:
        """The forwards of `count` microbatches, in the order of the schedule.

        What is left of the lines without all backwards is again a restriction of one order of all
        ranks, and so are several of them in a row: it completes where the schedule does.
        """
        forward = [action for part in self._actions for action in part.parts or (part,)]
        forward = [action for action in forward if action.kind in (FORWARD, SEND_F, RECV_F)]
        each = self.schedule.num_microbatches
        for first in range(0, count, each):
            for action in forward:
                if first + _number(action) < count:
                    yield Action(action.stage, action.kind, first + _number(action))

    # --- compute -------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        key = (action.stage, _number(action))
        stage = self.stages[action.stage]
        if self.before_forward is not None:
            self.before_forward(*key)
        self._take(RECV_F, key)
        hidden = self._inputs.get(key)
        if hidden is None and not stage.is_first:
            # Handed over by the stage before, on this same rank.
            hidden = self._outputs[key[0] - 1, key[1]].detach()
            if self._grad:
                self._inputs[key] = hidden.requires_grad_()
        microbatch = self._microbatches[key[1]]
        with self._pass(action):
            result = stage.forward(microbatch, hidden)
        if not stage.is_last:
            self._outputs[key] = result
        else:
            total, tokens = result
            loss = total.to(self._loss_dtype) * self._scale
            self._losses.append(loss.detach())
            if self._grad:
                self._outputs[key] = loss
            else:
                self._tokens += tokens
        if not self._grad:
            self._inputs.pop(key, None)
            self._outputs.pop((key[0] - 1, key[1]), None)

    def _backward(self, action: Action) -> None:
        key = (action.stage, _number(action))
        self._take(RECV_B, key)
        self._prepare(action)
        output, gradient = self._outputs.pop(key), self._output_grads.pop(key, None)
        with self._pass(action, BACKWARD):
            # Nothing trainable may lead to what a stage hands on; a loss that has none is an error.
            if output.requires_grad or self.stages[action.stage].is_last:
                output.backward(gradient)  # type: ignore[no-untyped-call]
        hidden = self._inputs.pop(key, None)
        if hidden is not None:
            assert hidden.grad is not None, f"{action}: the stage does not use its input"
            self._hand_back(key, hidden.grad)

    def _input(self, action: Action) -> None:
        key = (action.stage, _number(action))
        with self._deferred.deferring():
            self._backward(action)
        self._pending[key] = self._deferred.take()

    def _weight(self, action: Action) -> None:
        key = (action.stage, _number(action))
        self._prepare(action)
        with self._pass(action):
            WeightGradients.run(self._pending.pop(key))

    @contextmanager
    def _pass(self, action: Action, kind: str | None = None) -> Iterator[None]:
        """Within, a stage is gone through forward or backward; noted as `kind`."""
        reducer = self.reducers.get(action.stage)
        with self.recorder.span(
            "compute",
            kind or action.kind,
            str(action),
            stage=action.stage,
            microbatch=action.microbatch,
        ):
            if reducer is not None:
                reducer.begins(action.kind)
            yield
            if reducer is not None:
                reducer.ends(action.kind)

    def _overlap(self, action: Action) -> None:
        assert action.parts is not None
        for part in action.parts:
            self._run[part.kind](part)

    def _prepare(self, action: Action) -> None:
        """Let the reduction of a stage begin inside its last backward."""
        if self._final.get(action.stage) == action:
            reducer = self.reducers.get(action.stage)
            if reducer is not None:
                reducer.last_backward()

    def _hand_back(self, key: Key, gradient: Tensor) -> None:
        """Keep the input's gradient for SEND_B, or give it to the stage before on this rank."""
        before = (key[0] - 1, key[1])
        if self._place[before[0]] == self.axis.index:
            self._output_grads[before] = gradient
        else:
            self._input_grads[key] = gradient

    def _reduce(self, action: Action) -> None:
        reducer = self.reducers.get(action.stage)
        if reducer is not None:
            reducer.launch()

    # --- messages ------------------------------------------------------------------------------

    def _send(self, action: Action) -> None:
        key = (action.stage, _number(action))
        peer = self._place[action.peer_stage]
        if action.kind == SEND_F:
            tensor = self._outputs[key] if self._grad else self._outputs.pop(key)
        else:
            tensor = self._input_grads.pop(key)
        tensor = tensor.detach().contiguous()
        while self._sends and self._host_knows and _done(self._sends[0][0]):
            self._sends.popleft()
            self._released += 1
        start = self.recorder.mark()
        work = isend(tensor, self.axis, peer, self.recorder)
        self._sends.append((work, tensor))
        self._note(start, action, tensor)

    def _receive(self, action: Action) -> None:
        """Post the receive; `_take` waits for it."""
        stage = self.stages[action.stage]
        tensor = torch.empty(
            stage.hidden_shape(self._microbatches[_number(action)]),
            dtype=stage.dtype,
            device=self.device,
        )
        work = irecv(tensor, self.axis, self._place[action.peer_stage], self.recorder)
        self._posted[action] = (work, tensor, self._released + len(self._sends))

    def _take(self, kind: str, key: Key) -> None:
        """Wait for the tensor that (stage, microbatch) consumes, if it comes from another rank."""
        action = Action(key[0], kind, key[1])
        if action not in self._posted:
            return
        work, tensor, sends = self._posted.pop(action)
        start = self.recorder.mark()
        work.wait()
        self._note(start, action, tensor)
        if not self._host_knows:
            self._release(sends)
        if kind == RECV_F:
            self._inputs[key] = tensor.requires_grad_() if self._grad else tensor
        else:
            self._output_grads[key] = tensor

    def _release(self, count: int) -> None:
        """Wait for the first `count` sends of the step, and forget their tensors."""
        while self._released < count:
            self._sends.popleft()[0].wait()
            self._released += 1

    def _note(self, start: Any, action: Action, tensor: Tensor) -> None:
        if start is not None:
            self.recorder.add(
                start,
                "communication",
                action.kind,
                str(action),
                stage=action.stage,
                microbatch=action.microbatch,
                axis=self.axis.name,
                bytes=tensor.numel() * tensor.element_size(),
            )


def _number(action: Action) -> int:
    assert action.microbatch is not None, action
    return action.microbatch


def _done(work: Any) -> bool:
    """Whether a send is through; a backend that cannot say is waited for at the end."""
    try:
        return bool(work.is_completed())
    except (AttributeError, RuntimeError):
        return False


def _final_backwards(line: Iterable[Action]) -> dict[int, Action]:
    """Stage to its last action that yields gradients of parameters."""
    final: dict[int, Action] = {}
    for action in line:
        for part in action.parts or (action,):
            if part.kind in (BACKWARD, WEIGHT):
                final[part.stage] = part
    return final


def accumulation_schedule(num_microbatches: int) -> Schedule:
    """Without a pipeline: one microbatch after the other."""
    line = [Action(0, kind, m) for m in range(num_microbatches) for kind in (FORWARD, BACKWARD)]
    return Schedule(
        name="accumulation",
        num_microbatches=num_microbatches,
        stage_ranks=(0,),
        ranks=(tuple(line),),
    )
