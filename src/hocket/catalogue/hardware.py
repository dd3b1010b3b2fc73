"""Hardware by name: GPUs, nodes and clusters from data files, each figure with its source.

    gpu("H100")                     the first entry that has these parts in its name
    node("DGX-H100")                with the GPU it is sold with; node("aws-p5", gpu("H200"))
    cluster("2x8xH100-SXM")         two nodes of eight
    cluster("16xA100-40-PCIe")      sixteen GPUs, on as few of the GPU's nodes as hold them
    cluster("4xaws-p5")             four nodes of a catalogue's kind
    cluster("4x8xH200@aws-p5en")    a kind of node, and the GPU in it
    cluster("mine.toml")            a machine of one's own (see `machine_file`)

All bandwidths are bytes per second per direction.
"""

from __future__ import annotations

import csv
import dataclasses
import difflib
import functools
import os
import re
import statistics
import tomllib
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from hocket.catalogue import machine_file
from hocket.spec.cluster import Cluster, Gpu, Node
from hocket.spec.errors import OptionError, unknown
from hocket.spec.units import parse_bandwidth


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quote:
    """One price that was read: dollars per GPU and hour."""

    gpu: str
    dollars: float
    provider: str
    product: str
    tier: str
    region: str
    date: str
    source: str


def gpu_names() -> tuple[str, ...]:
    """Every GPU, in the order in which parts of a name are looked up."""
    return tuple(_gpus())


def node_names() -> tuple[str, ...]:
    return tuple(_tables("nodes"))


def gpu(name: str) -> Gpu:
    """A GPU by its name, an alias, or parts of them in any order.

    Raises:
        OptionError: no entry has these parts; the nearest name is suggested.
    """
    wanted = _parts(name)
    for entry in _gpus().values():
        if any(wanted == _parts(known) for known in (entry.name, *entry.aliases)):
            return entry
    for entry in _gpus().values():
        if wanted and any(wanted <= _parts(known) for known in (entry.name, *entry.aliases)):
            return entry
    raise _unknown("GPU", name, gpu_names())


def nvlink_rate(name: str) -> float | None:
    """Bytes/s each way of one NVLink, None without. Raises OptionError as `gpu`."""
    own = _own_links(gpu(name).name)
    return parse_bandwidth(own["bandwidth"]) / int(own["links"]) if own.get("links") else None


def capability(name: str) -> tuple[int, int] | None:
    """CUDA compute capability of a GPU, None of other accelerators. Raises OptionError as `gpu`."""
    text = _tables("gpus")[gpu(name).name].get("capability")
    if text is None:
        return None
    major, minor = str(text).split(".")
    return int(major), int(minor)


@functools.cache
def quotes(name: str) -> tuple[Quote, ...]:
    """Every dated price of a GPU. Raises OptionError as `gpu`."""
    return tuple(quote for quote in _quotes() if quote.gpu == gpu(name).name)


