"""Environment checks: driver, libraries, links, clocks, memory and limits of this machine.

What the driver knows is read through NVML, whose functions are looked up by name; a recorded NVML
stands for it in tests. The first checks need no GPU and are executed on every machine.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from hocket.doctor.check import Cannot, CheckOutcome, GpuCheck
from hocket.doctor.place import Place
from hocket.spec.install import install_line
from hocket.spec.units import format_bytes

PACKAGES = (
    "torch", "transformers", "triton", "safetensors", "nvidia-ml-py", "flash-attn",
    "flashinfer-python", "torchao", "peft",
)  # fmt: skip
"""Packages whose versions are noted."""

SHARED_MEMORY = 1 << 30
OPEN_FILES = 1024
FREE_MEMORY = 0.9
IDLE = 10
"""Percent of utilization by other processes from which a GPU counts as busy."""

_CRITICAL_THROTTLING = {0x8: "hardware slowdown", 0x40: "hardware thermal", 0x80: "power brake"}
"""NVML's clocks-event reasons that mean a fault of power or cooling (nvml.h)."""


_BY_NVML = (
    "driver", "idle", "ecc", "mig", "clocks", "power", "pcie", "nvlink", "peer-access", "topology",
)  # fmt: skip
"""Rows that ask the driver, and need no torch."""


def _row(name: str, what: str, criterion: str, *, gpus: int = 1, **more: Any) -> GpuCheck:
    # Tests execute the rows that ask the driver on a recorded NVML.
    driver = name in _BY_NVML
    reason = "it asks the driver" if driver else "it asks the device" if gpus else ""
    defaults: dict[str, Any] = {"seconds": 0.5, "timeout": 30.0}
    return GpuCheck(
        id=f"env-{name}", group="environment", what=what, criterion=criterion, gpus=gpus,
        function=f"hocket.doctor.environment:{name.replace('-', '_')}", rehearsals=(),
        unrehearsed=reason, driver=driver, **{**defaults, **more},
    )  # fmt: skip


CHECKS = (
    _row(
        "packages", "list the versions of the packages that hocket uses",
        "torch and transformers are installed", gpus=0,
    ),
    _row(
        "toolchain", "find a C compiler (native kernels, Triton) and Triton itself",
        "a compiler is found, and Triton where torch is built for CUDA", gpus=0,
    ),
    _row(
        "shared-memory", "read the size of /dev/shm, which NCCL uses (CPU ranks do not)",
        "1 GiB or more is free where torch is built for CUDA", gpus=0,
    ),
    _row(
        "limits", "read the limits on open files and locked memory",
        "1,024 or more open files", gpus=0,
    ),
    _row(
        "torch-cuda", "read for which CUDA version torch is built, and make one tensor on each GPU",
        "torch is built for CUDA and adds on every GPU", seconds=3.0,
    ),
    _row(
        "driver", "compare the driver's CUDA version with torch's",
        "the driver supports CUDA of torch's major version or newer",
    ),
    _row(
        "capability", "compare the GPUs' compute capability with the code in this build of torch",
        "every GPU has capability 7.0 or higher, and machine code or PTX for it is in torch",
        seconds=2.0,
    ),
    _row("nccl", "read the version of NCCL in this build of torch", "NCCL 2.18 or newer"),
    _row(
        "devices", "compare the GPUs of NVML with those of torch",
        "CUDA_VISIBLE_DEVICES names GPUs that exist, and torch shows as many", seconds=2.0,
    ),
    _row(
        "idle", "read used memory, utilization and processes of every GPU",
        "90% of the memory is free and utilization is below 10%",
    ),
    _row("ecc", "read uncorrected ECC errors and pending row remaps", "none of either"),
    _row("mig", "read the MIG mode", "MIG is disabled: NCCL does not join MIG instances"),
    _row(
        "clocks", "read clocks and the reasons for throttling",
        "no hardware slowdown, thermal or power-brake throttling",
    ),
    _row("power", "compare the power limit with the GPU's default",
         "the limit is the default or more"),
    _row(
        "pcie", "read generation and width of the PCIe link", "width is the slot's maximum",
    ),
    _row(
        "nvlink", "read state and error counters of every NVLink", "all are active, without replay "
        "or recovery errors",
    ),
    _row(
        "peer-access", "ask for peer access between every two GPUs",
        "every pair joined by NVLink has peer access", gpus=2,
    ),
    _row(
        "topology", "read the path and the NUMA node of every pair of GPUs",
        "every GPU's NUMA node is known", gpus=2,
    ),
    _row(
        "fork", "fork a process that imported torch, and use CUDA in the child",
        "the child adds two tensors", seconds=3.0, forks=True,
    ),
)  # fmt: skip


