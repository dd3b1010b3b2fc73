"""Fake CUDA device: forward and backward on fake CUDA tensors, without a GPU or its driver.

`load_fake_device` compiles `fake_cuda.cpp` once per torch version and loads it before it imports
torch; `FakeGpu` answers what is asked of `torch.cuda` as a named GPU of the catalogue would.
Works on CPU builds and on CUDA builds of torch; GPUs that are present are neither used nor seen.

    $XDG_CACHE_HOME/hocket/rehearsal/HASH.so, else ~/.cache/hocket/rehearsal/HASH.so
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hocket.spec.attention_kernel import shared_memory_limit
from hocket.spec.errors import OptionError
from hocket.spec.rehearsal import RehearsedDevice
from hocket.spec.user_cache import cache_folder

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
NUM_DEVICES = 8
"""As in `fake_cuda.cpp`."""
_ONLY_ON_CUDA = ("_fused_rms_norm", "mish_backward", "silu_backward")
"""aten operations with a CUDA kernel that a build without CUDA composes of others."""
_NCCL = (2, 27, 0)
_SECONDS = 900.0
"""Only a compiler that hangs takes as long, on a machine of any load."""
_LOADED: list[ctypes.CDLL] = []


def load_fake_device() -> None:
    """Compile the fake device if that was never done, load it and import torch. Call before torch
    is imported by others, and before any backward: autograd counts devices in the first one.

    Raises:
        OptionError: no C++ compiler, or one that cannot compile torch's headers.
    """
    if _LOADED:
        return
    assert "torch" not in sys.modules, "torch asks for its CUDA hooks once, when it is imported"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU that is present is not touched
    # `rehearsal.generated` compiles in this process, for a GPU that no cache shall know.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    torch_folder = _torch_folder()
    path = compiled_device(torch_folder)
    # torch's own first: it loads its dependencies (on CUDA builds NVIDIA's libraries) by path.
    dependencies = torch_folder / "lib" / "libtorch_global_deps.so"
    if dependencies.exists():
        # (A CUDA build may find NVIDIA's libraries only while torch is imported.)
        with contextlib.suppress(OSError):
            ctypes.CDLL(str(dependencies), mode=ctypes.RTLD_GLOBAL)
    _LOADED.append(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL))
    import torch  # noqa: F401  a CUDA build registers its own guard now; ours takes its place

    _LOADED[0].hocket_register_guard()


def _torch_folder() -> Path:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.submodule_search_locations
    return Path(found.submodule_search_locations[0])


def compiled_device(torch_folder: Path) -> Path:
    """The compiled fake device for a torch installation. Raises OptionError as
    `load_fake_device`."""
    version = (torch_folder / "version.py").read_bytes()
    compiler = shlex.split(os.environ.get("CXX") or "")
    compiler = compiler or [name for name in ("c++", "g++", "clang++") if shutil.which(name)][:1]
    key = hashlib.sha256(
        b"\0".join([SOURCE.read_bytes(), version, str(torch_folder).encode()])
    ).hexdigest()
    folder = cache_folder("rehearsal")
    path = folder / f"{key[:24]}.so"
    if path.exists():
        return path
    if not compiler:
        raise OptionError(
            "a rehearsal compiles a fake CUDA device of 80 lines once, and no C++ compiler was "
            "found (c++, g++ or clang++ on PATH, or CXX)",
            hint="apt install g++, or conda install -c conda-forge gxx",
        )
    folder.mkdir(parents=True, exist_ok=True)
    handle, part = tempfile.mkstemp(dir=folder, suffix=".so")
    os.close(handle)
    lib = torch_folder / "lib"
    command = [
        *compiler, "-O1", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}",
        "-o", part, str(SOURCE), f"-L{lib}", f"-Wl,-rpath,{lib}", "-lc10", "-ltorch_cpu",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=_SECONDS
        )
        reason = "" if done.returncode == 0 else _first_error(done.stderr)
    except subprocess.TimeoutExpired:
        Path(part).unlink(missing_ok=True)
        raise OptionError(
            f"{compiler[0]} took more than {_SECONDS:g} s to compile the fake CUDA device",
            hint="run it again when the machine is less busy: it is compiled once",
        ) from None
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(error)
    if reason:
        Path(part).unlink(missing_ok=True)
        raise OptionError(
            f"the fake CUDA device did not compile ({compiler[0]}): {reason}",
            hint="CXX=g++-13, or another compiler of C++20",
        )
    os.replace(part, path)
    return path


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line), lines[0] if lines else "no reason")


@functools.cache
def _name_kernels() -> None:
    """Let a CPU build dispatch as a CUDA build does: where a kernel is registered, the operation is
    not composed of others. The kernels are never called, because fake tensors have no values."""
    import torch

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a kernel of a fake device was called")

    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for name in _ONLY_ON_CUDA:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
            library.impl(name, never, "CUDA")
    _KEPT.append(library)


_KEPT: list[Any] = []


def properties_of(gpu: RehearsedDevice) -> SimpleNamespace:
    """What `torch.cuda.get_device_properties` says of a GPU (CUDA C++ Programming Guide, table of
    compute capabilities)."""
    major, minor = gpu.capability
    shared = shared_memory_limit(gpu.capability)
    return SimpleNamespace(
        name=gpu.name, major=major, minor=minor, total_memory=gpu.memory, gcnArchName="",
        multi_processor_count=gpu.sms or 100, warp_size=32, is_integrated=False,
        L2_cache_size=gpu.l2, regs_per_multiprocessor=65536, max_threads_per_block=1024,
        max_threads_per_multi_processor=1536 if shared < shared_memory_limit((8, 0)) else 2048,
        shared_memory_per_block=49152, shared_memory_per_block_optin=shared,
    )  # fmt: skip


class _Stream:
    """A stream on which everything is done at once."""

    def __init__(self, device: Any = None, priority: int = 0, **more: Any) -> None:
        self.device, self.priority, self.cuda_stream = device, priority, 0

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None: ...


class _Event:
    """An event that has happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return False

    def elapsed_time(self, other: Any) -> float:
        return 0.0


