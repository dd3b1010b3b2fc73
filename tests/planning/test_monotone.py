"""A device that is at least as good in every number is not slower, in training and in serving."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from hocket.catalogue import hardware, shapes
from hocket.catalogue.curves import curves_of
from hocket.cost.constants import constants_file, fitted_family
from hocket.cost.serving import serving_prices
from hocket.planning.plan import best_layouts
from hocket.planning.problem import Problem
from hocket.spec.cluster import LINKS, Cluster, Node
from tests.rotation import part

GPUS = 16

CASES = (
    ("llama-3-8b", "bf16", "megatron-core"),
    ("gpt2", "fp16", "megatron"),
    ("llama-3-8b", "fp8", "nemo"),
    ("qwen3-30b-a3b", "bf16", "fsdp"),
    ("llama-3-8b", "fp32", "deepspeed"),
    ("mixtral-8x7b", "bf16", "fsdp-triton"),
)


def machines() -> dict[str, Cluster]:
    """Sixteen of every device of the catalogue, in the first kind of node that holds it."""
    found = {}
    for name in hardware.gpu_names():
        whole = hardware.cluster(f"1x{name}").node
        node = hardware.node(whole.name, hardware.gpu(name))
        if node.num_gpus > GPUS:
            node = hardware.node(whole.name, hardware.gpu(name), GPUS)
        count = GPUS // node.num_gpus
        found[name] = Cluster(name=f"{count}x{name}", num_nodes=count, node=node)
    return found


def at_least(one: Cluster, other: Cluster) -> bool:
    """Whether `one` is no worse than `other` in any number of the catalogue."""
    a, b = one.node, other.node
    return (
        all(a.gpu.flops.get(p, 0.0) >= rate for p, rate in b.gpu.flops.items())
        and a.gpu.usable >= b.gpu.usable
        and a.gpu.bandwidth >= b.gpu.bandwidth
        and LINKS.index(a.link.kind) <= LINKS.index(b.link.kind)
        and a.link.bandwidth >= b.link.bandwidth
        and a.num_gpus >= b.num_gpus
        and one.domain >= other.domain
        and a.network / a.num_gpus >= b.network / b.num_gpus
        and a.pcie >= b.pcie
    )


def fastest(cluster: Cluster, model: str, precision: str, stack: str) -> float:
    """Seconds of the best layout that fits."""
    problem = Problem(
        shape=shapes.shape(model), cluster=cluster, seq_len=2048, global_batch=16,
        precision=precision, stack=stack,
    )  # fmt: skip
    layouts = legal(model)
    fits = problem.high_memory(layouts) <= problem.usable
    return float(np.where(fits, problem.times(layouts).step, np.inf).min())


@functools.cache
def legal(model: str):  # type: ignore[no-untyped-def]
    some = Problem(
        shape=shapes.shape(model), cluster=hardware.cluster("2x8xH100-SXM"), seq_len=2048,
        global_batch=16,
    )  # fmt: skip
    return some.legal(GPUS, pins={"cp": 1})


@pytest.mark.parametrize(("model", "precision", "stack"), part(CASES, 3))
def test_no_better_device_trains_slower(model: str, precision: str, stack: str) -> None:
    known = {n: c for n, c in machines().items() if precision in c.node.gpu.flops}
    seconds = {n: fastest(c, model, precision, stack) for n, c in known.items()}
    pairs = [(a, b) for a in known for b in known if a != b and at_least(known[a], known[b])]
    assert len(pairs) > 40
    slower = [(a, b) for a, b in pairs if seconds[a] > seconds[b] * (1 + 1e-6)]
    assert not slower


def service(node: Node, precision: str) -> tuple[float, float]:
    """Seconds of a prompt and of a decode step on the fastest number of tensor ranks."""
    found = [
        serving_prices(
            shapes.shape("llama-3-8b"),
            Cluster(name="", num_nodes=1, node=node),
            tp=tp,
            precision=precision,
            curves=curves_of(node),
        )
        for tp in (1, 2, 4, 8)
        if tp <= node.num_gpus
    ]
    prompt = min(float(one.prefill_seconds(2048)[0]) for one in found)
    return prompt, min(float(one.decode_seconds(64, 2048)[0]) for one in found)


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_no_better_device_serves_slower(precision: str) -> None:
    known = {n: c for n, c in machines().items() if "bf16" in c.node.gpu.flops}
    seconds = {n: service(c.node, precision) for n, c in known.items()}
    pairs = [(a, b) for a in known for b in known if a != b and at_least(known[a], known[b])]
    slower = [
        (a, b, what)
        for a, b in pairs
        for i, what in enumerate(("prompt", "decode"))
        if seconds[a][i] > seconds[b][i] * (1 + 1e-6)
    ]
    assert not slower


def improved(node: Node, field: str) -> Node:
    """The node with one number a third better."""
    gpu, more = node.gpu, 4 / 3
    if field == "flops":
        rates = {p: rate * more for p, rate in gpu.flops.items()}
        return dataclasses.replace(node, gpu=dataclasses.replace(gpu, flops=rates))
    if field == "bandwidth":
        faster = dataclasses.replace(gpu, bandwidth=gpu.bandwidth * more)
        return dataclasses.replace(node, gpu=faster)
    if field == "memory":
        larger = dataclasses.replace(gpu, usable=round(gpu.usable * more))
        return dataclasses.replace(node, gpu=larger)
    if field == "network":
        return dataclasses.replace(node, network=node.network * more)
    assert field == "link"
    return dataclasses.replace(
        node, link=dataclasses.replace(node.link, bandwidth=node.link.bandwidth * more)
    )


@pytest.mark.parametrize("field", ["flops", "bandwidth", "memory", "network", "link"])
@pytest.mark.parametrize("device", part(["H100-SXM-80", "MI300X-192", "A100-PCIe-80"], 3))
def test_one_better_number_never_slows_the_best_plan(device: str, field: str) -> None:
    cluster = machines()[device]
    other = dataclasses.replace(cluster, node=improved(cluster.node, field))
    before = fastest(cluster, "llama-3-8b", "bf16", "megatron-core")
    assert fastest(other, "llama-3-8b", "bf16", "megatron-core") <= before * (1 + 1e-9)


def test_an_h200_is_not_slower_than_an_h100_as_the_user_asks() -> None:
    def seconds(device: str) -> float:
        problem = Problem(
            shape=shapes.shape("llama-3-8b"), cluster=hardware.cluster(f"8x8x{device}"),
            seq_len=4096, global_batch=64,
        )  # fmt: skip
        return best_layouts(problem, top=1).best.step_seconds.median

    assert seconds("H200-SXM") < seconds("H100-SXM")


def test_every_device_names_the_family_whose_constants_it_takes() -> None:
    data = constants_file()
    for name in hardware.gpu_names():
        family = name.partition("-")[0]
        assert fitted_family(name) in data["gpus"]
        problem = Problem(
            shape=shapes.shape("gpt2"), cluster=machines()[name], seq_len=128, global_batch=16,
            precision=next(iter(hardware.gpu(name).flops)),
        )  # fmt: skip
        own = family in data["gpus"]
        assert problem.borrowed == (None if own else fitted_family(name))
    near = {"H200-SXM-141": "H100", "H800-SXM-80": "H100", "L40S-48": "A100", "T4-16": "V100"}
    assert {name: fitted_family(name) for name in near} == near


@pytest.mark.parametrize("stack", part(["megatron-core", "hocket", "fsdp"], 2))
@pytest.mark.parametrize(
    ("switched", "joined"),
    [
        ("A100-SXM-40", "A100-PCIe-40"),
        ("H100-SXM-80", "H100-PCIe-80"),
        ("H200-SXM-141", "H200-NVL-141"),
        *((f"{gpu}@pcie-switch", f"{gpu}@pcie") for gpu in ("L40S-48", "RTX5090-32")),
    ],
)
def test_no_layout_is_slower_behind_a_switch_than_without_one(
    switched: str, joined: str, stack: str
) -> None:
    """Of links without a measurement a rate above the switch's would be a guess in their favour."""
    known = {name: hardware.cluster(f"2x8x{name}") for name in (switched, joined)}
    assert at_least(known[switched], known[joined])
    layouts = legal("llama-3-8b")
    behind, over = (
        Problem(
            shape=shapes.shape("llama-3-8b"), cluster=known[name], seq_len=2048, global_batch=16,
            stack=stack,
        ).times(layouts).step
        for name in (switched, joined)
    )  # fmt: skip
    assert (behind <= over * (1 + 1e-9)).all()
