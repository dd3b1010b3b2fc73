"""Random valid schedules of compute actions: placement, virtual stages, order, microbatches."""

from __future__ import annotations

import random

from hocket.spec.schedule import (
    BACKWARD,
    FORWARD,
    INPUT,
    OVERLAP_F_B,
    WEIGHT,
    Action,
    Schedule,
)


def random_schedule(seed: int, *, most_ranks: int = 5, most_microbatches: int = 5) -> Schedule:
    """A schedule without messages whose actions can complete: a random topological order of the
    compute actions, of which each rank's line is what falls to it."""
    rng = random.Random(seed)
    pp = rng.randint(1, most_ranks)
    stages = pp * rng.randint(1, 3)
    place = [*range(pp), *(rng.randrange(pp) for _ in range(stages - pp))]
    rng.shuffle(place)
    m = rng.randint(1, most_microbatches)
    halved = {(s, n): rng.random() < 0.4 for s in range(stages) for n in range(m)}
    needs: dict[Action, set[Action]] = {}
    for (s, n), halves in halved.items():
        forward = Action(s, FORWARD, n)
        backward = Action(s, INPUT if halves else BACKWARD, n)
        needs[forward] = {Action(s - 1, FORWARD, n)} if s else set()
        needs[backward] = {forward}
        if s + 1 < stages:
            needs[backward].add(Action(s + 1, INPUT if halved[s + 1, n] else BACKWARD, n))
        if halves:
            needs[Action(s, WEIGHT, n)] = {backward}
    lines: list[list[Action]] = [[] for _ in range(pp)]
    done: set[Action] = set()
    # Some kinds first, by chance: otherwise all lines would look like a mixture.
    taste = {kind: rng.random() * 3 for kind in (FORWARD, BACKWARD, INPUT, WEIGHT)}
    before: Action | None = None
    while needs:
        ready = [action for action, missing in needs.items() if missing <= done]
        action = max(ready, key=lambda a: taste[a.kind] + rng.random())
        del needs[action]
        done.add(action)
        line = lines[place[action.stage]]
        # Two actions that follow each other in the order of all ranks may be done at once.
        if (
            before is not None
            and (before.kind, action.kind) == (FORWARD, BACKWARD)
            and (before.stage, before.microbatch) != (action.stage, action.microbatch)
            and line
            and line[-1] == before
            and rng.random() < 0.5
        ):
            parts = (before, action)
            line[-1] = Action(before.stage, OVERLAP_F_B, before.microbatch, parts)
            before = None
        else:
            line.append(action)
            before = action
    return Schedule(
        name=f"random {seed}",
        num_microbatches=m,
        stage_ranks=tuple(place),
        ranks=tuple(map(tuple, lines)),
    )
