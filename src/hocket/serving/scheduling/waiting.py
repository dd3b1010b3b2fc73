"""Waiting: requests that wait, first come first served per user, users by what they have had.

Each user has a counter of service: the tokens computed for them, prompt tokens once and tokens of
answers twice, as those cost more (Sheng et al. 2024, "Fairness in serving large language models",
the virtual token counter). The next request is the oldest of the user with the least. Who comes
back after a pause is lifted to the least of those that wait, so that idleness is not saved up.

A counter outlives its user's requests, for as many users as `REMEMBERED`: else a user who sends
one request after the other would always be new.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from hocket.serving.scheduling.sequence import Sequence, User

REMEMBERED: Final = 4096
"""Users without requests whose counters are kept."""
PROMPT_WEIGHT: Final = 1
ANSWER_WEIGHT: Final = 2


class WaitingRequests:
    """All requests that wait and have never run."""

    def __init__(self) -> None:
        self._users: dict[str, User] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        # (served when pushed, tie, user): a user's counter only grows, so an entry is never too
        # late, and one that is too early is pushed again when it comes up.
        self._heap: list[tuple[int, int, User]] = []
        self._ties = itertools.count()
        self._last = 0
        self._queues = 0
        self.count = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self.count

    @property
    def users(self) -> int:
        return len(self._users) - len(self._idle)

    def user(self, name: str) -> User:
        """The user, who now has one request more."""
        user = self._users.get(name)
        if user is None:
            user = self._users[name] = User(name)
        self._idle.pop(name, None)
        user.requests += 1
        return user

    def leave(self, user: User) -> None:
        """One of the user's requests has ended."""
        user.requests -= 1
        if user.requests == 0:
            self._idle[user.name] = None
            if len(self._idle) > REMEMBERED:
                name, _ = self._idle.popitem(last=False)
                del self._users[name]

    def add(self, sequence: Sequence) -> None:
        """The last of its user's."""
        user = sequence.user
        if not user.queue:
            least = self._least()
            user.served = max(user.served, self._last if least is None else least.served)
        self._enter(sequence)

    def remove(self, sequence: Sequence) -> None:
        """One that ended while it waited, or that is admitted."""
        user = sequence.user
        del user.queue[sequence.serial]
        self.count -= 1
        self.tokens -= sequence.prompt_length
        if not user.queue:
            self._last = user.served
            self._queues -= 1

    def next(self) -> Sequence:
        """Whose turn it is, of one or more; it stays."""
        user = self._least()
        assert user is not None
        return next(iter(user.queue.values()))

    def put_back(self, sequences: Iterable[Sequence]) -> None:
        """Removed ones stand again where they stood. Given in the order of their removal."""
        for sequence in reversed(list(sequences)):
            self._enter(sequence)
            sequence.user.queue.move_to_end(sequence.serial, last=False)

    def _enter(self, sequence: Sequence) -> None:
        user = sequence.user
        if not user.queue:
            self._queues += 1
            self._push(user)
        user.queue[sequence.serial] = sequence
        self.count += 1
        self.tokens += sequence.prompt_length

    def _push(self, user: User) -> None:
        if len(self._heap) > 2 * self._queues + 16:
            # Entries of users who left without having come up: the heap stays bounded.
            waiting = {entry[2].name: entry[2] for entry in self._heap if entry[2].queue}
            self._heap = [(u.served, next(self._ties), u) for u in waiting.values()]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (user.served, next(self._ties), user))

    def _least(self) -> User | None:
        heap = self._heap
        while heap:
            served, _, user = heap[0]
            if not user.queue:
                heapq.heappop(heap)
            elif served < user.served:
                heapq.heapreplace(heap, (user.served, next(self._ties), user))
            else:
                return user
        return None
