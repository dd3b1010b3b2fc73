"""A machine as TOML: what the catalogue is written in, and what a user writes for one's own.

    num_nodes = 2
    gpu = "H100-SXM-80"             # or a table [gpu] of one's own
    node = "DGX-H100"               # or a table:

    [node]
    num_gpus = 8
    network = "400 Gb/s"            # of ONE card; Gb are bits, GB are bytes
    nics = 8
    pcie = "63 GB/s"                # per GPU and direction
    host_memory = "2048 GiB"        # with host_bandwidth: what offloading is estimated by
    host_bandwidth = "614.4 GB/s"   # of all sockets together
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
from hocket.spec.measured import MachineMeasurements
from hocket.spec.units import parse_bandwidth, parse_bytes, parse_flops

_NVLINK = {1: 80e9, 2: 150e9, 3: 300e9, 4: 450e9, 5: 900e9, 6: 1800e9}
"""Bytes/s per GPU and direction with all links of a generation."""

_FASTEST_PCIE = 121e9
_FASTEST_CARD = 200e9
_FASTEST_MEMORY = 100e12
_FASTEST_HOST = 10e12
_FASTEST_PRODUCTS = 1e18
_MOST = 10**6
"""Of anything that is counted."""

_GPU = ("name", "flops", "memory", "usable", "bandwidth", "sms", "l2", "nvlink", "price",
        "price_source", "source", "vendor", "aliases")  # fmt: skip
_NODE = ("name", "num_gpus", "link", "pcie", "network", "nics", "host_memory", "host_bandwidth",
         "source")  # fmt: skip
_LINK = ("kind", "bandwidth", "domain", "generation")
_CLUSTER = ("name", "num_nodes", "gpu", "node", "measured")


HINT = "hocket probe --out cluster.toml, or --cluster 8xH100-SXM-80"
"""For a file that is no cluster."""


def read_cluster(
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
        raise OptionError(
            f"{origin} is not TOML, in which a cluster is written: {error}", hint=HINT
        ) from None
    _check(table, _CLUSTER, "cluster")
    if "node" not in table:
        raise OptionError(f"{origin} is not a cluster: it has no node", hint='node = "DGX-H100"')
    device: Any = table.get("gpu")
    if isinstance(device, str):
        device = gpu(device)
    elif isinstance(device, Mapping):
        least = _LEAST_OF_A_CORE if _is_cpu(table["node"]) else _LEAST_OF_A_GPU
        device = gpu_of(device, _text(device, "name", origin), least=least)
    elif device is not None:
        raise OptionError(f"gpu is {device!r}; it is a name or a table", hint='gpu = "H100-SXM-80"')
    if isinstance(table["node"], str):
        found = node(table["node"], device)
    elif device is None:
        raise OptionError(f"{origin} has no gpu", hint='gpu = "H100-SXM-80"')
    else:
        found = node_of(table["node"], device, links={}, name="")
    num_nodes = _count(table, "num_nodes", 1)
    if num_nodes > 1 and found.network <= 0:
        raise OptionError(
            f"{num_nodes} nodes need a network between them; {origin} has 0",
            hint='network = "100 Gb/s"',
        )
    return Cluster(
        name=_text(table, "name", origin),
        num_nodes=num_nodes,
        node=found,
        measured=MachineMeasurements.from_dict(table["measured"]) if "measured" in table else None,
    )


_LEAST_OF_A_GPU = 2**30
_LEAST_OF_A_CORE = 2**24
"""Bytes of memory: a core's is its share of the machine's."""


def _is_cpu(node: Any) -> bool:
    link = node.get("link") if isinstance(node, Mapping) else None
    return isinstance(link, Mapping) and link.get("kind") == "shared-memory"


def gpu_of(table: Mapping[str, Any], name: str, *, least: int = _LEAST_OF_A_GPU) -> Gpu:
    """A GPU from its table, with at least so many bytes. Raises OptionError as `read_cluster`."""
    _check(table, _GPU, f"GPU {name}", needed=("flops", "memory", "bandwidth"))
    if not isinstance(table["flops"], Mapping) or not table["flops"]:
        raise OptionError(
            f"flops of GPU {name} is {table['flops']!r}; it is a rate for each precision",
            hint='flops = { bf16 = "989 TFLOP/s" }',
        )
    _check(table["flops"], PRECISIONS, "flops")
    flops = {p: parse_flops(str(rate)) for p, rate in table["flops"].items()}
    for precision, rate in flops.items():
        _within(rate, _FASTEST_PRODUCTS, f"{precision} of GPU {name}", table["flops"][precision])
    memory = parse_bytes(str(table["memory"]))
    nvlink = table.get("nvlink", 0)
    generation = _generation(nvlink if isinstance(nvlink, Mapping) else {"generation": nvlink}, 0)
    usable = parse_bytes(str(table["usable"])) if "usable" in table else round(0.98 * memory)
    if not least <= memory <= 2**46:
        raise OptionError(f"{table['memory']} of memory on one GPU cannot be", hint="80 GB")
    if not 2**20 <= usable <= 1.1 * memory:  # 40 GB cards give 40 GiB
        raise OptionError(f"usable is {table['usable']}, of {table['memory']} on the card")
    bandwidth = parse_bandwidth(str(table["bandwidth"]))
    _within(bandwidth, _FASTEST_MEMORY, f"bandwidth of GPU {name}", table["bandwidth"])
    return Gpu(
        name=name,
        flops=flops,
        memory=memory,
        usable=usable,
        bandwidth=bandwidth,
        sms=_count(table, "sms", 0, least=0),
        l2=parse_bytes(str(table["l2"])) if "l2" in table else 0,
        nvlink=generation,
        price=_dollars(table["price"]) if "price" in table else None,
        price_source=str(table.get("price_source", "")),
        source=str(table.get("source", "")),
        vendor=str(table.get("vendor", "")),
        aliases=_names(table.get("aliases", ())),
    )


def node_of(table: Mapping[str, Any], gpu: Gpu, *, links: Mapping[str, Any], name: str) -> Node:
    """A node from its table; `links` are the GPU's own, for what its link leaves out.

    Raises OptionError as `read_cluster`.
    """
    what = f"node {name}" if name else "node"
    _check(table, _NODE, what, needed=("num_gpus", "link", "pcie", "network", "nics"))
    pcie = parse_bandwidth(str(table["pcie"]))
    if pcie or not _is_cpu(table):
        _within(pcie, _FASTEST_PCIE, "pcie", table["pcie"], "is that both directions, or bits?")
    card = parse_bandwidth(str(table["network"]))
    if card:  # a machine of its own has none
        _within(card, _FASTEST_CARD, "network", table["network"], "cards are sold in Gb/s: bits")
    nics = _count(table, "nics", 1)
    return Node(
        gpu=gpu,
        num_gpus=_count(table, "num_gpus", 1),
        link=_link(table["link"], pcie, links),
        pcie=pcie,
        network=card * nics,
        nics=nics,
        host_memory=parse_bytes(str(table["host_memory"])) if "host_memory" in table else 0,
        host_bandwidth=_host_bandwidth(table),
        name=name or str(table.get("name", "")),
        source=str(table.get("source", "")),
    )


def _host_bandwidth(table: Mapping[str, Any]) -> float:
    """Bytes/s of the host's memory; 0 where it is not stated."""
    if "host_bandwidth" not in table:
        return 0.0
    found = parse_bandwidth(str(table["host_bandwidth"]))
    if found:
        _within(found, _FASTEST_HOST, "host_bandwidth", table["host_bandwidth"])
    return found


