"""The executor: the one interpreter of a Schedule.

What each action does on the rank that holds its stage s, for microbatch m:

    RECV_F  wait for the hidden state from stage s - 1        (posted ahead of need)
    F       run the stage; the last one ends in its loss
    SEND_F  begin to send the output to stage s + 1           (waited for when the step ends)
    RECV_B  wait for the gradient of the output from stage s + 1
    B       run backward; the activations are freed
    SEND_B  begin to send the gradient of the input to stage s - 1
    I, W    the two halves of B: all but the weights of linear layers, then those weights
    REDUCE_GRAD  launch what is left of the stage's data-parallel reduction

Stages that lie on one rank hand tensors over directly. Messages are not named: both ends of a
pair keep the same order, which `schedules.validate` has checked.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from hocket.runtime.collectives import Work, irecv, isend
from hocket.runtime.linear import WeightGradients, defer_weight_gradients
from hocket.runtime.mesh import Axis
from hocket.runtime.pipeline.stage import Microbatch, Stage
from hocket.runtime.record import Recorder
from hocket.spec.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    OVERLAP_F_B,
    RECEIVES,
    RECV_B,
    RECV_F,
    REDUCE_GRAD,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
    Schedule,
)

AHEAD = 2
"""Receives posted ahead of need, per neighbour: one in use, one on its way."""

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
        back: an axis over the same ranks with a group of its own, for messages to lower indices.
            NCCL runs the messages of a pair in one queue and needs it, so that a send does not
            wait behind a receive; elsewhere None.
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
        back: Axis | None = None,
        before_forward: Callable[[int, int], None] | None = None,
    ) -> None:
        self.stages = {stage.index: stage for stage in stages}
        self.schedule = schedule
        self.axis = axis
        self.recorder = recorder
        self.device = torch.device(device)
        self.reducers = dict(reducers or {})
        self.before_forward = before_forward
        self._back = back if back is not None else axis
        self._place = schedule.stage_ranks
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
            This rank's share of the global mean loss, detached, fp32: 0 where the last stage is
            elsewhere.
        """
        return self.run(self._actions, microbatches, num_tokens)

    def run(
        self, actions: Iterable[Action], microbatches: Microbatches, num_tokens: float
    ) -> Tensor:
        """As `step`, for any finite sequence of actions of this rank."""
        self._reset(microbatches, 1.0 / num_tokens, grad=True)
        line = list(actions)
        self._final.update(_final_backwards(line))
        self._plan_receives(line)
        run = self._run
        for action in line:
            run[action.kind](action)
        return self._finish()

    @torch.no_grad()
    def evaluate(self, microbatches: Microbatches) -> tuple[Tensor, Tensor]:
        """Forward only, for any number of microbatches.

        Returns:
            (sum of losses, number of tokens) of this rank's last stage, fp32: zeros elsewhere.
        """
        self._reset(microbatches, 1.0, grad=False)
        line = list(self._forwards(range(len(microbatches))))
        self._plan_receives(line)
        for action in line:
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
        self._sends: deque[tuple[Work, Tensor]] = deque()
        self._upcoming: dict[int, deque[Action]] = {}
        self._posted: dict[Action, tuple[Work, Tensor]] = {}
        self._final: dict[int, Action] = {}
        self._pending: dict[Key, Any] = {}
        self._losses: list[Tensor] = []
        self._tokens = torch.zeros((), device=self.device)

    def _finish(self) -> Tensor:
        while self._sends:
            self._sends.popleft()[0].wait()
        assert not self._posted, f"received and never taken: {list(self._posted)}"
        losses, self._losses = self._losses, []
        self._microbatches = {}
        if not losses:
            return torch.zeros((), device=self.device)
        return torch.stack(losses).sum()

    def _forwards(self, numbers: Iterable[int]) -> Iterator[Action]:
        """Each microbatch through this rank's stages, one after the other."""
        rank, last = self.axis.index, len(self._place) - 1
        for m in numbers:
            for s in sorted(self.stages):
                if s > 0 and self._place[s - 1] != rank:
                    yield Action(s, RECV_F, m)
                yield Action(s, FORWARD, m)
                if s < last and self._place[s + 1] != rank:
                    yield Action(s, SEND_F, m)

    # --- compute -------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        key = (action.stage, _number(action))
        stage = self.stages[action.stage]
        if self.before_forward is not None:
            self.before_forward(*key)
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
            loss = total.float() * self._scale
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
        self._prepare(action)
        output, gradient = self._outputs.pop(key), self._output_grads.pop(key, None)
        with self._pass(action, BACKWARD):
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
        while self._sends and _done(self._sends[0][0]):
            self._sends.popleft()
        start = self.recorder.mark()
        work = isend(tensor, self._route(self.axis.index, peer), peer, self.recorder)
        self._sends.append((work, tensor))
        self._note(start, action, tensor)

    def _receive(self, action: Action) -> None:
        source = self._place[action.peer_stage]
        start = self.recorder.mark()
        self._post(source, until=action)
        work, tensor = self._posted.pop(action)
        work.wait()
        self._note(start, action, tensor)
        self._post(source)
        key = (action.stage, _number(action))
        if action.kind == RECV_F:
            self._inputs[key] = tensor.requires_grad_() if self._grad else tensor
        else:
            self._output_grads[key] = tensor

    def _plan_receives(self, line: Iterable[Action]) -> None:
        """Queue the receives by neighbour, in the order of the line, and post the first ones."""
        queues: dict[int, deque[Action]] = defaultdict(deque)
        for action in line:
            if action.kind in RECEIVES:
                queues[self._place[action.peer_stage]].append(action)
        self._upcoming = dict(queues)
        for source in self._upcoming:
            self._post(source)

    def _post(self, source: int, until: Action | None = None) -> None:
        """Post receives from `source` in order: up to AHEAD of them, or until one is posted."""
        queue = self._upcoming[source]
        waiting = sum(1 for a in self._posted if self._place[a.peer_stage] == source)
        while queue and (waiting < AHEAD if until is None else until not in self._posted):
            action = queue.popleft()
            stage = self.stages[action.stage]
            tensor = torch.empty(
                stage.hidden_shape(self._microbatches[_number(action)]),
                dtype=stage.dtype,
                device=self.device,
            )
            work = irecv(tensor, self._route(source, self.axis.index), source, self.recorder)
            self._posted[action] = (work, tensor)
            waiting += 1

    def _route(self, source: int, target: int) -> Axis:
        return self.axis if source < target else self._back

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