class FakeGpu:
    """Answers for `torch.cuda`, as one rank on a machine of eight such GPUs sees it.

    Args:
        device: the GPU.
        on_wait: called with the name of each call that makes the host wait for the device.
        allocated: gives (bytes of tensors now, most so far).
    """

    def __init__(
        self,
        device: RehearsedDevice,
        on_wait: Callable[[str], None] = lambda name: None,
        allocated: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self.device = device
        self.on_wait = on_wait
        self.allocated = allocated
        self._index = 0

    @contextmanager
    def installed(self) -> Iterator[FakeGpu]:
        """Within, `torch.cuda` answers for this GPU, and fake tensors on it run backward."""
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode

        assert _LOADED, "load() comes before torch is imported"
        _name_kernels()
        cuda: Any = torch.cuda
        nccl: Any = cuda.nccl
        before = [(nccl, "version", nccl.version)]
        nccl.version = lambda: _NCCL
        for name, answer in self._answers().items():
            before.append((cuda, name, getattr(cuda, name)))
            setattr(cuda, name, answer)
        # A fake mode asks torch.cuda whether it may make real tensors on the device.
        mode: Any = FakeTensorMode
        real = mode.avoid_device_init
        mode.avoid_device_init = property(lambda self: True)
        try:
            yield self
        finally:
            mode.avoid_device_init = real
            for module, name, value in before:
                setattr(module, name, value)

    def _answers(self) -> dict[str, Any]:
        import torch

        gpu = self.device
        properties = properties_of(gpu)

        def on_wait(name: str) -> None:
            self.on_wait(name)

        class Stream(_Stream):
            def synchronize(self) -> None:
                on_wait("Stream.synchronize")

        class Event(_Event):
            def synchronize(self) -> None:
                on_wait("Event.synchronize")

        stream = Stream()

        def set_device(device: Any) -> None:
            index = device if isinstance(device, int) else torch.device(device).index
            self._index = index or 0

        return {
            "is_available": lambda: True,
            "is_initialized": lambda: True,
            "_lazy_init": lambda: None,
            "init": lambda: None,
            "device_count": lambda: NUM_DEVICES,
            "current_device": lambda: self._index,
            "set_device": set_device,
            "synchronize": lambda device=None: on_wait("torch.cuda.synchronize"),
            "get_device_capability": lambda device=None: gpu.capability,
            "get_device_name": lambda device=None: gpu.name,
            "get_device_properties": lambda device=None: properties,
            "is_bf16_supported": lambda including_emulation=True: gpu.capability >= (8, 0),
            "mem_get_info": lambda device=None: (gpu.memory - self.allocated()[0], gpu.memory),
            "memory_allocated": lambda device=None: self.allocated()[0],
            "memory_reserved": lambda device=None: self.allocated()[0],
            "max_memory_allocated": lambda device=None: self.allocated()[1],
            "max_memory_reserved": lambda device=None: self.allocated()[1],
            "reset_peak_memory_stats": lambda device=None: None,
            "empty_cache": lambda: None,
            "default_generators": tuple(torch.Generator() for _ in range(NUM_DEVICES)),
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: None,
            "Event": Event,
            "Stream": Stream,
            "current_stream": lambda device=None: stream,
            "default_stream": lambda device=None: stream,
            "stream": lambda given: given or stream,
            "set_stream": lambda given: None,
            "is_current_stream_capturing": lambda: False,
            "graph_pool_handle": lambda: (0, 0),
        }