# --- the host --------------------------------------------------------------------------------


def packages(place: Place) -> CheckOutcome:
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            place.values[name] = metadata.version(name)
    for name in ("torch", "transformers"):
        if name not in place.values:
            place.failures.append(f"{name} is not installed: {install_line('train')}")
    return place.outcome()


def toolchain(place: Place) -> CheckOutcome:
    """A compiler, and Triton."""
    compiler = next(
        (c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None
    )
    place.values["compiler"] = compiler or "none"
    triton = importlib.util.find_spec("triton") is not None
    place.values["triton"] = triton
    if compiler is None:
        place.failures.append("no C compiler: apt-get install gcc")
    if built_for_cuda() and not triton:
        place.failures.append("torch is built for CUDA and Triton is missing: pip install triton")
    return place.outcome()


def shared_memory(place: Place, path: str = "/dev/shm") -> CheckOutcome:
    """Free bytes of /dev/shm."""
    if not Path(path).is_dir():
        place.failures.append(f"{path} does not exist: mount a tmpfs there")
        return place.outcome()
    there = os.statvfs(path)
    free = there.f_bavail * there.f_frsize
    place.values |= {"total_bytes": there.f_blocks * there.f_frsize, "free_bytes": free}
    if free < SHARED_MEMORY and built_for_cuda():
        place.failures.append(
            f"{path} has {format_bytes(free)} free, less than {format_bytes(SHARED_MEMORY)}: "
            "docker run --shm-size=8g"
        )
    return place.outcome()


def limits(place: Place) -> CheckOutcome:
    """Open files and locked memory."""
    import resource  # here, since the card of a machine without POSIX has the other rows

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = resource.RLIM_INFINITY
    place.values["open_files"] = "unlimited" if files == unlimited else files
    place.values["locked_memory_bytes"] = "unlimited" if locked == unlimited else locked
    if files != unlimited and files < OPEN_FILES:
        place.failures.append(
            f"{files} open files are allowed, less than {OPEN_FILES}: ulimit -n 65536"
        )
    return place.outcome()


def built_for_cuda() -> str:
    """CUDA version that torch is built for, without importing it; empty for a CPU build."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return ""
    with contextlib.suppress(OSError):
        text = (Path(spec.submodule_search_locations[0]) / "version.py").read_text()
        found = re.search(r"^cuda\b[^=]*=\s*['\"]([^'\"]+)", text, re.MULTILINE)
        return found[1] if found else ""
    return ""


# --- torch -----------------------------------------------------------------------------------


def torch_cuda(place: Place) -> CheckOutcome:
    """One addition on each GPU."""
    import torch

    place.values["cuda"] = torch.version.cuda or "none"
    if torch.version.cuda is None:
        place.failures.append("torch is built without CUDA: https://pytorch.org/get-started")
    for index in range(torch.cuda.device_count()):
        total = float(torch.ones(1024, device=f"cuda:{index}").sum())
        if total != 1024:
            place.failures.append(f"the sum of 1,024 ones on GPU {index} is {total}")
    place.values["gpus"] = torch.cuda.device_count()
    return place.outcome()


def capability(place: Place) -> CheckOutcome:
    """Compute capabilities, and the code of this build."""
    import torch

    codes = torch.cuda.get_arch_list()
    place.values["code"] = " ".join(codes)
    newest_ptx = max((_number(c) for c in codes if c.startswith("compute_")), default=0)
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        place.values[f"gpu_{index}"] = f"{major}.{minor}"
        own = 10 * major + minor
        same_major = [c for c in codes if c.startswith("sm_") and _number(c) // 10 == major]
        runs = any(_number(c) <= own for c in same_major) or 0 < newest_ptx <= own
        if own < 70 or not runs:
            place.failures.append(f"GPU {index} has capability {major}.{minor}; torch has {codes}")
    return place.outcome()


def _number(code: str) -> int:
    return int(re.sub(r"\D", "", code.partition("_")[2]) or 0)


def nccl(place: Place) -> CheckOutcome:
    import torch
    import torch.distributed as dist

    if not dist.is_nccl_available():
        place.failures.append("this build of torch has no NCCL")
        return place.outcome()
    version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    place.values["nccl"] = ".".join(map(str, version))
    if tuple(version) < (2, 18):
        place.failures.append(f"NCCL {version} is older than 2.18")
    return place.outcome()


def fork(place: Place) -> CheckOutcome:
    """CUDA in a forked child: checks are executed in one."""
    import torch

    # This function runs in a forked child already: that it adds is the answer.
    place.equal("the sum", float((torch.ones(2, device="cuda") + 1).sum()), 4.0)
    return place.outcome()


# --- the driver ------------------------------------------------------------------------------


@contextmanager
def nvml_opened() -> Iterator[Any]:
    """NVML's module, initialized.

    Raises:
        Cannot: the library, the driver or a GPU is missing.
    """
    try:
        import pynvml
    except ImportError:
        raise Cannot("nvidia-ml-py is not installed: pip install nvidia-ml-py") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise Cannot(f"NVML does not start: {error}") from None
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


class NvmlReport:
    """NVML's answers about each GPU; `unknown` counts what it did not answer."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.handles = [
            nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())
        ]

    def __call__(self, function: str, *arguments: Any) -> Any:
        """The answer of a function; None where NVML does not give one."""
        try:
            return getattr(self.nvml, function)(*arguments)
        except (self.nvml.NVMLError, AttributeError):
            return None


