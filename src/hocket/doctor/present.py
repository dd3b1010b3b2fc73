"""What is present on this machine: GPUs that can execute checks, versions, and why there are none.

Nothing here imports torch or touches a device.
"""

from __future__ import annotations

import contextlib
import dataclasses
from importlib import metadata, util

import hocket
from hocket.doctor.environment import PACKAGES, built_for_cuda
from hocket.launch.launcher import cuda_shows
from hocket.probing import devices, host
from hocket.spec.doctor import Value

NO_GPU = "no NVIDIA GPU is visible"


@dataclasses.dataclass(frozen=True)
class PresentGpus:
    """What is here.

    Attributes:
        gpus: names of the GPUs that checks can run on, by index.
        why_none: why there are none; empty where there are.
        torch: whether torch is installed.
        machine, versions: as a report card has them.
    """

    gpus: tuple[str, ...]
    why_none: str
    torch: bool
    machine: dict[str, Value]
    versions: dict[str, str]


def present() -> PresentGpus:
    """Look at this machine; milliseconds."""
    found = devices.find_devices()
    here = host.host()
    torch = util.find_spec("torch") is not None
    names = tuple(device.name for device in found.devices)
    machine: dict[str, Value] = {
        "cpu": here.cpu, "cores": here.cores, "memory_bytes": here.memory, "gpus": len(names),
        **{f"gpu_{i}": name for i, name in enumerate(names)},
    }  # fmt: skip
    versions = {"hocket": hocket.__version__}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    if built_for_cuda():
        versions["cuda"] = built_for_cuda()
    why = ""
    if not torch:
        why = "torch is not installed"
    elif not cuda_shows():
        why = NO_GPU
        if names:
            why = f"{len(names)} GPUs are here, and torch is built without CUDA"
        elif built_for_cuda():
            why = f"torch is built for CUDA {built_for_cuda()}, and {NO_GPU}"
    return PresentGpus(() if why else names or ("GPU",), why, torch, machine, versions)
