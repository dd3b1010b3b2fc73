"""Scheduler: what one replica computes next. Continuous batching, without torch.

A plan is filled in this order:

    1  decode     one token of each sequence whose last token is known; with several plans in
                  flight an even part of them, so that every pipeline stage has one to work on
    2  admit      requests that wait get slots and blocks: first those that were preempted, then
                  by turn (`waiting`); the first that does not fit in the cache ends this
    3  prefill    chunks of prompts fill the rest of the tokens (`chunks`); chunks of one prompt
                  may be in several plans in flight

With `SchedulerLimits.lookahead` a sequence is decoded again while the plan that samples its token
is still in flight: the token is UNKNOWN to the plan, and the device knows it. What a result says of
the end of a sequence then comes one plan late; the token computed meanwhile is dropped.
Sequences with a structure are not looked ahead of: the next mask follows from this token.

A quarter of the tokens is kept from 1 while prompts wait, and decoding sequences take turns if
they do not fit. Chunked prefill during decoding: Agrawal et al. 2024 (Sarathi-Serve); paged
cache: Kwon et al. 2023; fairness: Sheng et al. 2024.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections import Counter, deque
from typing import Final

from hocket.serving.request import Finish, Output, RefusalKind, Request, RequestRefused
from hocket.serving.scheduling.chunks import Share, needs_logits, shares
from hocket.serving.scheduling.flight import Flight
from hocket.serving.scheduling.limits import SchedulerLimits
from hocket.serving.scheduling.memory import CacheAllocator
from hocket.serving.scheduling.prefix import Digests
from hocket.serving.scheduling.sequence import DECODE, WAITING, Sequence
from hocket.serving.scheduling.stats import Pace, Stats
from hocket.serving.scheduling.step import ALL, LAST, NONE, UNKNOWN, BatchRow, StepPlan, StepResult
from hocket.serving.scheduling.waiting import ANSWER_WEIGHT, PROMPT_WEIGHT, WaitingRequests

LOOK: Final = 32
"""Requests that one plan may pass over because they would not get tokens yet, or because another
computes what they begin with."""
PATIENCE: Final = 8
"""Plans for which a request waits for one block that another computes."""


class Scheduler:
    """Requests of one replica.

    Results must come in the order of the plans, and every stage must compute plans in their
    order: a block may be read by a plan while the one that fills it is still in flight.

    Args:
        limits: what it may hold.
        secret: of the prefix cache's digests. None: drawn.
    """

    def __init__(self, limits: SchedulerLimits, *, secret: bytes | None = None) -> None:
        self.limits = limits
        self._memory = CacheAllocator(limits, Digests(limits.block_size, secret))
        self._waiting = WaitingRequests()
        self._by_id: dict[str, Sequence] = {}
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._flights: deque[Flight] = deque()
        self._serial = self._number = 0
        self._burst = 0  # most prompt tokens that were to be computed since the last time of none
        self._pace = Pace()
        self._counts = Stats()
        self._finished: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()

    # --- requests come and go ----------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Take a request.

        Raises:
            RequestRefused: it can never be computed, or too many wait.
        """
        self._check(request, now)
        user = self._waiting.user(request.user)
        sequence = Sequence(request, self._serial, user, now, self.limits.max_model_len)
        self._serial += 1
        self._by_id[request.id] = sequence
        self._waiting.add(sequence)
        if sequence.deadline is not None:
            heap = self._deadlines
            if len(heap) > 2 * len(self._by_id) + 16:
                heap[:] = [entry for entry in heap if entry[2].finish_reason is None]
                heapq.heapify(heap)
            heapq.heappush(heap, (sequence.deadline, sequence.serial, sequence))

    def abort(self, id: str) -> list[Output]:
        """End a request, whatever it does; its end, or nothing if it has ended already."""
        sequence = self._by_id.get(id)
        return [] if sequence is None else [self._end(sequence, "abort")]

    def expire(self, now: float) -> list[Output]:
        """End the requests whose time is over."""
        outputs = []
        while self._deadlines and self._deadlines[0][0] <= now:
            sequence = heapq.heappop(self._deadlines)[2]
            if sequence.finish_reason is None:
                outputs.append(self._end(sequence, "deadline"))
        return outputs

    @property
    def outstanding(self) -> int:
        return len(self._flights)

    @property
    def idle(self) -> bool:
        return not self._by_id and not self._flights

    def stats(self) -> Stats:
        """Figures of now and since the start."""
        memory, counts = self._memory, self._counts
        counts.running = len(memory.running)
        counts.waiting = len(self._waiting) + len(memory.again)
        counts.waiting_tokens = self._waiting.tokens + sum(
            one.prompt_length for one in memory.again.values()
        )
        counts.users = self._waiting.users
        counts.in_flight = len(self._flights)
        counts.blocks_total = self.limits.num_blocks
        counts.blocks_used = memory.pool.used
        counts.blocks_cached = memory.pool.kept
        counts.preempted = memory.preempted
        counts.finished = self._finished.total()
        counts.finished_by = dict(self._finished)
        counts.refused = self._refused.total()
        counts.refused_by = dict(self._refused)
        return dataclasses.replace(counts)

    # --- plans -------------------------------------------------------------------------------

    def plan(self, now: float) -> StepPlan | None:
        """The next step; None where there is nothing to compute, or enough is in flight."""
        limits, memory = self.limits, self._memory
        if len(self._flights) >= limits.depth:
            return None
        flight = Flight(self._number)
        queued = memory.again or self._waiting.count
        wait = bool(memory.prefilling or (memory.slots and queued))
        decoding = len(memory.running) - len(memory.prefilling)
        kept = max(limits.max_num_batched_tokens // 4, 1) if wait else 0
        if memory.ready:  # 1
            most = decoding if limits.lookahead else -(-decoding // limits.depth)
            self._decode(flight, min(most, limits.max_num_batched_tokens - kept))
        budget = limits.max_num_batched_tokens - len(flight.rows)
        if not wait:
            self._burst = 0
        elif budget:
            if limits.depth > 1 and not limits.lookahead:
                budget = min(budget, self._part())
            self._admit(budget, now)  # 2
            if memory.prefilling:  # 3
                self._prefill(flight, budget)
        if memory.ready and not flight.rows:
            self._decode(flight, 1)  # a budget of 1 was kept for prompts that could not start
        if not flight.rows:
            return None
        if limits.prefix_cache:
            for sequence in flight.full:
                memory.name(sequence)
        plan = StepPlan(
            flight.number, flight.rows, flight.tokens, flight.admitted, memory.released,
            flight.snapshots,
        )  # fmt: skip
        memory.released = []
        self._flights.append(flight)
        self._number += 1
        self._counts.steps += 1
        self._counts.rows += len(plan.rows)
        return plan

    def skip(self) -> StepPlan:
        """An idle plan of the next number, for a step that only other data ranks have rows in."""
        self._number += 1
        return StepPlan(self._number - 1, [], [0])

    def _part(self) -> int:
        """The prompt tokens of one plan, where plans pass through several stages.

        Of W tokens in plans of G, each of which costs as much as F tokens besides its own, the last
        of S stages waits for S - 1 plans before its first, and each stage has W / G to pay for:

            (W + F W / G) + (S - 1) (F + G)    is least at    G = sqrt(F W / (S - 1))

        All are of one size, since a stage waits for the larger of two plans that follow each other:
        so G stays while W is worked off, and the rest is cut evenly.
        """
        memory = self._memory
        work = self._waiting.tokens
        work += sum(one.remaining for one in memory.prefilling.values())
        work += sum(len(one.tokens) for one in memory.again.values())
        self._burst = max(self._burst, work)
        good = math.sqrt(self.limits.plan_tokens * self._burst / (self.limits.depth - 1))
        return max(1, math.ceil(work / max(1, int(work / good))))

    def _decode(self, flight: Flight, most: int) -> None:
        """One token each of the sequences that wait longest for it."""
        memory, size = self._memory, self.limits.block_size
        ready, rows = memory.ready, flight.rows
        for sequence in list(ready.values()):
            if len(rows) >= most:
                break
            if sequence.serial not in ready:
                continue  # its blocks were taken for one before it
            start = sequence.computed
            if start == len(sequence.blocks) * size:
                if not memory.grow(sequence):
                    continue
                rows.append(BatchRow(sequence.slot, start, 1, LAST, sequence.blocks[-1:]))
                sequence.sent += 1
            else:
                rows.append(BatchRow(sequence.slot, start, 1, LAST))
            del ready[sequence.serial]
            known = start < len(sequence.tokens)
            flight.tokens.append(sequence.tokens[start] if known else UNKNOWN)
            flight.samplers.append(sequence)
            sequence.in_flight += 1
            sequence.computed = start = start + 1
            if start % size == 0 and known:
                flight.full.append(sequence)
            if self._may_decode(sequence):
                ready[sequence.serial] = sequence
        self._counts.decode_tokens += len(rows)

    def _may_decode(self, sequence: Sequence) -> bool:
        """Whether its next token can be computed: the one before it is known, or will be where
        the next plan is computed, and does not end the sequence by its length."""
        length = len(sequence.tokens)
        if sequence.computed < length:
            return True
        return (
            self.limits.lookahead
            and sequence.computed == length
            and length + 1 < sequence.most
            and sequence.request.sampling.structure is None
        )

    def _admit(self, budget: int, now: float) -> None:
        """Start requests that wait, as far as slots, blocks and tokens go."""
        memory, waiting = self._memory, self._waiting
        while memory.again and memory.slots:
            sequence = memory.again[min(memory.again)]
            found, _ = memory.find(sequence)
            if not memory.fits(sequence, found):
                return
            del memory.again[sequence.serial]
            memory.start(sequence, found)
        if not memory.slots or not waiting.count:
            return
        pending = memory.pending()
        passed: list[Sequence] = []
        share = Share(memory.prefilling.values(), budget)
        while memory.slots and len(passed) < LOOK and waiting.count:
            sequence = waiting.next()
            if self._waits_for(sequence, sequence.put_off_for, pending):
                waiting.remove(sequence)
                passed.append(sequence)
                continue
            found, following = memory.find(sequence)
            length = len(sequence.tokens) - len(found) * self.limits.block_size
            if self._waits_for(sequence, following, pending) or not share.is_open(sequence, length):
                waiting.remove(sequence)
                passed.append(sequence)
                continue
            if not memory.fits(sequence, found):
                break
            waiting.remove(sequence)
            memory.start(sequence, found)
            sequence.user.served += length * PROMPT_WEIGHT
            share = Share(memory.prefilling.values(), budget)
            if following is not None:
                pending.add(following)
            sequence.cached = len(sequence.tokens) - length
            self._pace.add(sequence.prompt_length, now)
            counts = self._counts
            counts.admitted += 1
            counts.waited_seconds += now - sequence.arrived
            counts.prefix_hits += sequence.cached
            if self.limits.prefix_cache:
                counts.prefix_queries += sequence.prompt_length
        waiting.put_back(passed)

    def _waits_for(self, sequence: Sequence, digest: bytes | None, pending: set[bytes]) -> bool:
        """Whether another computes the block after those that were found for a sequence, so that
        it had better wait than compute the same; not for ever."""
        if digest is None or digest not in pending:
            return False
        if digest != sequence.put_off_for:
            sequence.put_off_for, sequence.put_off = digest, 0
        if sequence.put_off == PATIENCE:
            return False
        sequence.put_off += 1
        return True

    def _prefill(self, flight: Flight, budget: int) -> None:
        """Chunks of prompts; those of one token before the others."""
        memory, size = self._memory, self.limits.block_size
        sequences = memory.prefilling.values()
        given = shares(sequences, budget, self.limits.max_logit_rows)
        given.sort(key=lambda pair: pair[1] > 1)
        for sequence, count in given:
            start = sequence.computed
            end = start + count
            last = end == len(sequence.tokens)
            logits, following = (LAST if last else NONE), -1
            if needs_logits(sequence):
                logits = ALL
                if not last:
                    following = sequence.tokens[end]
                sequence.scored = min(end, sequence.to_score)
                flight.scored[len(flight.rows)] = sequence
            if sequence.sent < 0:
                flight.admitted.append(sequence.admission())
                sequence.sent = 0
            blocks = sequence.blocks[sequence.sent :] or ()
            sequence.sent += len(blocks)
            flight.snapshots += memory.snapshots_of(sequence, len(flight.rows), start, count)
            flight.rows.append(BatchRow(sequence.slot, start, count, logits, blocks, following))
            flight.tokens += sequence.tokens[start:end]
            sequence.in_flight += 1
            sequence.computed = end
            if last:
                sequence.state = DECODE
                del memory.prefilling[sequence.serial]
                flight.samplers.append(sequence)
                if self._may_decode(sequence):
                    memory.ready[sequence.serial] = sequence
            else:
                flight.silent.append(sequence)
            if end // size > sequence.named:
                flight.full.append(sequence)
            self._counts.prompt_tokens += count
            self._counts.recomputed_tokens += max(0, min(end, sequence.had) - start)

    # --- results -----------------------------------------------------------------------------

    def apply(self, result: StepResult, now: float) -> list[Output]:
        """Take the result of the oldest plan in flight; what it added to its requests."""
        flight = self._flights.popleft()
        assert result.number == flight.number, (result.number, flight.number)
        assert len(result.tokens) == len(flight.samplers), "a row was not sampled"
        memory = self._memory
        outputs: list[Output] = []
        prompt: dict[int, Output] = {}
        for row, sequence in flight.scored.items():
            if sequence.finish_reason is None:
                made = Output(id=sequence.request.id, cached=max(sequence.cached, 0))
                made.prompt_logprobs = result.prompt_logprobs[row]
                prompt[sequence.serial] = made
                outputs.append(made)
        for sequence in flight.silent:
            sequence.in_flight -= 1
            if sequence.in_flight == 0:
                memory.settle(sequence)
        logprobs, failed, ready = result.logprobs, result.failed, memory.ready
        for place, token in enumerate(result.tokens):
            sequence = flight.samplers[place]
            sequence.in_flight -= 1  # with lookahead the next plan may hold a row of it
            if sequence.finish_reason is not None:
                if sequence.in_flight == 0:
                    memory.settle(sequence)
                continue
            output = prompt.get(sequence.serial) if prompt else None
            if output is None:
                output = Output(id=sequence.request.id, cached=sequence.cached)
                outputs.append(output)
            error = failed.get(place) if failed else None
            if error is not None:
                output.error = error
                self._end(sequence, "error", output)
            else:
                self._take(sequence, token, output)
                entry = logprobs.get(place) if logprobs else None
                if entry is not None and output.tokens:
                    output.logprobs = [entry]
            if sequence.finish_reason is None:
                if sequence.leaves:
                    if sequence.in_flight == 0:
                        memory.settle(sequence)
                elif self._may_decode(sequence) and sequence.serial not in ready:
                    ready[sequence.serial] = sequence
                if self.limits.lookahead and self.limits.prefix_cache and not sequence.leaves:
                    memory.name(sequence)  # blocks that were full before their last token was known
        return outputs

    def _take(self, sequence: Sequence, token: int, output: Output) -> None:
        """One token more, or the end."""
        sampling, tokens = sequence.request.sampling, sequence.tokens
        before = len(tokens)
        if before >= sequence.most:
            self._end(sequence, "length", output)
        elif token in sequence.ends and before - sequence.prompt_length >= sampling.min_new_tokens:
            output.stop_token = token
            self._end(sequence, "stop", output)
        else:
            tokens.append(token)
            output.tokens.append(token)
            sequence.user.served += ANSWER_WEIGHT
            self._counts.generated_tokens += 1
            if before + 1 == sequence.most:
                self._end(sequence, "length", output)

    def _end(self, sequence: Sequence, reason: Finish, output: Output | None = None) -> Output:
        sequence.finish_reason = reason
        self._finished[reason] += 1
        del self._by_id[sequence.request.id]
        if sequence.state != WAITING:
            self._memory.end(sequence)
        elif self._memory.again.pop(sequence.serial, None) is None:
            self._waiting.remove(sequence)
        self._waiting.leave(sequence.user)
        if output is None:
            output = Output(id=sequence.request.id, cached=max(sequence.cached, 0))
        output.finish_reason = reason
        return output

    # --- who is not taken --------------------------------------------------------------------

    def _check(self, request: Request, now: float) -> None:
        limits, waiting = self.limits, self._waiting
        sampling, length = request.sampling, len(request.tokens)
        least = max(sampling.min_new_tokens, min(sampling.max_new_tokens, 1))
        if request.id in self._by_id:
            raise self._refusal("bad", f"a request {request.id!r} is there already")
        if sampling.seed is None:
            raise self._refusal("bad", "the request has no seed")
        if limits.vocab_size is not None:
            named = (*request.tokens, *(token for token, _ in sampling.logit_bias))
            largest = max((*named, *sampling.stop_tokens))
            if largest >= limits.vocab_size:
                raise self._refusal(
                    "bad",
                    f"token {largest} is not one of the model's {limits.vocab_size}",
                )
        if length + least > limits.max_model_len:
            raise self._refusal(
                "too_long",
                f"a prompt of {length} tokens and at least {least} new ones need "
                f"{length + least} positions; a request has {limits.max_model_len}",
            )
        # The last token is sent and never computed.
        most = min(length + sampling.max_new_tokens, limits.max_model_len)
        needed = max(length, most - 1)
        if needed > limits.capacity:
            raise self._refusal(
                "never_fits",
                f"a prompt of {length} tokens and {most - length} new ones need {needed} places "
                f"in the cache, which has {limits.num_blocks} blocks of {limits.block_size}: "
                f"{limits.capacity}",
            )
        count, tokens = waiting.count, waiting.tokens
        # Who comes between two plans stands in the queue though a place is free: no waiting.
        free = max(0, len(self._memory.slots) - len(self._memory.again))
        if count >= limits.max_queue + free:
            raise self._refusal(
                "full",
                f"{count} requests wait already",
                self._pace.seconds(max(1, count / 4), 0, now),
            )
        if count and tokens + length > limits.max_waiting_tokens:
            over = tokens + length - limits.max_waiting_tokens
            raise self._refusal(
                "full",
                f"{tokens} prompt tokens wait already; with {length} more there would be over "
                f"{limits.max_waiting_tokens}",
                self._pace.seconds(0, over, now),
            )

    def _refusal(
        self, kind: RefusalKind, message: str, retry_after: float | None = None
    ) -> RequestRefused:
        self._refused[kind] += 1
        return RequestRefused(message, kind=kind, retry_after=retry_after)
