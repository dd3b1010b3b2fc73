"""Links of a job: named before ranks start, and scaled to what this machine computes.

`--emulate-links` slows communication until it costs, compared with this machine's compute, what
it costs next to the GPU's. How many times slower this machine is than the GPU, measure as many
ranks as the job has, all multiplying at once; ranks that share a core have a share of its rate.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING, Any

from hocket.spec.cluster import Gpu
from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout
from hocket.spec.links import Links
from hocket.spec.run import RunFolder, RunSpec, TrainOptions

if TYPE_CHECKING:
    from hocket.launch import Launcher

ACHIEVED = 0.77
"""Of a GPU's dense bf16 rate that large products reach: A100 83%, H100 77%, B200 66% (published
tables of matrix products)."""

SECONDS = 0.4
"""Of multiplying, for each rank."""


def checked_links(options: TrainOptions, layout: Layout, *, joined: bool = False) -> Links | None:
    """The links that were asked for; None without.

    Raises:
        OptionError: links, GPU or domains that cannot be; or ranks that cannot feel any.
    """
    if options.emulate_links is None:
        return None
    from hocket.catalogue.hardware import gpu

    links = Links.parse(options.emulate_links)
    found = gpu(links.gpu)
    if not half_rate(found):
        raise OptionError(
            f"{found.name} has no rate in half precision to scale to", hint="--emulate-links pcie4"
        )
    if options.device == "cuda" or options.backend == "nccl":
        raise OptionError(
            "--emulate-links emulates links between CPU ranks; GPUs use their own links",
            hint="--device cpu",
        )
    if options.device == "auto":
        from hocket.launch.launcher import cuda_shows

        if cuda_shows():
            raise OptionError(
                "--emulate-links emulates links between CPU ranks, and this machine has GPUs",
                hint="--device cpu",
            )
    if layout.data_parallel == "threads":
        raise OptionError(
            "--emulate-links joins ranks, and data_parallel=threads has one",
            hint="--data-parallel processes",
        )
    if joined:
        raise OptionError(
            "--emulate-links needs ranks that hocket starts on one machine; another launcher "
            "started these",
            hint="run it without torchrun",
        )
    links.check(layout.world_size)
    return dataclasses.replace(links, gpu=found.name)


def settled(launcher: Launcher, spec: RunSpec) -> RunSpec:
    """The spec with its links' scale, measured if it was not given."""
    links = checked_links(spec.options, spec.layout)
    if links is None:
        return spec
    if links.scale is None:
        links = dataclasses.replace(links, scale=scale(launcher, spec, links))
    options = dataclasses.replace(spec.options, emulate_links=str(links))
    return dataclasses.replace(spec, options=options)


def settle_links(launcher: Launcher, folder: RunFolder, spec: RunSpec) -> RunSpec:
    """As `settled`, written into the run folder where that changed it."""
    found = settled(launcher, spec)
    if found != spec:
        folder.save(found)
    return found


def scale(launcher: Launcher, spec: RunSpec, links: Links) -> float:
    """How many times faster the GPU multiplies than a rank of this job, to three digits."""
    from hocket.catalogue.hardware import gpu
    from hocket.runtime.host_cores import usable_cores

    rates: list[float] = []

    def hear(event: dict[str, Any]) -> None:
        if event["event"] == "rate":
            rates.append(event["rate"])

    layout, workload = spec.layout, spec.workload
    rows = workload.global_batch // layout.dp // (layout.microbatches or 1)
    hidden = spec.config.get("hidden_size") or spec.config.get("n_embd") or 256
    launcher.run(
        "hocket.ranks.links:measure_links",
        layout.world_size,
        {
            "tokens": min(rows * workload.seq_len, 4096),
            "hidden": int(hidden),
            "tp": layout.tp,
            "dtype": workload.dtype,
            "seconds": SECONDS,
        },
        hear,
    )
    share = min(1.0, usable_cores() / (layout.world_size * spec.options.threads))
    mine = statistics.median(rates) * share
    return float(f"{ACHIEVED * half_rate(gpu(links.gpu)) / mine:.3g}")


def half_rate(gpu: Gpu) -> float:
    """Its dense rate in bf16, or in fp16 where it is older than that; 0 without either."""
    return gpu.flops.get("bf16") or gpu.flops.get("fp16") or 0.0