def _link(table: Mapping[str, Any], pcie: float, own: Mapping[str, Any]) -> Link:
    _check(table, _LINK, "link", needed=("kind", "domain"))
    kind = str(table["kind"])
    if kind not in LINKS:
        message, hint = unknown("kind of link", kind, LINKS)
        raise OptionError(message, hint=hint)
    nvidia = kind.startswith("nv") or (kind == "full-mesh" and bool(own))
    generation = _generation(table, int(own.get("generation", 0)) if nvidia else 0)
    default = own.get("bandwidth") if nvidia else (0.0 if kind == "none" else pcie)
    said = table.get("bandwidth", default)
    if said is None:
        raise OptionError(f"a link of kind {kind} needs its bandwidth", hint='"450 GB/s"')
    written = "bandwidth" in table or isinstance(said, str)
    bandwidth = parse_bandwidth(str(said)) if written else float(said)
    if kind != "none":
        _within(bandwidth, max(_NVLINK.values()), f"a link of kind {kind}", said)
    if nvidia and generation in _NVLINK:
        most = _NVLINK[generation]
        why = f"{most / 1e9:g} GB/s each way; is {said} the sum of both directions?"
        _within(bandwidth, most, f"NVLink {generation}", said, why)
    if kind.startswith("pcie"):
        _within(bandwidth, _FASTEST_PCIE, "pcie", said, "is that both directions, or bits?")
    return Link(
        kind=kind,
        bandwidth=bandwidth,
        domain=_count(table, "domain", 1),
        generation=generation,
    )


def cluster_toml(cluster: Cluster) -> str:
    """The TOML that `read_cluster` turns into an equal cluster."""
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
        f'host_bandwidth = "{_exact(node.host_bandwidth, "B/s")}"',
        *([f"source = {json.dumps(node.source)}"] if node.source else []),
        f'link = {{ kind = "{link.kind}", bandwidth = "{_exact(link.bandwidth, "B/s")}", '
        f"domain = {link.domain}, generation = {link.generation} }}",
        "",
    ]
    if cluster.measured is not None:
        lines.append(measured_file.measured_toml(cluster.measured))
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
        raise OptionError(f"{what} has no {', '.join(missing)}")


def _count(table: Mapping[str, Any], key: str, default: int, least: int = 1) -> int:
    value = table.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise OptionError(f"{key} is {value!r}; it must be a whole number of at least {least}")
    if value > _MOST:
        raise OptionError(f"{key} is {value:,}; at most {_MOST:,} can be")
    return value


def _generation(table: Mapping[str, Any], default: int) -> int:
    """Of NVLink; 0 for none."""
    value = table.get("generation", default)
    if isinstance(value, bool) or value not in (0, *_NVLINK):
        known = ", ".join(map(str, _NVLINK))
        raise OptionError(f"NVLink generation {value!r} is unknown; known: 0 for none, {known}")
    return int(value)


def _text(table: Mapping[str, Any], key: str, default: str) -> str:
    value = table.get(key, default)
    if not isinstance(value, str) or not value.isprintable():
        raise OptionError(f"{key} is {value!r}; it must be text of one line")
    return value


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise OptionError(f"aliases are {value!r}; they must be a list of names")
    return tuple(value)


def _dollars(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MOST:
        raise OptionError(
            f"price is {value!r}; it must be dollars for a GPU and hour", hint="price = 2.5"
        )
    return float(value)


def _within(value: float, most: float, what: str, said: object, why: str | None = None) -> None:
    """Raises OptionError for a rate of nothing, and for one that no hardware has."""
    if not 0 < value <= 1.05 * most:
        each = " per direction" if why else ""
        raise OptionError(f"{what} of {said}{each} cannot be", hint=why)
