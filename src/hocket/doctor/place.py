"""Place: where a check runs, how it compares and times there, and what it found so far.

    gpu    full size, on a CUDA device; comparisons and rates are judged
    cpu    small size, on the CPU; comparisons are judged, rates are only measured
    fake   small size, on fake CUDA tensors: shapes and devices are compared, nothing is timed

Not executed on a GPU yet.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from hocket.doctor.check import CPU, FAKE, FORMS, GPU, Cannot, CheckOutcome
from hocket.spec.doctor import Value

if TYPE_CHECKING:
    import torch
    from torch import Tensor

T = TypeVar("T")


class Place:
    """Where one check runs.

    Args:
        form: `gpu`, `cpu` or `fake`.
        index: of the CUDA device.

    Attributes:
        values, predicted: figures by name, as they are found.
        failures: criteria that were not met, with the numbers.
    """

    def __init__(self, form: str = GPU, index: int = 0) -> None:
        assert form in (GPU, *FORMS), form
        self.form = form
        self.index = index
        self.values: dict[str, Value] = {}
        self.predicted: dict[str, Value] = {}
        self.failures: list[str] = []

    @property
    def on_gpu(self) -> bool:
        """Whether a real GPU executes the check."""
        return self.form == GPU

    @property
    def kind(self) -> str:
        """Device type of the check's tensors: `cuda` or `cpu`."""
        return "cpu" if self.form == CPU else "cuda"

    @property
    def device(self) -> torch.device:
        """Device of the check's tensors."""
        import torch

        return torch.device("cpu") if self.form == CPU else torch.device("cuda", self.index)

    def size(self, full: T, small: T) -> T:
        """`full` on a GPU, `small` in a rehearsal."""
        return full if self.on_gpu else small

    def draw(self, *shape: int, dtype: Any = None, seed: int = 0, grad: bool = False) -> Tensor:
        """Normally distributed values [shape], equal on every device."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        if self.form == FAKE:
            return torch.empty(
                *shape, dtype=dtype or torch.float32, device=self.device, requires_grad=grad
            )
        values = torch.randn(*shape, generator=generator, dtype=torch.float32)
        return values.to(self.device, dtype or torch.float32).requires_grad_(grad)

    # --- comparing -------------------------------------------------------------------------

    def compare(self, name: str, found: Tensor, expected: Tensor, limit: float) -> None:
        """Note the largest difference relative to the largest expected entry, at most `limit`."""
        if tuple(found.shape) != tuple(expected.shape):
            self.failures.append(
                f"{name} has the shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
            )
            return
        if self.form == FAKE:
            if found.device.type != "cuda":
                self.failures.append(f"{name} is on {found.device}, expected a CUDA device")
            return
        reference = expected.detach().double().cpu()
        difference = (found.detach().double().cpu() - reference).abs()
        largest = float(reference.abs().max()) if reference.numel() else 0.0
        error = float(difference.max()) / max(largest, 1e-30) if difference.numel() else 0.0
        self.values[f"{name}_relative_error"] = _finite(error)
        if not error <= limit:  # NaN too
            self.failures.append(f"{name} differs by {error:.2g} of its largest entry ({limit:g})")

    def equal(self, name: str, found: object, expected: object) -> None:
        """Note that two plain values are the same."""
        if found != expected:
            self.failures.append(f"{name} is {found!r}, expected {expected!r}")

    def at_least(self, name: str, value: float, limit: float) -> None:
        """Note a figure that is `limit` or more; judged on a GPU alone."""
        self.values[name] = _finite(value)
        if self.on_gpu and not value >= limit:
            self.failures.append(f"{name} is {value:.4g}, less than {limit:g}")

    def at_most(self, name: str, value: float, limit: float) -> None:
        """Note a figure that is `limit` or less; judged on a GPU alone."""
        self.values[name] = _finite(value)
        if self.on_gpu and not value <= limit:
            self.failures.append(f"{name} is {value:.4g}, more than {limit:g}")

    def near(self, name: str, value: float, predicted: float, share: float) -> None:
        """Note a figure and its prediction, which differ by at most `share` of the figure."""
        self.values[name], self.predicted[name] = _finite(value), _finite(predicted)
        if self.on_gpu and not abs(predicted - value) <= share * abs(value):
            self.failures.append(
                f"{name} is {value:.4g}, predicted {predicted:.4g}: {predicted / value - 1:+.0%}, "
                f"more than {share:.0%}"
            )

    def outcome(self, **values: Value) -> CheckOutcome:
        """What was found."""
        self.values |= values
        return CheckOutcome(
            not self.failures, dict(self.values), "; ".join(self.failures), dict(self.predicted)
        )

    # --- timing ----------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        """Within, a call that makes the host wait for the GPU raises RuntimeError
        (torch.cuda.set_sync_debug_mode)."""
        if not self.on_gpu:
            yield
            return
        import torch

        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def seconds(self, call: Callable[[], object], repeats: int = 10, warmup: int = 3) -> float:
        """Median seconds of one call, after `warmup` calls; NaN on fake tensors."""
        if self.form == FAKE:
            call()
            return math.nan
        repeats, warmup = self.size((repeats, warmup), (2, 1))
        for _ in range(warmup):
            call()
        found = []
        for _ in range(repeats):
            self.synchronize()
            begun = time.perf_counter()
            call()
            self.synchronize()
            found.append(time.perf_counter() - begun)
        return statistics.median(found)

    def kernel_seconds(self, call: Callable[[], object], repeats: int = 20) -> float:
        """Seconds of the device for one of many calls enqueued without waiting between them."""
        if self.form != GPU:
            return self.seconds(call)
        import torch

        for _ in range(5):
            call()
        event: Any = torch.cuda.Event
        first, last = event(enable_timing=True), event(enable_timing=True)
        first.record()
        for _ in range(repeats):
            call()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1e3 / repeats

    # --- the device ------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """Name of the GPU; empty in a rehearsal."""
        import torch

        return torch.cuda.get_device_name(self.index) if self.on_gpu else ""

    def peak_flops(self) -> float:
        """Peak dense bf16 operations/s of the GPU. In a rehearsal 1e12, which nothing is judged
        by.

        Raises:
            Cannot: the peak of this GPU is not in the table.
        """
        from hocket.training.utilization import peak_flops

        found = peak_flops(self.name) if self.on_gpu else 1e12
        if "MIG" in self.name:
            raise Cannot(f"{self.name} is a part of a GPU, whose peak is not in the table")
        if found is None:
            raise Cannot(f"the peak of {self.name} is not in training/utilization.py")
        return found

    def peak_bandwidth(self) -> float:
        """Bytes/s of the GPU's memory, from the catalogue; as `peak_flops`."""
        from hocket.catalogue import hardware
        from hocket.spec.errors import OptionError

        if not self.on_gpu:
            return 1e11
        try:
            return hardware.gpu(catalogue_name(self.name)).bandwidth
        except OptionError:
            raise Cannot(f"the memory bandwidth of {self.name} is not in the catalogue") from None


def catalogue_name(name: str) -> str:
    """The catalogue's parts of a name as NVML gives it: `NVIDIA H100 80GB HBM3` is H100-SXM-80."""
    words = name.upper().replace("NVIDIA", "").replace("-", " ").split()
    found = [w.removesuffix("GB") for w in words if w not in ("TESLA", "GEFORCE", "HBM3", "HBM3E")]
    if "SXM4" in found or "SXM5" in found:
        found = ["SXM" if w.startswith("SXM") else w for w in found]
    return "-".join(found)


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def float_dtype(name: str) -> Any:
    """torch's dtype of `bf16`, and of `fp32`."""
    import torch

    return torch.bfloat16 if name == "bf16" else torch.float32
