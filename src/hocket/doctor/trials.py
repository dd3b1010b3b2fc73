"""Serving's attention kernels: the trial of each kind of layer, and their seconds side by side.

`serving.engine.attention_kernels` chooses kernels by a table and tries the chosen one when a server
starts. Here every kernel of the table is tried for every kind of layer that the table says it
takes; where it takes none of them on this GPU, the line is `cannot` with the reasons.

Without a GPU the calls are executed on fake tensors, where a kernel has a shape and no values;
attention to latent vectors, which is made of torch's operations, on a CPU as well.

Not executed on a GPU yet.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from hocket.doctor.check import CPU, FAKE, Cannot, CheckOutcome, row_of
from hocket.doctor.place import Place

if TYPE_CHECKING:
    from hocket.serving.engine.attention_kernels import Accelerator, KernelRow, LayerKind

HEADS = ((8, 8), (8, 2), (6, 1))
"""Query heads and key/value heads."""
SIZES = ((64, 64), (128, 128), (256, 256), (192, 128))
"""Head sizes of keys and of values."""
LATENT_HEADS = (16, 5)
"""Query heads over latent vectors, which all of them read."""
LATENT_SIZES = ((576, 512), (288, 256), (40, 32))
"""Latent vectors with their rotary keys, and without: DeepSeek-V3's, MiniCPM 3's, a tiny one's."""
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {}, "window": {"window": 9}, "softcap": {"softcap": True}, "sinks": {"sinks": True},
}  # fmt: skip
DTYPES = ("bfloat16", "float16", "float32")
THREADS = 8
"""Trials at once: Triton compiles a kernel for each kind of layer."""
SLOWER = 1.25
"""How often the seconds of the fastest kernel those of the preferred one may be."""

_row = row_of(
    "hocket.doctor.trials", prefix="kernel-", group="kernels", capability=(8, 0), rehearsals=(FAKE,)
)
_KINDS = (
    f"heads {', '.join(f'{a}:{k}' for a, k in HEADS)}, head sizes "
    f"{', '.join(f'{d}/{e}' for d, e in SIZES)}, {', '.join(VARIANTS)}"
)
_LATENT_KINDS = (
    f"{' and '.join(map(str, LATENT_HEADS))} heads, sizes "
    f"{', '.join(f'{d}/{e}' for d, e in LATENT_SIZES)}, {', '.join(VARIANTS)}"
)

CHECKS = (
    *(
        _row(
            f"trial-{kernel}", f"serving's trial of {title} for every kind of layer: bf16, fp16 "
            f"and fp32, {_KINDS}", "trial", "each kind that the table allows is within 0.03",
            arguments={"kernel": kernel}, seconds=2.0, timeout=60.0,
        )
        for kernel, title in (
            ("fa2", "flash-attention 2"), ("fa3", "flash-attention 3"),
            ("fa4", "flash-attention 4"),
        )
    ),
    *(
        _row(
            f"trial-triton-{short}", "serving's trial of the Triton kernel for every kind of "
            f"layer: {short}, {_KINDS}", "trial", f"each kind is within {limit}",
            arguments={"kernel": "triton", "dtypes": [dtype]}, seconds=15.0, timeout=240.0,
            packages=("triton",),
        )
        for short, dtype, limit in (
            ("bf16", "bfloat16", "0.03"), ("fp16", "float16", "0.03"), ("fp32", "float32", "1e-4"),
        )
    ),
    _row(
        "trial-latent", "serving's trial of attention to latent vectors for every kind of layer: "
        f"bf16, fp16 and fp32, {_LATENT_KINDS}", "trial", "each kind is within 0.03, of fp32 1e-4",
        arguments={"kernel": "latent"}, seconds=1.0, timeout=60.0, rehearsals=(CPU, FAKE),
    ),
    _row(
        "paged-speed", "decode steps of 1 and 32 rows over 8,192 tokens and a prompt of 4,096: "
        "seconds of every kernel that serving may choose, 32 query and 8 key/value heads of 128, "
        "bf16", "speed", f"the kernel that the table prefers takes at most {SLOWER:g} times the "
        "fastest", seconds=4.0, timeout=90.0,
    ),
)  # fmt: skip


def trial_kinds(dtypes: Sequence[str] = DTYPES) -> Iterator[LayerKind]:
    """Every kind of layer: those that cache keys and values, then those that cache latent
    vectors."""
    import torch

    from hocket.serving.engine.attention_kernels import LayerKind
    from hocket.serving.engine.cache import LayerShape

    cached = [(*heads, *sizes, False) for heads in HEADS for sizes in SIZES]
    latent = [(heads, 1, *sizes, True) for heads in LATENT_HEADS for sizes in LATENT_SIZES]
    for dtype in dtypes:
        for num_heads, num_kv_heads, key_size, value_size, is_latent in cached + latent:
            shape = LayerShape(
                num_heads, num_kv_heads, key_size, value_size, getattr(torch, dtype),
                latent=is_latent,
            )  # fmt: skip
            for variant in VARIANTS.values():
                yield LayerKind(shape, **variant)


def _kernel(name: str) -> KernelRow:
    from hocket.serving.engine.attention_kernels import KERNELS

    return next(kernel for kernel in KERNELS if kernel.name == name)


def _accelerator(place: Place, kernel: KernelRow) -> Accelerator:
    """This GPU; in a rehearsal one that the kernel runs on, with what it needs."""
    from hocket.serving.engine.attention_kernels import Accelerator

    if place.on_gpu:
        return Accelerator.of(place.device)
    return Accelerator(kernel.least, frozenset(filter(None, [kernel.module])))


