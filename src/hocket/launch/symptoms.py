"""Symptoms: what a rank says when another one is gone or silent, never the cause of a failure.

Gloo and TCP stores raise; NCCL's watchdog, a thread of torch's, ends its process with SIGABRT and
leaves its text in the output. NCCL's texts are those of torch 2.13's ProcessGroupNCCL and of NCCL
2.29's result codes, not executed on a GPU yet.
"""

from __future__ import annotations

PEER_LOST = (
    "Connection closed by peer",
    "Connection closed by remote peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket Closed",
    "recvValue failed",
    "sendBytes failed",
    "failed to recv",
    "Failed to recv",
    "remote process exited",
    "Timed out waiting",
    "Application timeout caused pair closure",
)

NCCL = (
    "NCCL communicator was aborted",
    "unhandled system error",
    "ncclSystemError",
    "ncclRemoteError",
    "ncclInProgress",
    "remote process exited or there was a network error",
    "collective operation timeout",
    "Some NCCL operations have failed or timed out",
    "Received a dump signal due to a collective timeout",
    "Observed flight recorder dump signal",
    "terminated with exception: [Rank",
)


def of_lost_peer(text: str) -> bool:
    """Whether a text says no more than that another rank is gone or silent."""
    return any(each in text for each in (*PEER_LOST, *NCCL))


def of_nccl(lines: tuple[str, ...]) -> bool:
    """Whether the last lines of a dead rank are those of NCCL's watchdog."""
    return any(each in line for line in lines for each in NCCL)
