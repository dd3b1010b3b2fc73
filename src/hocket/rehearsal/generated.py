"""Generated kernels: what torch.compile makes of a model for a GPU that is not there.

    layer -> Inductor -> a program of kernels -> Triton -> machine code of the rehearsed GPU
                             |
                             +-> run on fake tensors: its buffers count, its kernels do nothing

Inductor and Triton need no device but to ask for its properties, to time candidates and to load
machine code. The first is answered, the others do not happen: where Inductor would choose by
timing, all candidates are compiled, and matmuls are not padded. What is found is what torch 2.13
generates; another version may generate something else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from hocket.rehearsal.device import properties_of
from hocket.spec.attention_kernel import shared_memory_limit
from hocket.spec.errors import OptionError
from hocket.spec.rehearsal import RehearsedDevice

_NUMBER = re.compile(r"_\d+$")
FLEX = "flex_attention"
"""In the names of flex attention's kernels; those of its backward have more behind it."""


@dataclasses.dataclass(frozen=True, slots=True)
class GeneratedKernel:
    """One candidate of one generated kernel.

    Attributes:
        name: as Inductor gives it, without its number. tiles: of this candidate, its warps and
            stages. shared: bytes of shared memory of a program.
    """

    name: str
    tiles: str
    shared: int


class GeneratedKernels:
    """What was generated within `generating`.

    Attributes:
        limit: bytes of shared memory that a program may use.
        kernels: name and number of each to its candidates.
        launches: name of a kernel to how often it would have run.
    """

    def __init__(self, capability: tuple[int, int]) -> None:
        self.limit = shared_memory_limit(capability)
        self.kernels: dict[str, list[GeneratedKernel]] = {}
        self.launches: Counter[str] = Counter()

    def faults(self) -> list[str]:
        """Kernels of which no candidate can run: each would be an error of the first step."""
        found = []
        for candidates in self.kernels.values():
            least = min(candidates, key=lambda one: one.shared)
            if least.shared > self.limit:
                found.append(
                    f"{least.name} ({least.tiles}) takes {least.shared:,} bytes of shared memory, "
                    f"and this GPU has {self.limit:,} for a program"
                )
        return found

    def figures(self) -> dict[str, Any]:
        """As `spec.rehearsal.RankRehearsal.generated`."""
        from torch._dynamo.utils import counters

        every = [min(one.shared for one in found) for found in self.kernels.values()]
        return {
            "kernels": len(self.kernels),
            "graphs": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values()),
            "launches": sum(self.launches.values()),
            "shared_bytes": max(every, default=0),
            "faults": self.faults(),
        }


@contextlib.contextmanager
def generating(
    device: RehearsedDevice, on_launch: Callable[[str], None] = lambda name: None
) -> Iterator[GeneratedKernels]:
    """Within, `torch.compile` generates programs for `device`, which run on fake tensors.

    Args:
        on_launch: called with the name of each generated kernel that would run.

    Raises:
        OptionError: Triton is not installed.
    """
    try:
        import triton
    except ImportError:
        raise OptionError(
            "kernels that torch.compile generates are compiled by Triton, which is not installed",
            hint="pip install triton, or leave --compile out",
        ) from None
    import torch._dynamo
    from torch._dynamo.utils import counters
    from torch._inductor import async_compile, compile_fx, output_code, utils
    from torch._inductor.fx_passes import joint_graph, pad_mm
    from torch._inductor.runtime import hints, triton_helpers, triton_heuristics
    from torch.utils import _triton

    found = GeneratedKernels(device.capability)
    properties, arch = properties_of(device), 10 * device.capability[0] + device.capability[1]
    cuda: Any = torch._dynamo.device_interface.CudaInterface

    def compiled(tuner: Any, *args: Any, **kwargs: Any) -> None:
        configs, tuner.configs = tuner.configs or [], None
        name = tuner.fn.__name__
        for config in configs:
            binary = tuner._precompile_config(config).kernel
            shared = getattr(getattr(binary, "metadata", binary), "shared", 0)
            one = GeneratedKernel(_NUMBER.sub("", name), str(config), shared)
            found.kernels.setdefault(tuner.fn.src + name, []).append(one)
        tuner.compile_results = [None]

    def launched(tuner: Any, *args: Any, **kwargs: Any) -> None:
        name = _NUMBER.sub("", tuner.fn.__name__)
        found.launches[name] += 1
        on_launch(name)

    def allocated(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        index = torch.cuda.current_device()
        return torch.empty_strided(size, stride, dtype=dtype, device=torch.device("cuda", index))

    def viewed(tensor: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
        return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)

    tuner: Any = triton_heuristics.CachingAutotuner
    guards: Any = torch._C._dynamo.guards
    answers: list[tuple[Any, str, Any]] = [
        (torch.cuda, "_exchange_device", lambda index: 0),
        (torch.cuda, "_maybe_exchange_device", lambda index: 0),
        (torch.cuda, "_DeviceGuard", lambda index: contextlib.nullcontext()),
        (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
        (cuda, "get_device_properties", staticmethod(lambda device=None: properties)),
        (cuda.Worker, "get_device_properties", staticmethod(lambda device=None: properties)),
        (cuda, "get_compute_capability", staticmethod(lambda device=None: arch)),
        (async_compile, "get_compile_threads", lambda: 1),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (tuner, "precompile", compiled),
        (tuner, "run", launched),
        (guards, "_empty_strided_cuda", allocated),
        (guards, "_reinterpret_tensor", viewed),
        # The first would compute constants on the device, the second would time it.
        (joint_graph, "constant_fold_uniform_value", lambda graph: None),
        (pad_mm, "_should_pad", lambda *args, **kwargs: False),
    ]
    # Inputs that are not aligned would be copied: fake ones have no address.
    answers += [
        (module, "align_inputs_from_check_idxs", lambda model, *args, **kwargs: model)
        for module in (compile_fx, output_code, utils)
        if hasattr(module, "align_inputs_from_check_idxs")
    ]

    driver: Any = triton.runtime.driver
    create: Any = hints.DeviceProperties.create
    # What this process has found out about its own device, or about the GPU before this one.
    answered = [one.cache_clear for one in vars(_triton).values() if hasattr(one, "cache_clear")]
    with contextlib.ExitStack() as stack:
        for module, name, answer in answers:
            stack.enter_context(mock.patch.object(module, name, answer, create=True))
        stack.enter_context(torch._dynamo.config.patch(fail_on_recompile_limit_hit=True))  # type: ignore[no-untyped-call]
        stack.enter_context(mock.patch.object(driver, "_active", _driver(arch)))
        for forget in (torch._dynamo.reset, create.cache_clear, counters.clear, *answered):
            cast(Callable[[], None], forget)()
            stack.callback(forget)
        yield found


def _driver(arch: int) -> Any:
    """What Triton asks of a driver before it loads machine code."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):  # type: ignore[misc]
        def __init__(self) -> None: ...

        @classmethod
        def is_active(cls) -> bool:
            return True

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise AssertionError("a launcher is made for a device")

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", arch, 32)

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

        def get_benchmarker(self) -> Any:
            raise AssertionError("a fake device is not timed")

        def get_current_device(self) -> int:
            return 0

    return Driver()
