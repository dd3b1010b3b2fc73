"""A real Slurm of the two hosts: munged, slurmctld on the first host, a slurmd on each.

A node has its own host name, process ids and /dev/shm, so a rank sees of the other node what it
would see of another machine.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.hosts import Host

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare")

CONF = """\
ClusterName=hocket
SlurmctldHost=node-0({address})
SlurmctldPort=6817
SlurmdPort=6818
AuthInfo=socket={spool}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SchedulerParameters=batch_sched_delay=1,sched_interval=2,bf_interval=2
ReturnToService=2
MpiDefault=none
SwitchType=switch/none
MailProg=/bin/true
"""


def missing() -> str | None:
    """Why there can be no Slurm here; None: there can."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent or os.geteuid() != 0:
        return f"a real Slurm needs root and {', '.join(absent or PROGRAMS)}"
    return None


PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"


@contextlib.contextmanager
def slurm(nodes: list[Host], folder: Path) -> Iterator[dict[str, str]]:
    """A cluster of `nodes`, whose names are node-0, ...; variables for its commands."""
    (folder / "state").mkdir(parents=True)
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    conf = folder / "slurm.conf"
    lines = [
        f"NodeName=node-{i} NodeAddr={node.address} CPUs=2 RealMemory=1000"
        for i, node in enumerate(nodes)
    ]
    # Sockets lie here, and the path of one has at most 108 bytes: pytest's folders have 90.
    spool = tempfile.mkdtemp(prefix="slurm-")
    text = CONF.format(address=nodes[0].address, folder=folder, spool=spool) + "\n".join(lines)
    conf.write_text(text + "\nPartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    variables = {"SLURM_CONF": str(conf), "PATH": PATH}
    environment = {**os.environ, **variables}
    munge = [
        *("munged", "--foreground", "--force", f"--key-file={key}"),
        f"--socket={spool}/munge.socket",
        *(f"--{name}-file={folder}/munge.{name}" for name in ("pid", "log", "seed")),
    ]
    daemons = [subprocess.Popen(munge, env=environment, stderr=subprocess.DEVNULL)]
    try:
        for i, node in enumerate(nodes):
            start = f"hostname node-{i}; mount -t tmpfs tmpfs /dev/shm; "
            start += "" if i else "slurmctld -D -c & sleep 1; "
            start += f"slurmd -D -N node-{i} & wait"
            apart = ("--uts", "--mount", "--pid", "--mount-proc", "--fork", "--kill-child")
            words = ["unshare", *apart, "sh", "-c", start]
            with (folder / f"start-{i}").open("w") as log:
                daemons.append(
                    subprocess.Popen(node.command(*words), env=environment, stdout=log, stderr=log)
                )
        end = time.monotonic() + 60
        while asked(nodes[0], variables, "sinfo", "-h", "-o", "%D %t") != "2 idle":
            assert time.monotonic() < end, logs(folder)
            time.sleep(0.5)
        yield variables
    finally:
        for daemon in reversed(daemons):
            daemon.kill()
            daemon.wait()
        shutil.rmtree(spool)


def logs(folder: Path) -> str:
    """What the daemons of `slurm(nodes, folder)` wrote."""
    return "".join(path.read_text() for path in (*folder.glob("start-*"), *folder.glob("*.log")))


def asked(node: Host, variables: dict[str, str], *words: str) -> str:
    """What one of Slurm's commands prints on a node."""
    done = subprocess.run(
        node.command(*words),
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    return (done.stdout + done.stderr).strip()
