"""Precision and offload: what ranks compute in and keep where, held against their devices before
they start. The rules stand in `spec.capabilities`."""

from __future__ import annotations

import importlib.util
import os
import shutil
from typing import TYPE_CHECKING

from hocket.spec import recompute
from hocket.spec.capabilities import (
    PRECISIONS,
    TRAINED,
    refused_offload,
    refused_precision,
    refused_quantization,
)
from hocket.spec.errors import OptionError
from hocket.spec.expert_dispatch import DEEPEP, require_deepep
from hocket.spec.install import install_line
from hocket.spec.layout import Layout
from hocket.spec.run import RunSpec, TrainOptions, Workload
from hocket.spec.schedule import INPUT, WEIGHT

if TYPE_CHECKING:
    from hocket.spec.schedule import Schedule


def on_cuda(options: TrainOptions) -> bool:
    """Whether ranks will have CUDA devices."""
    if options.device != "auto":
        return options.device == "cuda"
    from hocket.launch.launcher import cuda_shows

    return cuda_shows()


def device_kind(options: TrainOptions) -> str:
    """What ranks will compute on, cpu or cuda, known before they start.

    Raises:
        OptionError: no CUDA device is there, or the backend does not serve these devices.
    """
    kind = "cuda" if on_cuda(options) else "cpu"
    if options.device == "cuda":
        from hocket.launch.launcher import cuda_shows

        if not cuda_shows():
            raise OptionError(
                "--device cuda: torch sees no CUDA device on this machine", hint="--device cpu"
            )
    if options.backend != "auto" and (options.backend == "nccl") != (kind == "cuda"):
        serves = "CUDA devices" if options.backend == "nccl" else "CPU ranks"
        raise OptionError(
            f"--backend {options.backend} connects {serves}; this job would run on {kind}",
            hint="--backend auto",
        )
    return kind


def require_expert_library(options: TrainOptions, dtype: str) -> None:
    """Raises OptionError where `--expert-dispatch deepep` cannot be had."""
    if options.expert_dispatch == DEEPEP:
        from hocket.probing.devices import compute_capability

        cuda = on_cuda(options)
        capability = compute_capability() if cuda else None
        require_deepep(cuda=cuda, dtype=dtype, capability=capability)


def reject_compile(options: TrainOptions) -> None:
    """Refuse --compile where the compiler that it calls is missing. Raises OptionError.

    On a CPU torch.compile calls $CXX or g++; on CUDA Triton calls $CC, gcc or clang.
    """
    variable, names, package = ("CXX", ["g++"], "g++")
    if on_cuda(options):
        variable, names, package = ("CC", ["gcc", "clang"], "gcc")
    names = [os.environ[variable].split()[0]] if os.environ.get(variable) else names
    if options.compile and not any(map(shutil.which, names)):
        raise OptionError(
            f"--compile needs a compiler, and {' or '.join(names)} was not found on PATH",
            hint=f"apt-get install {package}, or leave --compile out",
        )


def reject_precision(
    workload: Workload, options: TrainOptions, layout: Layout, schedule: Schedule | None = None
) -> None:
    """Refuse a dtype, an offload or a recompute that the devices or the options cannot have.

    Raises:
        OptionError: with the reason.
    """
    if workload.dtype not in TRAINED:
        raise OptionError(
            f"dtype is {workload.dtype}, which only hocket check takes; training runs in "
            f"{', '.join(TRAINED)}",
            hint="--dtype fp32",
        )
    if options.grad_dtype == "bf16" and workload.dtype == "fp32":
        raise OptionError(
            "grad_dtype is bf16 and dtype fp32: gradients would lose what the parameters keep",
            hint="--dtype bf16",
        )
    if options.quantize_base is not None and workload.dtype == "fp8":
        raise OptionError(
            "--quantize-base stores the base in 4 bits and multiplies in bf16; --dtype fp8 has "
            "another kind of matmul for the same layers",
            hint="--dtype bf16",
        )
    cuda = on_cuda(options)
    require_expert_library(options, workload.dtype)
    halved = schedule is not None and any(
        action.kind in (INPUT, WEIGHT) for rank in schedule.ranks for action in rank
    )
    library = importlib.util.find_spec("torchao") is not None
    capability = None
    if cuda and workload.dtype == "fp8":
        from hocket.probing.devices import compute_capability

        capability = compute_capability()
    why = refused_precision(
        workload.dtype, cuda=cuda, capability=capability, library=library, halved=halved
    )
    if why is not None:
        lacking = cuda and not library and not halved
        hint = install_line("fp8") if lacking else "--dtype bf16"
        raise OptionError(why, hint=hint)
    again = set(recompute.modules(layout.recompute)) & set(recompute.MADE_AGAIN)
    if options.compile and again:
        raise OptionError(
            f"recompute is {layout.recompute}, with --compile: a compiled layer chooses itself "
            "which of its operations run again in backward",
            hint="--recompute none --compile",
        )
    why = refused_offload(layout, cuda=cuda)
    if why is not None:
        raise OptionError(
            why, hint="--recompute selective" if cuda else "leave --offload activations out"
        )


def reject_served_dtype(workload: Workload) -> None:
    """Refuse a dtype that is trained in and not served in. Raises OptionError."""
    if workload.dtype not in PRECISIONS:
        raise OptionError(
            f"dtype is {workload.dtype}: fp8 matmuls are for training; a model is served in "
            f"{' or '.join(PRECISIONS)}",
            hint="--dtype bf16",
        )


def reject_quantization(quantization: str | None, *, cuda: bool, dtype: str) -> None:
    """Refuse weights in few bits that the devices or the model cannot have. Raises OptionError."""
    capability = None
    if cuda and quantization is not None:
        from hocket.probing.devices import compute_capability

        capability = compute_capability()
    why = refused_quantization(quantization, cuda=cuda, dtype=dtype, capability=capability)
    if why is not None:
        raise OptionError(why, hint="leave --quantization out")


def precision_remark(spec: RunSpec) -> str | None:
    """What a person should know of how gradients are summed; None: nothing."""
    if spec.options.grad_dtype == "fp32" or spec.layout.dp == 1 or on_cuda(spec.options):
        return None
    return (
        "gradients are kept in bf16; between CPU ranks they are summed in fp32 all the same and "
        "rounded once: a sum in bf16 there is slower and less exact"
    )
