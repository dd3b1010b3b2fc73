"""A machine as TOML: what the catalogue is written in, and what a user writes for one's own.

    num_nodes = 2
    gpu = "H100-SXM-80"             # or a table [gpu] of one's own
    node = "DGX-H100"               # or a table:

    [node]
    num_gpus = 8
    network = "400 Gb/s"            # of ONE card; Gb are bits, GB are bytes
    nics = 8
    pcie = "63 GB/s"                # per GPU and direction
    link = { kind = "nvswitch", domain = 8, bandwidth = "450 GB/s", generation = 4 }

    [measured]                      # what `hocket probe` measured on this very machine

Every quantity carries its unit. Bandwidths are per direction: figures that can only be the sum of
both directions, or bits taken for bytes, are refused.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hocket.catalogue import measured_file
from hocket.spec.cluster import LINKS, PRECISIONS, Cluster, Gpu, Link, Node
from hocket.spec.errors import OptionError, unknown
from hocket.spec.measured import Measured
from hocket.spec.units import parse_bandwidth, parse_bytes, parse_flops

_NVLINK = {1: 80e9, 2: 150e9, 3: 300e9, 4: 450e9, 5: 900e9, 6: 1800e9}
"""Bytes/s per GPU and direction with all links of a generation."""

_FASTEST_PCIE = 121e9
_FASTEST_CARD = 200e9
_MOST = 10**7
_FASTEST_GPU = 1e18
_FASTEST_MEMORY = 1e15

_GPU = ("name", "flops", "memory", "usable", "bandwidth", "sms", "l2", "nvlink", "price",
        "price_source", "source", "vendor", "aliases")  # fmt: skip
_NODE = ("name", "num_gpus", "link", "pcie", "network", "nics", "host_memory", "source")
_LINK = ("kind", "bandwidth", "domain", "generation")
_CLUSTER = ("name", "num_nodes", "gpu", "node", "measured")


def read(
    text: str,
    *,
    gpu: Callable[[str], Gpu],
    node: Callable[..., Node],
    origin: str = "machine",
) -> Cluster:
    """A cluster from TOML.

    Args:
        text: the file's text.
        gpu, node: the catalogue, for entries given by name.
        origin: its name where it gives none.

    Raises:
        OptionError: not TOML, unknown or missing keys, missing or impossible units.
    """
    try:
        table = tomllib.loads(text)
    # Not only its own error: numbers of a million digits, and tables a thousand deep.
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{origin} is not TOML: {error}") from None
    _check(table, _CLUSTER, "cluster", needed=("node",))
    device: Any = table.get("gpu")
    if isinstance(device, str):
        device = gpu(device)
    elif device is not None:
        _check(device, _GPU, "gpu")
        least = _LEAST_OF_A_CORE if _is_cpu(table["node"]) else _LEAST_OF_A_GPU
        device = gpu_of(device, str(device.get("name", origin)), least=least)
    if isinstance(table["node"], str):
        found = node(table["node"], device)
    elif device is None:
        raise OptionError(f"{origin} says no gpu", hint='gpu = "H100-SXM-80"')
    else:
        found = node_of(table["node"], device, links={}, name="")
    num_nodes = _count(table, "num_nodes", 1)
    if num_nodes > 1 and found.network <= 0:
        raise OptionError(
            f"{num_nodes} nodes need a network between them; {origin} says 0",
            hint='network = "100 Gb/s"',
        )
    return Cluster(
        name=str(table.get("name", origin)),
        num_nodes=num_nodes,
        node=found,
        measured=Measured.from_dict(table["measured"]) if "measured" in table else None,
    )


_LEAST_OF_A_GPU = 2**30
_LEAST_OF_A_CORE = 2**24
"""Bytes of memory: a core's is its share of the machine's."""


def _is_cpu(node: Any) -> bool:
    link = node.get("link") if isinstance(node, Mapping) else None
    return isinstance(link, Mapping) and link.get("kind") == "shared-memory"


def gpu_of(table: Mapping[str, Any], name: str, *, least: int = _LEAST_OF_A_GPU) -> Gpu:
    """A GPU from its table, with at least so many bytes. Raises OptionError as `read`."""
    _check(table, _GPU, f"GPU {name}", needed=("flops", "memory", "bandwidth"))
    if not isinstance(table["flops"], Mapping) or not table["flops"]:
        raise OptionError(
            f"flops of GPU {name} is {table['flops']!r}; it is a rate for each precision",
            hint='flops = { bf16 = "989 TFLOP/s" }',
        )
    for precision in table["flops"]:
        if precision not in PRECISIONS:
            message, hint = unknown("precision", precision, PRECISIONS)
            raise OptionError(message, hint=hint)
    memory = parse_bytes(str(table["memory"]))
    nvlink = table.get("nvlink", 0)
    generation = nvlink.get("generation", 0) if isinstance(nvlink, Mapping) else nvlink
    usable = parse_bytes(str(table["usable"])) if "usable" in table else round(0.98 * memory)
    if not least <= memory <= 2**46:
        raise OptionError(f"{table['memory']} of memory on one GPU cannot be", hint="80 GB")
    if not 0 < usable <= 1.1 * memory:  # 80 GB are sold, 81,559 MiB are there
        raise OptionError(f"usable {table['usable']} of {table['memory']} of memory cannot be")
    return Gpu(
        name=name,
        flops={
            p: _rate(parse_flops(str(rate)), _FASTEST_GPU, f"flops {p}", rate)
            for p, rate in table["flops"].items()
        },
        memory=memory,
        usable=usable,
        bandwidth=_rate(
            parse_bandwidth(str(table["bandwidth"])),
            _FASTEST_MEMORY,
            "bandwidth",
            table["bandwidth"],
        ),
        sms=_count(table, "sms", 0, least=0),
        l2=parse_bytes(str(table["l2"])) if "l2" in table else 0,
        nvlink=_count({"nvlink": generation}, "nvlink", 0, least=0),
        price=_price(table["price"]) if "price" in table else None,
        price_source=str(table.get("price_source", "")),
        source=str(table.get("source", "")),
        vendor=str(table.get("vendor", "")),
        aliases=_names(table.get("aliases", [])),
    )


def _rate(value: float, most: float, what: str, said: object) -> float:
    if not 0 < value <= most:
        raise OptionError(f"{what} of {said} cannot be", hint=f"above 0, at most {most:g}")
    return value


def _price(said: object) -> float:
    right = isinstance(said, int | float) and not isinstance(said, bool)
    if not right or not 0 <= float(said) < 1e6:  # type: ignore[arg-type]
        raise OptionError(f"price is {said!r}; it must be dollars per GPU and hour", hint="2.99")
    return float(said)  # type: ignore[arg-type]


def _names(said: object) -> tuple[str, ...]:
    if not isinstance(said, list) or not all(isinstance(one, str) for one in said):
        raise OptionError(f"aliases is {said!r}; it must be a list of names")
    return tuple(said)


def node_of(table: Mapping[str, Any], gpu: Gpu, *, links: Mapping[str, Any], name: str) -> Node:
    """A node from its table; `links` are the GPU's own, for what its link leaves out.

    Raises OptionError as `read`.
    """
    what = f"node {name}" if name else "node"
    _check(table, _NODE, what, needed=("num_gpus", "link", "pcie", "network", "nics"))
    pcie = parse_bandwidth(str(table["pcie"]))
    _at_most(pcie, _FASTEST_PCIE, "pcie", table["pcie"], "is that both directions, or bits?")
    card = parse_bandwidth(str(table["network"]))
    _at_most(card, _FASTEST_CARD, "network", table["network"], "cards are sold in Gb/s: bits")
    if pcie == 0 and not _is_cpu(table):
        raise OptionError(f"pcie of {table['pcie']} cannot be", hint='pcie = "31.5 GB/s"')
    nics = _count(table, "nics", 1)
    return Node(
        gpu=gpu,
        num_gpus=_count(table, "num_gpus", 1),
        link=_link(table["link"], pcie, links),
        pcie=pcie,
        network=card * nics,
        nics=nics,
        host_memory=parse_bytes(str(table["host_memory"])) if "host_memory" in table else 0,
        name=name or str(table.get("name", "")),
        source=str(table.get("source", "")),
    )


def _link(table: Mapping[str, Any], pcie: float, own: Mapping[str, Any]) -> Link:
    _check(table, _LINK, "link", needed=("kind", "domain"))
    kind = str(table["kind"])
    if kind not in LINKS:
        message, hint = unknown("kind of link", kind, LINKS)
        raise OptionError(message, hint=hint)
    nvidia = kind.startswith("nv") or (kind == "full-mesh" and bool(own))
    known = own.get("generation", 0) if nvidia else 0
    generation = _count(table, "generation", known, least=0)
    default = own.get("bandwidth") if nvidia else (0.0 if kind == "none" else pcie)
    said = table.get("bandwidth", default)
    if said is None:
        raise OptionError(f"a link of kind {kind} needs its bandwidth", hint='"450 GB/s"')
    bandwidth = said if isinstance(said, float) else parse_bandwidth(str(said))
    if not math.isfinite(bandwidth) or (bandwidth <= 0 and kind != "none"):
        raise OptionError(f"a link of {said} cannot be", hint='bandwidth = "450 GB/s"')
    if nvidia and generation in _NVLINK:
        most = _NVLINK[generation]
        why = f"{most / 1e9:g} GB/s each way; is {said} the sum of both directions?"
        _at_most(bandwidth, most, f"NVLink {generation}", said, why)
    if kind.startswith("pcie"):
        _at_most(bandwidth, _FASTEST_PCIE, "pcie", said, "is that both directions, or bits?")
    return Link(
        kind=kind,
        bandwidth=bandwidth,
        domain=_count(table, "domain", 1),
        generation=generation,
    )


def write(cluster: Cluster) -> str:
    """The TOML that `read` turns into an equal cluster."""
    gpu, node = cluster.node.gpu, cluster.node
    lines = [f"name = {json.dumps(cluster.name)}", f"num_nodes = {cluster.num_nodes}"]
    rates = ", ".join(f'{p} = "{_exact(rate, "FLOP/s")}"' for p, rate in gpu.flops.items())
    lines += [
        "",
        "[gpu]",
        f"name = {json.dumps(gpu.name)}",
        f"flops = {{ {rates} }}",
        f'memory = "{gpu.memory} B"',
        f'usable = "{gpu.usable} B"',
        f'bandwidth = "{_exact(gpu.bandwidth, "B/s")}"',
        f"sms = {gpu.sms}",
        f'l2 = "{gpu.l2} B"',
        f"nvlink = {gpu.nvlink}",
    ]
    if gpu.price is not None:
        lines.append(f"price = {gpu.price!r}")
    for key in ("price_source", "source", "vendor"):
        if getattr(gpu, key):
            lines.append(f"{key} = {json.dumps(getattr(gpu, key))}")
    if gpu.aliases:
        lines.append(f"aliases = {json.dumps(list(gpu.aliases))}")
    link = node.link
    card = _exact(node.network / node.nics, "B/s")
    lines += [
        "",
        "[node]",
        *([f"name = {json.dumps(node.name)}"] if node.name else []),
        f"num_gpus = {node.num_gpus}",
        f'pcie = "{_exact(node.pcie, "B/s")}"',
        f'network = "{card}"',
        f"nics = {node.nics}",
        f'host_memory = "{node.host_memory} B"',
        *([f"source = {json.dumps(node.source)}"] if node.source else []),
        f'link = {{ kind = "{link.kind}", bandwidth = "{_exact(link.bandwidth, "B/s")}", '
        f"domain = {link.domain}, generation = {link.generation} }}",
        "",
    ]
    if cluster.measured is not None:
        lines.append(measured_file.write(cluster.measured))
    return "\n".join(lines)


def _exact(value: float, unit: str) -> str:
    for prefix, size in (("T", 1e12), ("G", 1e9)):
        text = f"{value / size:.12g}"
        if value >= size and float(text) * size == value:
            return f"{text} {prefix}{unit}"
    return f"{value!r} {unit}" if math.isfinite(value) else f"0 {unit}"


def _check(table: Any, keys: Iterable[str], what: str, *, needed: Iterable[str] = ()) -> None:
    if not isinstance(table, Mapping):
        raise OptionError(f"{what} is {table!r}; it must be a table")
    for key in table:
        if key not in keys:
            message, hint = unknown(f"key of {what}", key, keys)
            raise OptionError(message, hint=hint)
    missing = [key for key in needed if key not in table]
    if missing:
        raise OptionError(f"{what} says no {', '.join(missing)}")


def _count(table: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
    value = table.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{key} is {value!r}; it must be a whole number of at least {least}")
    if value > _MOST:
        raise OptionError(f"{key} is {str(value)[:20]}; no cluster has that many")
    return value


def _at_most(value: float, most: float, what: str, said: object, why: str) -> None:
    if value > 1.05 * most:
        raise OptionError(f"{what} of {said} per direction cannot be", hint=why)