def trial(place: Place, *, kernel: str, dtypes: Sequence[str] = DTYPES) -> CheckOutcome:
    from hocket.serving.engine.attention_cuda import Trial

    tried = _kernel(kernel)
    accelerator = _accelerator(place, tried)
    rejected: Counter[str] = Counter()
    allowed = []
    for kind in trial_kinds(dtypes):
        why = tried.rejection(kind, accelerator, None)
        if why is None:
            allowed.append(kind)
        else:
            rejected[why] += 1
    text = "; ".join(f"{why} ({count} kinds)" for why, count in rejected.items())
    if not allowed:
        raise Cannot(f"{kernel}: {text}")
    run = _shape if place.form == FAKE else Trial(place.device)

    def attempt(kind: LayerKind) -> str | None:
        return run(tried, kind, tried.preferred)

    if place.on_gpu and not tried.flash:
        with ThreadPoolExecutor(THREADS) as threads:
            found = list(threads.map(attempt, allowed))
    else:  # torch holds one flash-attention at a time
        found = [attempt(kind) for kind in allowed]
    wrong = [f"{kind} {why}" for kind, why in zip(allowed, found, strict=True) if why]
    place.failures += wrong[:5]
    return place.outcome(tried=len(allowed), failed=len(wrong), cannot=text or "none")


def _shape(kernel: KernelRow, kind: LayerKind, block_size: int) -> str | None:
    """What is wrong with the shape of a kernel's result on fake tensors; None: nothing."""
    import torch

    from hocket.serving.engine.attention import Options
    from hocket.serving.engine.attention_cuda import attend_pools, trial_step
    from hocket.serving.engine.cache import PagedCache

    shape, device = kind.shape, torch.device("cuda", 0)
    cache = PagedCache([shape], 8, block_size, device, heads_first=False)
    q = torch.empty(6, shape.num_heads, shape.key_size, dtype=shape.dtype, device=device)
    sinks = torch.empty(shape.num_heads, dtype=shape.dtype, device=device) if kind.sinks else None
    options = Options(0.125, kind.window, 2.0 if kind.softcap else None, sinks)
    pools = cache.keys[0], cache.values[0]
    out = attend_pools(kernel.name, q, pools, trial_step(block_size, device), options)
    wanted = (6, shape.num_heads, shape.value_size)
    if tuple(out.shape) == wanted and out.is_cuda and out.dtype == shape.dtype:
        return None
    return f"gives {tuple(out.shape)} {out.dtype} on {out.device}, expected {wanted}"


# --- speed -----------------------------------------------------------------------------------


def speed(place: Place) -> CheckOutcome:
    """Seconds of each kernel for the same batches; the preferred one, compared with the fastest."""
    import torch

    from hocket.serving.engine.attention_cuda import Trial
    from hocket.serving.engine.attention_kernels import KERNELS, LayerKind
    from hocket.serving.engine.cache import LayerShape

    kind = LayerKind(LayerShape(32, 8, 128, 128, torch.bfloat16))
    block = math.lcm(*(kernel.block for kernel in KERNELS))
    able = []
    for kernel in KERNELS:
        run = Trial(place.device) if place.on_gpu else _shape
        why = kernel.rejection(kind, _accelerator(place, kernel), block) or run(kernel, kind, block)
        if why is None:
            able.append(kernel.name)
        else:
            place.values[f"{kernel.name}_cannot"] = why
    if not able:
        raise Cannot(f"no kernel attends for {kind}")
    for name, rows, context, count in (
        ("decode_1", 1, 8192, 1), ("decode_32", 32, 8192, 1), ("prefill", 1, 4096, 4096),
    ):  # fmt: skip
        batch = rows, place.size(context, 2 * block), count
        seconds = _seconds(place, kind, able, batch)
        place.values |= {f"{name}_{kernel}_seconds": s for kernel, s in seconds.items()}
        fastest = min(seconds.values())
        place.at_most(f"{name}_preferred_of_fastest", seconds[able[0]] / fastest, SLOWER)
    return place.outcome(preferred=able[0])


def _seconds(
    place: Place, kind: LayerKind, able: list[str], batch: tuple[int, int, int]
) -> dict[str, float]:
    """Seconds of each kernel for a batch of (rows, tokens of each, how many of them are new)."""
    import torch

    from hocket.serving.engine.attention import Options
    from hocket.serving.engine.attention_cuda import _activate, attend_pools
    from hocket.serving.engine.attention_kernels import KERNELS
    from hocket.serving.engine.device_step import DeviceStep

    block = math.lcm(*(kernel.block for kernel in KERNELS))
    rows, context, count = batch
    count = min(count, context)
    each, device, shape = context // block, place.device, kind.shape
    size = rows * each, block, shape.num_kv_heads, shape.key_size
    keys, values = (torch.full(size, 0.5, dtype=shape.dtype, device=device) for _ in range(2))
    q = place.draw(rows * count, shape.num_heads, shape.key_size, dtype=shape.dtype)
    whole = torch.arange(rows + 1, dtype=torch.int32, device=device) * count
    nothing = torch.zeros(rows * count, dtype=torch.long, device=device)
    step = DeviceStep(
        tokens=nothing, positions=nothing, places=nothing, wanted=None, begins=whole,
        lengths=torch.full((rows,), context, dtype=torch.int32, device=device),
        tables=torch.arange(rows * each, dtype=torch.int32, device=device).view(rows, each),
        most=count, longest=context,
    )  # fmt: skip
    options = Options(shape.key_size**-0.5, None, None, None)
    found = {}
    with torch.inference_mode():
        for name in able:
            if place.on_gpu and _kernel(name).flash:
                _activate(_kernel(name).impl)
            found[name] = place.kernel_seconds(
                lambda name=name: attend_pools(name, q, (keys, values), step, options)  # type: ignore[misc]
            )
    return found
