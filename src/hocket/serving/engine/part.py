"""StagePart: one rank's part of every step of a replica, from hidden state to hidden state.

    RECV_F   hidden [1, T, H] from the stage before      (all but the first stage)
    F        the stage's layers over the step's tokens
    SEND_F   hidden to the stage after                   (all but the last stage)
    sample   logits [N, V of this rank] to tokens        (the last stage)

These are the letters of a training step, whose executor is not used: what it interprets is a
Schedule known to its end, whose receives it posts where the lines have them, whose sends it waits
for when the step is over, and around which it keeps what backward needs. Here there is no board:
every rank runs the plans in the order in which they come, and never waits for all of them. What is
the same is the same code: `runtime.collectives`, the Recorder's spans, and so the Timeline.

On a device, `sample` is launched and its result is collected later: meanwhile the next step can be
planned and launched. Receives are posted when their step is run, and not before: NCCL runs the
operations of a communicator in their order, and a receive that is posted early holds up the send of
the step before. Plan by plan, receive before send, all ranks follow one order of messages, in which
every operation may block.

Legend: T tokens of a step, H hidden, N rows of logits, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

from hocket.runtime.collectives import CollectiveWork, broadcast, irecv, isend
from hocket.runtime.expert_parallel.copies import ExpertBalancer
from hocket.runtime.mesh import Mesh
from hocket.serving.engine.device_sampler import DeviceSampler, Sampled
from hocket.serving.scheduling.step import StepPlan, StepResult
from hocket.spec.schedule import FORWARD, RECV_F, SEND_F, Action


class RunnerProtocol(Protocol):
    """A stage's layers over a step's tokens (`engine.runner.StageRunner`)."""

    def run(self, plan: StepPlan, hidden: Tensor | None) -> Tensor: ...

    def num_tokens(self, plan: StepPlan) -> int: ...


class SamplerProtocol(Protocol):
    """Tokens from logits (`engine.sampler.Sampler`)."""

    def begin(self, plan: StepPlan) -> None: ...

    def sample(self, logits: Tensor, plan: StepPlan) -> StepResult | None: ...


class StagePart:
    """Receives, runs, sends and samples; plans must come in the same order on every rank.

    Args:
        runner: of this rank's stage.
        sampler: on the last stage, of its first context rank; a `DeviceSampler`'s results are
            collected.
        mesh: the replica's ranks.
        hidden_size, dtype: of what travels between stages.
        depth: plans in flight: a send that so many plans have followed has been received.
        balancer: places copies of experts, between steps.
        last: the tokens that were sampled last, where steps read them on all context ranks.
    """

    def __init__(
        self,
        runner: RunnerProtocol,
        sampler: SamplerProtocol | DeviceSampler | None,
        mesh: Mesh,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        depth: int,
        balancer: ExpertBalancer | None = None,
        last: Tensor | None = None,
    ) -> None:
        self.runner, self.sampler, self.mesh = runner, sampler, mesh
        self.axis = mesh.axis("pp")
        self.recorder = mesh.recorder
        self.stage = self.axis.index
        self.is_last = self.stage == self.axis.size - 1
        assert (sampler is not None) == (self.is_last and mesh.axis("cp").index == 0)
        self.hidden_size, self.dtype, self.depth = hidden_size, dtype, depth
        self.balancer = balancer
        self._last = last if mesh.axis("cp").size > 1 else None
        # NCCL runs the messages of a communicator in the order in which they are enqueued: behind
        # the receive of a later plan, the send of this one would wait for the stage before.
        self._early = mesh.device.type == "cpu"
        self._launched: deque[Sampled | StepResult] = deque()
        self._posted: deque[tuple[int, CollectiveWork, Tensor]] = deque()
        self._sends: deque[tuple[CollectiveWork, Tensor]] = deque()
        # What shared memory has no room for goes on only while this process waits for it; other
        # backends send by themselves, and Gloo's wait lasts until the receive is posted.
        self._pushes = self.axis.group is not None and self.axis.group.name() in ("shm", "links")

    @property
    def expert_imbalance(self) -> tuple[float, float] | None:
        """Rows of the rank of experts with most over the mean, before and after the last placement
        of copies."""
        return None if self.balancer is None else self.balancer.imbalance

    # --- one step ----------------------------------------------------------------------------

    def expect(self, plan: StepPlan) -> None:
        """Post the receive of a plan's hidden state, where that may be done early."""
        if self.stage > 0 and self._early:
            self._post(plan)

    def _post(self, plan: StepPlan) -> None:
        hidden = torch.empty(
            1, self.runner.num_tokens(plan), self.hidden_size, dtype=self.dtype,
            device=self.mesh.device,
        )  # fmt: skip
        work = irecv(hidden, self.axis, self.stage - 1, self.recorder)
        self._posted.append((plan.number, work, hidden))

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult | None:
        """Run the step; its result on the rank that samples, None on the others and where it is
        to be collected."""
        if self.stage and not self._early:
            self._post(plan)
        hidden = self._receive(plan.number) if self.stage else None
        if self.sampler is not None:
            self.sampler.begin(plan)
        if self.balancer is not None:
            self.balancer.step()
        start = self.recorder.mark()
        output = self.runner.run(plan, hidden)
        self._note(start, "compute", FORWARD, plan.number)
        if not self.is_last:
            self._send(output, plan.number)
            return None
        result = self._sample(output, plan)
        if self._last is not None and plan.num_logits:  # which the first context rank sampled
            broadcast(self._last, self.mesh.axis("cp"), self.recorder)
        return result

    def _sample(self, output: Tensor, plan: StepPlan) -> StepResult | None:
        if self.sampler is None:
            return None
        start = self.recorder.mark()
        result: StepResult | Sampled | None = None
        if not plan.num_logits:  # pieces of prompts, none of them its last
            result = StepResult(plan.number, []) if self.mesh.axis("tp").index == 0 else None
        elif isinstance(self.sampler, DeviceSampler):
            result = self.sampler.launch(output, plan)
        else:
            result = self.sampler.sample(output, plan)
        if start is not None and plan.num_logits:
            self.recorder.add(start, "compute", "sample", f"sample {plan.number}", stage=self.stage)
        if result is None or not isinstance(self.sampler, DeviceSampler):
            assert not isinstance(result, Sampled)
            return result
        self._launched.append(result)
        return None

    @property
    def uncollected(self) -> int:
        """Steps whose results are to be collected."""
        return len(self._launched)

    def collect(self) -> StepResult | None:
        """The result of the oldest step that was launched; waits for it. None: there is none."""
        if not self._launched:
            return None
        first = self._launched.popleft()
        return first.result() if isinstance(first, Sampled) else first

    def _receive(self, number: int) -> Tensor:
        posted, work, hidden = self._posted.popleft()
        assert posted == number, (posted, number)
        start = self.recorder.mark()
        work.wait()
        self._note(start, "communication", RECV_F, number, hidden)
        return hidden

    def _send(self, hidden: Tensor, number: int) -> None:
        hidden = hidden.contiguous()
        start = self.recorder.mark()
        work = isend(hidden, self.axis, self.stage + 1, self.recorder)
        self._sends.append((work, hidden))
        self._note(start, "communication", SEND_F, number, hidden)
        while len(self._sends) > self.depth:
            self._sends.popleft()[0].wait()

    def settle(self) -> None:
        """Wait until what was sent has left this process, where it does not leave by itself."""
        while self._pushes and self._sends:
            self._sends.popleft()[0].wait()

    # --- what ran when -----------------------------------------------------------------------

    def record(self) -> None:
        """Note what runs when, from here on."""
        self.recorder.clear()
        self.recorder.recording = True

    def recorded(self) -> dict[str, Any]:
        """Stop noting: the `events` and `collectives` since `record`, as plain data."""
        self.recorder.recording = False
        events = [dataclasses.asdict(event) for event in self.recorder.timeline_events()]
        return {"events": events, "collectives": self.recorder.collectives()}

    def _note(
        self, start: Any, lane: str, kind: str, number: int, tensor: Tensor | None = None
    ) -> None:
        if start is None:
            return
        nbytes = 0 if tensor is None else tensor.numel() * tensor.element_size()
        self.recorder.add(
            start,
            lane,
            kind,
            str(Action(self.stage, kind, number)),
            stage=self.stage,
            microbatch=number,
            axis=None if tensor is None else self.axis.name,
            bytes=nbytes,
        )
