"""Kills at random moments of saves: `python -m tests.jobs.kills LAYOUT KILLS [SEED]` runs many.

Each save of a run is cut once: a rank is killed some milliseconds after the save began, while ranks
copy, write, flush, read back, vote, or while rank 0 renames. The run starts again from its newest
checkpoint. No checkpoint may be passed over as damaged, and the end is that of the undisturbed run.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

from hocket.spec import checkpoint as words

LONGEST = 0.06
"""Seconds from a save's begin to a kill at most; the save of the tiny model takes about 0.03."""


def after_kills(folder: Path, layout: str, *, kills: int, seed: int) -> int:
    """Run a job, and one in which each save but the last is cut; the number of restarts."""
    from hocket.spec.layout import Layout
    from tests.support.runs import job, losses, weights

    rng = random.Random(seed)
    steps = 2 * (kills + 1)
    log = folder / "faults.jsonl"
    log.touch()
    faults = [
        {
            "id": number, "log": str(log), "kind": "kill", "phase": "save",
            "rank": rng.randrange(Layout.parse(layout).world_size),
            "step": 2 * (number + 1), "delay": rng.uniform(0, LONGEST),
        }
        for number in range(kills)
    ]  # fmt: skip
    options = {"steps": steps, "save_every": 2, "eval_every": 0, "max_restarts": 9}
    job(folder, "whole", layout, save_mode="blocking", **options)
    notes: list[str] = []
    summary = job(folder, "cut", layout, faults, notes, save_mode="background", **options)
    torn = [note for note in notes if "damaged" in note or "incomplete" in note]
    assert not torn, torn
    assert len(log.read_text().splitlines()) == kills
    assert weights(folder, "cut") == weights(folder, "whole")
    assert losses(folder, "cut") == losses(folder, "whole")
    for path in words.checkpoints(folder / "cut" / "checkpoints"):
        words.verify_checkpoint(path)
    return summary.restarts


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        layout, kills = sys.argv[1], int(sys.argv[2])
        seed = int(sys.argv[3]) if len(sys.argv) > 3 else 0
        restarts = after_kills(Path(made), layout, kills=kills, seed=seed)
        print(
            f"{layout}: {kills} kills, {restarts} restarts, 0 torn checkpoints, end bit-identical"
        )