def node(name: str, device: Gpu | None = None, num_gpus: int | None = None) -> Node:
    """A node of the catalogue.

    Args:
        name: `DGX-H100`, `aws-p5`.
        device: the GPU in it, where it is sold with several; None: the first.
        num_gpus: fewer than the node holds, with its share of the network cards; None: all.

    Raises:
        OptionError: an unknown name, a GPU that this node is not sold with, or too many of them.
    """
    key = _node_key(name)
    if key is None:
        raise _unknown("node", name, node_names())
    table = _tables("nodes")[key]
    device = gpu(table["gpus"][0]) if device is None else device
    if device.name not in table["gpus"]:
        raise OptionError(
            f"{key} is not sold with {device.name}, but with {', '.join(table['gpus'])}",
            hint=f"one of: {', '.join(_nodes_of(device.name))}",
        )
    most = int(table["num_gpus"])
    count = most if num_gpus is None else num_gpus
    if not 1 <= count <= most:
        raise _crowded(key, device, most, count)
    nics = max(1, int(table["nics"]) * count // most)
    values = {k: v for k, v in table.items() if k not in ("aliases", "gpus", "unverified", "note")}
    values |= {"num_gpus": count, "nics": nics, "pcie": _pcie(device.name)}
    found = machine_file.node_of(values, device, links=_own_links(device.name), name=key)
    return dataclasses.replace(
        found,
        host_memory=found.host_memory * count // most,
        host_bandwidth=found.host_bandwidth * count / most,
    )


def cluster(text: str) -> Cluster:
    """A cluster from its text form or a TOML file.

    Raises:
        OptionError: text that is none of the forms, unknown names (with the nearest), more GPUs
            than a node holds, or a file that is not there or that `machine_file` refuses.
    """
    if is_file(text):
        return _read(text)
    if "," in text:
        raise OptionError(
            f"{text!r} names several clusters; a training step is planned on one at a time",
            hint=f"--cluster {text.partition(',')[0].strip()}",
        )
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise OptionError(f"{text!r} is not a cluster", hint="2x8xH100-SXM, 16xA100-40-PCIe")
    first, second, name, kind = match.groups()
    turned = re.fullmatch(r"(.+)x(\d+)", name)
    if not second and turned is not None and _is_gpu(turned[1]):
        raise OptionError(
            f"{text!r} names a GPU before its number", hint=f"--cluster {turned[2]}x{turned[1]}"
        )
    if kind is None and not _is_gpu(name) and _node_key(name) is not None:
        if second is not None:
            raise OptionError(
                f"{name} is a kind of node; {text!r} counts its GPUs as well",
                hint=f"{first}x{name}",
            )
        return _named(int(first or 1), node(name))
    if kind is None and not _is_gpu(name):
        raise _unknown("GPU or node", name, (*gpu_names(), *node_names()), text.strip())
    device = gpu(name)
    kind = _nodes_of(device.name)[0] if kind is None else kind
    whole = node(kind, device)
    if second is not None:
        if int(second) > whole.num_gpus:
            raise _crowded(whole.name, device, whole.num_gpus, int(second), nodes=int(first))
        return _named(int(first), node(kind, device, int(second)))
    total = int(first or 1)
    if total < 1:
        raise OptionError(f"{text!r} has no GPU", hint=f"--cluster 8x{device.name}")
    if total > whole.num_gpus and total % whole.num_gpus:
        raise OptionError(
            f"{total} {device.name} do not fill nodes of {whole.num_gpus}",
            hint=_spread(total, whole.num_gpus, device.name),
        )
    per_node = min(total, whole.num_gpus)
    return _named(total // per_node, node(kind, device, per_node))


_FORM = re.compile(r"(?:(\d{1,9})x)?(?:(\d{1,9})x)?([^@]+?)(?:@(.+))?")
"""Nodes, GPUs of each (or GPUs alone), the GPU or node, a kind of node."""


def is_file(text: str) -> bool:
    """Whether the text of a cluster means a file, by its ending or because one is there. What has
    a name of the catalogue does not."""
    if text.endswith(".toml"):
        return True
    match = _FORM.fullmatch(text.strip())
    if match is None or "," in text or match[4] or _is_gpu(match[3]) or _node_key(match[3]):
        return False
    return os.sep in text or os.path.exists(text) or re.search(r"\.[a-z]+$", text) is not None


def _read(file: str) -> Cluster:
    """Raises OptionError as `cluster`."""
    if os.path.isdir(file):
        raise OptionError(
            f"{file} is a folder; a cluster is a file of hocket probe --out",
            hint=f"--cluster {os.path.join(file, 'cluster.toml')}",
        )
    if not os.path.isfile(file):
        raise OptionError(
            f"there is no file {file}",
            hint=f"hocket probe --out {file}, or --cluster 8xH100-SXM-80",
        )
    try:
        written = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{file} cannot be read: {error}", hint=machine_file.HINT) from None
    return machine_file.read_cluster(written, gpu=gpu, node=node, origin=file)


def to_toml(cluster: Cluster) -> str:
    """The TOML form of a cluster; `cluster` of that file is equal to it."""
    return machine_file.cluster_toml(cluster)


def _named(num_nodes: int, node: Node) -> Cluster:
    if num_nodes < 1:
        raise OptionError("a cluster needs at least one node", hint=f"1x{node.name}")
    name = f"{num_nodes}x{node.num_gpus}x{node.gpu.name}"
    if node.name != _nodes_of(node.gpu.name)[0]:
        name += f"@{node.name}"
    return Cluster(name=name, num_nodes=num_nodes, node=node)


def _crowded(kind: str, device: Gpu, most: int, count: int, nodes: int = 1) -> OptionError:
    return OptionError(
        f"a node {kind} holds {most} {device.name}, not {count}",
        hint=_spread(nodes * count or most, most, device.name),
    )


def _spread(count: int, most: int, name: str) -> str:
    per_node = max((n for n in range(1, most + 1) if count % n == 0), default=1)
    return f"{count // per_node}x{per_node}x{name}"


def _is_gpu(name: str) -> bool:
    try:
        gpu(name)
    except OptionError:
        return False
    return True


def _unknown(kind: str, name: str, choices: Iterable[str], text: str | None = None) -> OptionError:
    """The error of an unknown name, the nearest ones in it; `text` is the cluster that has it."""
    spellings: dict[str, str] = {}
    for option in choices:  # the first entry that begins so: `h10o` is near `h100`
        parts = option.lower().split("-")
        for end in range(1, len(parts) + 1):
            spellings.setdefault("-".join(parts[:end]), option)
    found = difflib.get_close_matches(name.lower(), list(spellings), n=6, cutoff=0.5)
    near = list(dict.fromkeys(spellings[spelling] for spelling in found))[:3]
    listed = "hocket models --gpus lists all"
    where = "" if text in (None, name) else f" in {text!r}"
    if not near:
        return OptionError(f"unknown {kind} {name!r}{where}", hint=listed)
    first = near[0] if text is None else text.replace(name, near[0])
    return OptionError(
        f"unknown {kind} {name!r}{where}; the nearest are {', '.join(near)} ({listed})",
        hint=f"did you mean {first!r}?",
    )


@functools.cache
def _parts(name: str) -> frozenset[str]:
    """`NVIDIA A100-SXM4-80GB` -> {a100, sxm, 80}."""
    text = re.sub(r"\b(nvidia|geforce|tesla|amd|instinct)\b", " ", name.lower())
    text = re.sub(r"\brtx[\s_-]*((?:pro|a)?)[\s_-]*(?=[a0-9])", r"rtx\1", text)
    text = re.sub(r"sxm\d", "sxm", text)
    text = re.sub(r"(\d)\s*gb\b", r"\1", text)
    return frozenset(part for part in re.split(r"[\s_/-]+", text) if part)


def _node_key(name: str) -> str | None:
    for key, table in _tables("nodes").items():
        if name.lower() in (key.lower(), *(alias.lower() for alias in table.get("aliases", ()))):
            return key
    return None


def _nodes_of(name: str) -> list[str]:
    found = [key for key, table in _tables("nodes").items() if name in table["gpus"]]
    assert found, f"no node of the catalogue holds {name}"
    return found


@functools.cache
def _tables(file: str) -> dict[str, dict[str, Any]]:
    data = resources.files("hocket.catalogue") / "data" / "hardware" / f"{file}.toml"
    return tomllib.loads(data.read_text())


@functools.cache
def _gpus() -> dict[str, Gpu]:
    found = {}
    for name, table in _tables("gpus").items():
        entry = machine_file.gpu_of({k: v for k, v in table.items() if k not in _NOTES}, name)
        prices = sorted((q for q in _quotes() if q.gpu == name), key=lambda q: _day(q.date))
        entry = _with_quotes(entry, prices, "all")
        short = tuple(n.removeprefix("RTX") for n in (name, *entry.aliases) if n.startswith("RTX"))
        found[name] = dataclasses.replace(entry, aliases=(*entry.aliases, *short))
    return found


HYPERSCALERS = ("AWS", "Azure", "GCP")
SPECIALISTS = (
    "CoreWeave", "Crusoe", "Hyperstack", "Lambda", "Modal", "Nebius", "Together", "Verda",
    "Voltage Park",
)  # fmt: skip
PRICE_LISTS: dict[str, tuple[str, ...] | None] = {
    "all": None, "hyperscaler": HYPERSCALERS, "specialist": SPECIALISTS,
}  # fmt: skip
"""Providers of each list; None: all, marketplaces of other people's machines among them."""


def with_prices(cluster: Cluster, price_list: str) -> Cluster:
    """The cluster at the prices of one list; a price of its own file stays.

    Raises:
        OptionError: an unknown list.
    """
    if price_list not in PRICE_LISTS:
        message, hint = unknown("price list", price_list, PRICE_LISTS)
        raise OptionError(f"--price-list: {message}", hint=hint)
    device = cluster.node.gpu
    known = _gpus().get(device.name)
    if known is None or (device.price, device.price_source) != (known.price, known.price_source):
        return cluster
    found = _with_quotes(dataclasses.replace(device, price=None), quotes(device.name), price_list)
    return dataclasses.replace(cluster, node=dataclasses.replace(cluster.node, gpu=found))


def _with_quotes(entry: Gpu, prices: Iterable[Quote], price_list: str) -> Gpu:
    """A GPU with the median of a list's on-demand quotes, their range and their dates; without a
    price, and a source that says so, where the list has none."""
    providers = PRICE_LISTS[price_list]
    found = sorted(
        (
            quote
            for quote in prices
            if quote.tier.startswith("on-demand")
            and (providers is None or quote.provider in providers)
        ),
        key=lambda quote: _day(quote.date),
    )
    which = "" if providers is None else f"{price_list} "
    if not found:
        return dataclasses.replace(
            entry, price=None, price_source=f"no {which}on-demand quote was read"
        )
    dollars = [quote.dollars for quote in found]
    spread = f", {min(dollars):g} to {max(dollars):g}" if len(found) > 1 else ""
    dates = " to ".join(dict.fromkeys((found[0].date, found[-1].date)))
    noun = "quotes" if len(found) > 1 else "quote"
    return dataclasses.replace(
        entry,
        price=round(statistics.median(dollars), 4),
        price_source=f"median of {len(found)} {which}on-demand {noun} read {dates}{spread}",
    )


def price_text(device: Gpu) -> str:
    """The price of a GPU and its source, or that there is none."""
    if device.price is None:
        return f"no price for {device.name}: {device.price_source or 'none was given'}"
    source = f", {device.price_source}" if device.price_source else ""
    return f"{device.name} at {device.price:g} an hour{source}"


def _day(date: str) -> str:
    """A date for sorting: `2026-Q1` stands for the first day of its first month."""
    year, quarter, count = date.partition("-Q")
    return f"{year}-{3 * int(count) - 2:02d}-01" if quarter else date


_NOTES = ("architecture", "capability", "pcie", "watts", "unverified", "note")


def _pcie(name: str) -> str:
    return str(_tables("gpus")[name].get("pcie", {}).get("bandwidth", "31.5 GB/s"))


def _own_links(name: str) -> dict[str, Any]:
    """What a node's links are where its entry leaves them to the GPU."""
    return dict(_tables("gpus")[name].get("nvlink", {}))


@functools.cache
def _quotes() -> tuple[Quote, ...]:
    data = resources.files("hocket.catalogue") / "data" / "hardware" / "prices.csv"
    return tuple(
        Quote(
            gpu=row["gpu"],
            dollars=float(row["dollars_per_gpu_hour"]),
            provider=row["provider"],
            product=row["product"],
            tier=row["tier"],
            region=row["region"],
            date=row["date_read"],
            source=row["source"],
        )
        for row in csv.DictReader(data.read_text().splitlines())
    )
