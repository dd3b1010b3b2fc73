"""Sequence: one request in the scheduler, from its arrival to its end, and whose it is.

                    +------------- preempted -------------+
                    v                                     |
    WAITING --> (admitted) PREFILL --> DECODE ------------+--> ended
        \\__________________\\____________\\__ abort, deadline __^

While plans in flight hold a row of it, it keeps its slot and blocks: one that has ended, or is to
be preempted (`leaves`), gives them back when the last of those plans is applied.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import Final

from hocket.serving.request import Finish, Request
from hocket.serving.scheduling.admission import Admission

WAITING: Final = 0
PREFILL: Final = 1
DECODE: Final = 2


class User:
    """One fairness key (`scheduling.waiting`).

    Attributes:
        served: the counter.
        queue: requests that wait, by order of arrival.
        requests: that have not ended.
    """

    __slots__ = ("name", "queue", "requests", "served")

    def __init__(self, name: str) -> None:
        self.name = name
        self.served = 0
        self.queue: OrderedDict[int, Sequence] = OrderedDict()
        self.requests = 0


class Sequence:
    """A request's tokens and what is computed of them.

    Attributes:
        request: as it came. serial: order of arrival. user: whose it is. arrived: when.
        deadline: moment at which it ends. None: none.
        tokens: prompt and answer so far, int32.
        prompt_length: tokens of the prompt.
        most: length at which it ends: the prompt and `max_new_tokens`, or the model's context.
        ends: token ids that end it.
        state: WAITING, PREFILL or DECODE.
        computed: tokens in the cache, or on their way into it in plans in flight.
        had: tokens that were computed before it was preempted.
        scored: of the prompt's log-probabilities, how many are computed or in flight.
        cached: prompt tokens found in the prefix cache when it first started; -1 before.
        slot: workers' row; -1 without one.
        blocks: its block table; `sent`: how many of them workers know, -1 before they know the
            request at all.
        chain: digests of its full blocks, after the root; made when needed.
        named: blocks, from the first on, that were found by their digest or can be.
        snapshot: of recurrent states, which its first row begins with; -1: none.
        branch: tokens that the prefix cache has blocks of and no snapshot.
        in_flight: plans in flight that hold a row of it.
        leaves: to be preempted when no plan in flight holds it.
        finish_reason: why it ended.
        put_off: times in a row that it waited for another to compute what both begin with;
            `put_off_for`: digest of the block it waited for.
    """

    __slots__ = (
        "arrived",
        "blocks",
        "branch",
        "cached",
        "chain",
        "computed",
        "deadline",
        "ends",
        "finish_reason",
        "had",
        "in_flight",
        "leaves",
        "most",
        "named",
        "prompt_length",
        "put_off",
        "put_off_for",
        "request",
        "scored",
        "sent",
        "serial",
        "slot",
        "snapshot",
        "state",
        "tokens",
        "user",
    )  # fmt: skip

    def __init__(
        self, request: Request, serial: int, user: User, arrived: float, longest: int
    ) -> None:
        self.request = request
        self.serial = serial
        self.user = user
        self.arrived = arrived
        self.deadline = None if request.deadline is None else arrived + request.deadline
        self.tokens = array("i", request.tokens)
        self.prompt_length = len(request.tokens)
        self.most = min(self.prompt_length + request.sampling.max_new_tokens, longest)
        self.ends = request.sampling.ends
        self.state: int = WAITING
        self.computed = 0
        self.had = 0
        self.scored = 0
        self.cached = -1
        self.slot = -1
        self.blocks: list[int] = []
        self.sent = -1
        self.chain: list[bytes] = []
        self.named = 0
        self.snapshot = -1
        self.branch = 0
        self.in_flight = 0
        self.leaves = False
        self.finish_reason: Finish | None = None
        self.put_off = 0
        self.put_off_for: bytes | None = None

    @property
    def remaining(self) -> int:
        """Tokens that are not computed yet."""
        return len(self.tokens) - self.computed

    @property
    def to_score(self) -> int:
        """Position before which log-probabilities of the prompt are wanted: 0 for none."""
        return self.prompt_length - 1 if self.request.sampling.prompt_logprobs is not None else 0

    def admission(self) -> Admission:
        """What workers must know of it."""
        sampling, length = self.request.sampling, self.prompt_length
        recalls = sampling.penalizes or sampling.structure is not None
        return Admission(
            slot=self.slot,
            sampling=sampling,
            index=self.request.index,
            prompt_length=length,
            prompt=self.request.tokens if sampling.repetition_penalty != 1 else (),
            generated=tuple(self.tokens[length:]) if recalls else (),
        )