@contextmanager
def _gpus(place: Place) -> Iterator[NvmlReport]:
    with nvml_opened() as nvml:
        asked = NvmlReport(nvml)
        place.values["gpus"] = len(asked.handles)
        yield asked


def driver(place: Place) -> CheckOutcome:
    """The driver's version and its CUDA version."""
    with _gpus(place) as ask:
        version, cuda = ask("nvmlSystemGetDriverVersion"), ask("nvmlSystemGetCudaDriverVersion_v2")
    place.values["driver"] = (
        version.decode() if isinstance(version, bytes) else version or "unknown"
    )
    if cuda is None:
        raise Cannot("the driver does not report its CUDA version")
    place.values["cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
    built = built_for_cuda()
    if built and cuda // 1000 < int(built.partition(".")[0]):
        place.failures.append(
            f"the driver supports CUDA {place.values['cuda']}, torch is built for {built}: "
            "install a newer driver, or torch for the driver's CUDA"
        )
    return place.outcome()


def devices(place: Place) -> CheckOutcome:
    """GPUs of NVML and of torch."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    with _gpus(place) as ask:
        uuids = [ask("nvmlDeviceGetUUID", handle) for handle in ask.handles]
    place.values["visible"] = visible if visible is not None else "all"
    place.values["torch_gpus"] = shown = torch.cuda.device_count()
    wanted = len(uuids) if visible is None else len([v for v in visible.split(",") if v.strip()])
    if shown != wanted:
        place.failures.append(
            f"torch shows {shown} GPUs, NVML has {len(uuids)}; CUDA_VISIBLE_DEVICES: {visible!r}"
        )
    return place.outcome()


def idle(place: Place) -> CheckOutcome:
    """Memory and utilization by other processes."""
    with _gpus(place) as ask:
        for index, handle in enumerate(ask.handles):
            memory = ask("nvmlDeviceGetMemoryInfo", handle)
            if memory is None or not hasattr(memory, "free"):
                raise Cannot("NVML does not report the memory in use")
            used = ask("nvmlDeviceGetUtilizationRates", handle)
            processes = ask("nvmlDeviceGetComputeRunningProcesses", handle)
            others = [p.pid for p in processes or () if p.pid != os.getpid()]
            share = memory.free / memory.total
            place.values[f"gpu_{index}_free_share"] = share
            busy = used is not None and used.gpu >= IDLE
            if share < FREE_MEMORY or busy:
                place.failures.append(
                    f"GPU {index} is busy: {share:.0%} of its memory is free, utilization "
                    f"{used.gpu if used else 'unknown'}%, processes {others or 'not visible'}"
                )
    return place.outcome()


def ecc(place: Place) -> CheckOutcome:
    """Errors of the memory."""
    known = False
    with _gpus(place) as ask:
        for index, handle in enumerate(ask.handles):
            errors = ask("nvmlDeviceGetTotalEccErrors", handle, 1, 0)  # uncorrected, volatile
            remaps = ask("nvmlDeviceGetRemappedRows", handle)
            known |= errors is not None or remaps is not None
            place.values[f"gpu_{index}_uncorrected"] = "unknown" if errors is None else errors
            if errors:
                place.failures.append(f"GPU {index} has {errors} uncorrected ECC errors")
            if remaps is not None and (remaps[2] or remaps[3]):
                place.failures.append(f"GPU {index} has pending or failed row remaps: reset it")
    if not known:
        raise Cannot("these GPUs have no ECC, or it is disabled")
    return place.outcome()


def mig(place: Place) -> CheckOutcome:
    with _gpus(place) as ask:
        for index, handle in enumerate(ask.handles):
            mode = ask("nvmlDeviceGetMigMode", handle)
            place.values[f"gpu_{index}"] = "not supported" if mode is None else bool(mode[0])
            if mode is not None and mode[0]:
                place.failures.append(f"GPU {index} is split into MIG instances")
    return place.outcome()


def clocks(place: Place) -> CheckOutcome:
    """Clocks, and why they are throttled."""
    with _gpus(place) as ask:
        for index, handle in enumerate(ask.handles):
            place.values[f"gpu_{index}_max_mhz"] = ask("nvmlDeviceGetMaxClockInfo", handle, 1) or 0
            place.values[f"gpu_{index}_mhz"] = ask("nvmlDeviceGetClockInfo", handle, 1) or 0
            reasons = ask("nvmlDeviceGetCurrentClocksEventReasons", handle)
            if reasons is None:
                reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
            if reasons is None:
                raise Cannot("NVML does not report the reasons for throttling")
            active = [text for bit, text in _CRITICAL_THROTTLING.items() if reasons & bit]
            if active:
                place.failures.append(f"GPU {index} is throttled: {', '.join(active)}")
    return place.outcome()


def power(place: Place) -> CheckOutcome:
    with _gpus(place) as ask:
        for index, handle in enumerate(ask.handles):
            limit = ask("nvmlDeviceGetEnforcedPowerLimit", handle)
            usual = ask("nvmlDeviceGetPowerManagementDefaultLimit", handle)
            if limit is None or usual is None:
                raise Cannot("NVML does not report power limits")
            place.values[f"gpu_{index}_watts"] = limit / 1e3
            if limit < usual:
                place.failures.append(
                    f"GPU {index} is limited to {limit / 1e3:.0f} W of {usual / 1e3:.0f} W: "
                    f"nvidia-smi -i {index} -pl {usual // 1000}"
                )
    return place.outcome()


def pcie(place: Place) -> CheckOutcome:
    """Generation and width of the link to the host. The generation falls while a GPU idles."""
    with _gpus(place) as ask:
        for index, handle in enumerate(ask.handles):
            generation = ask("nvmlDeviceGetMaxPcieLinkGeneration", handle)
            width = ask("nvmlDeviceGetCurrPcieLinkWidth", handle)
            widest = ask("nvmlDeviceGetMaxPcieLinkWidth", handle)
            if width is None:
                raise Cannot("NVML does not report the PCIe link")
            place.values[f"gpu_{index}"] = f"generation {generation}, x{width}"
            if widest is not None and width < widest:
                place.failures.append(f"GPU {index} has x{width} of x{widest}: reseat it")
    return place.outcome()


def nvlink(place: Place) -> CheckOutcome:
    """State and errors of NVLinks."""
    links = 0
    with _gpus(place) as ask:
        for index, handle in enumerate(ask.handles):
            for link in range(36):
                state = ask("nvmlDeviceGetNvLinkState", handle, link)
                if state is None:
                    continue
                links += 1
                if not state:
                    place.failures.append(f"NVLink {link} of GPU {index} is inactive")
                for counter, name in ((0, "replay"), (1, "recovery")):
                    errors = ask("nvmlDeviceGetNvLinkErrorCounter", handle, link, counter)
                    if errors:
                        place.failures.append(
                            f"NVLink {link} of GPU {index}: {errors} {name} errors"
                        )
    if not links:
        raise Cannot("these GPUs have no NVLink")
    return place.outcome(links=links)


def peer_access(place: Place) -> CheckOutcome:
    from hocket.probing import devices as probe

    with nvml_opened() as nvml:
        found = probe.read_nvml(nvml)
    place.values["pairs"] = len(found.pairs)
    place.values["with_peer_access"] = sum(pair.peer for pair in found.pairs)
    place.failures += [
        f"GPU {pair.first} and {pair.second} are joined by NVLink without peer access"
        for pair in found.pairs
        if pair.links and not pair.peer
    ]
    return place.outcome()


def topology(place: Place) -> CheckOutcome:
    """Paths and NUMA nodes."""
    from hocket.probing import devices as probe

    with nvml_opened() as nvml:
        found = probe.read_nvml(nvml)
    for pair in found.pairs:
        place.values[f"gpu_{pair.first}_{pair.second}"] = pair.path
    unknown = [str(device.index) for device in found.devices if not device.numa_known]
    if unknown:
        place.failures.append(f"the NUMA node of GPU {', '.join(unknown)} is unknown")
    return place.outcome()
