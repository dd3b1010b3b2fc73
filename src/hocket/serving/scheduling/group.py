"""SchedulerGroup: the schedulers of the data ranks of one replica, which run every step together.

With expert parallelism a replica has several data ranks: each has requests, pages and a scheduler
of its own, and all of them meet in every layer of experts. So each step is a list of plans, one a
data rank; a data rank that has nothing to compute gets an idle one (`Scheduler.skip`), whose one
token is kept nowhere, and takes part in the exchange of tokens all the same:

    step n     data rank 0: rows of its requests     data rank 1: idle
    step n+1   data rank 0: rows                     data rank 1: rows

The numbers of plans are those of steps, equal on all data ranks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from hocket.serving.request import Output, Request
from hocket.serving.scheduling.known_prefixes import KnownPrefixes, prefix_keys
from hocket.serving.scheduling.limits import SchedulerLimits
from hocket.serving.scheduling.scheduler import Scheduler
from hocket.serving.scheduling.stats import Stats
from hocket.serving.scheduling.step import StepPlan, StepResult


class SchedulerGroup:
    """Requests of one replica, each with one of its data ranks.

    Args:
        schedulers: one for each data rank, with equal limits.
    """

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = list(schedulers)
        self._load = [0] * len(self.schedulers)
        self._where: dict[str, tuple[int, int]] = {}
        self._prefixes = [KnownPrefixes(self.limits.num_blocks) for _ in self.schedulers]

    @property
    def limits(self) -> SchedulerLimits:
        """Of one data rank."""
        return self.schedulers[0].limits

    # --- requests come and go ----------------------------------------------------------------

    def add(self, request: Request, now: float) -> None:
        """Take a request.

        Raises:
            RequestRefused: it can never be computed, or too many wait.
        """
        if len(self.schedulers) == 1:
            self.schedulers[0].add(request, now)
            return
        keys: list[bytes] = []
        if self.limits.prefix_cache:
            keys = prefix_keys(request.tokens, self.limits.block_size, request.salt)
        rank = self._choose(request, keys)
        self.schedulers[rank].add(request, now)
        tokens = len(request.tokens) + request.sampling.max_new_tokens
        self._where[request.id] = rank, tokens
        self._load[rank] += tokens
        self._prefixes[rank].add(keys)

    def _choose(self, request: Request, keys: Sequence[bytes]) -> int:
        """The data rank with the fewest tokens left, less what its cache holds of the prompt."""
        if request.id in self._where:
            return self._where[request.id][0]  # which rejects a second one
        size = self.limits.block_size
        left = [
            load - prefixes.hit(keys) * size
            for load, prefixes in zip(self._load, self._prefixes, strict=True)
        ]
        return left.index(min(left))

    def abort(self, id: str) -> list[Output]:
        """End a request, whatever it does; its end, or nothing if it has ended already."""
        rank = self._where[id][0] if id in self._where else 0
        return self._seen(self.schedulers[rank].abort(id))

    def expire(self, now: float) -> list[Output]:
        """End the requests whose time is over."""
        return self._seen(output for one in self.schedulers for output in one.expire(now))

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do and nothing in flight."""
        return all(one.idle for one in self.schedulers)

    def stats(self) -> Stats:
        """Figures of all data ranks together; `steps` counts the plans of each."""
        first, *others = [one.stats() for one in self.schedulers]
        for other in others:
            for field in dataclasses.fields(Stats):
                mine, more = getattr(first, field.name), getattr(other, field.name)
                both = (
                    dict(Counter(mine) + Counter(more)) if isinstance(mine, dict) else mine + more
                )
                setattr(first, field.name, both)
        return first

    # --- steps -------------------------------------------------------------------------------

    def plan(self, now: float) -> list[StepPlan] | None:
        """The next step, one plan a data rank; None where no data rank has anything to compute."""
        plans = [one.plan(now) for one in self.schedulers]
        if not any(plans):
            return None
        step = [plan or one.skip() for plan, one in zip(plans, self.schedulers, strict=True)]
        if len(step) > 1:
            widest = max(len(plan.tokens) for plan in step)
            decoding = all(row.count == 1 for plan in step for row in plan.rows)
            for plan in step:
                plan.widest, plan.decoding = widest, decoding
        return step

    def apply(self, rank: int, result: StepResult, now: float) -> list[Output]:
        """Take the result of the oldest plan with rows of a data rank; what it added."""
        return self._seen(self.schedulers[rank].apply(result, now))

    def _seen(self, outputs: Iterable[Output]) -> list[Output]:
        found = list(outputs)
        for output in found:
            if output.finish_reason is not None and output.id in self._where:
                rank, tokens = self._where.pop(output.id)
                self._load[rank] -= tokens
        return found
