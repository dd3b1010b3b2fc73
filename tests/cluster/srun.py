"""Stands for Slurm's `srun`: starts the tasks of a step, one or more on each host.

    SRUN_HOSTS   JSON: [[name, [words that run a command there], [tasks' own variables]], ...]
    SRUN_TASKS   tasks on each host

Sets the variables that Slurm sets for a task, forwards SIGUSR1 and SIGTERM to all of them as
slurmstepd does, with --kill-on-bad-exit=1 ends all when one has failed, and returns the largest
exit code.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import FrameType

TOGETHER = "--kill-on-bad-exit=1"


def main() -> int:
    first = next(i for i, word in enumerate(sys.argv[1:], 1) if not word.startswith("--"))
    command = sys.argv[first:]
    hosts = json.loads(os.environ["SRUN_HOSTS"])
    each = int(os.environ["SRUN_TASKS"])
    tasks: list[subprocess.Popen[bytes]] = []
    for node, (_, words, variables) in enumerate(hosts):
        for local in range(each):
            environment = {
                **os.environ,
                **variables,
                "SLURM_PROCID": str(node * each + local),
                "SLURM_LOCALID": str(local),
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": str(len(hosts) * each),
                "SLURM_STEP_NUM_NODES": str(len(hosts)),
                "SLURM_STEP_NODELIST": ",".join(name for name, _, _ in hosts),
            }
            tasks.append(subprocess.Popen([*words, *command], env=environment))

    def forward(number: int, frame: FrameType | None) -> None:
        for task in tasks:
            task.send_signal(number)

    signal.signal(signal.SIGUSR1, forward)
    signal.signal(signal.SIGTERM, forward)
    with open(os.environ["SRUN_PID"], "w") as file:
        file.write(str(os.getpid()))
    ended = False
    while any(task.poll() is None for task in tasks):
        if not ended and any(task.returncode for task in tasks) and TOGETHER in sys.argv:
            forward(signal.SIGTERM, None)
            ended = True
        time.sleep(0.05)
    return max(task.returncode if task.returncode >= 0 else 128 - task.returncode for task in tasks)


if __name__ == "__main__":
    raise SystemExit(main())
