"""Measured: what was measured on one very machine, by `hocket probe`.

Seconds are medians of interleaved repeats; `spread` is the distance between the quartiles over
the median. Everything computes with `threads` CPU threads per rank (one GPU per rank on CUDA).
Bytes of a collective are those of the message on one rank, as `runtime.record` counts them: the
whole tensor for all-reduce, reduce-scatter (input), all-to-all (input) and send, the output for
all-gather. Rates are bytes or operations per second and direction.

    Host        the machine             Product   matrix products       Curve   collectives
    Device      its devices             Stream    memory by size        Line    their fit
    Pair        what joins two          Kernel    other operations      Update  optimizers
    Sharing     ranks that compute at once        Dispatch  overheads
    Pulse       how fast the machine was just then
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from typing import Any

from hocket.spec.errors import OptionError, unknown
from hocket.spec.files import parse_json
from hocket.spec.rows import (
    Count,
    Index,
    Rate,
    Seconds,
    Share,
    checked_value,
    from_row,
    from_table,
    to_row,
    to_table,
)

VERSION = 1

OPERATIONS = (
    *("send", "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "broadcast"),
    "sum",
)
"""What a curve can be of; `send` is the journey of one message between two ranks, `sum` an
all-reduce by the kernel of ranks that serve."""

FORMS = ("nt", "nn", "tn")
"""How a product's operands are stored: `nt` x [m, k] times w [n, k] transposed (a layer's forward),
`nn` g [m, k] times w [k, n] (the gradient of its input), `tn` g [k, m] transposed times x [k, n]
(the gradient of its weight)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """The machine.

    Attributes:
        cores: CPU cores that processes may use: affinity and cgroup limits counted.
        limit: cores' worth of time that a cgroup grants; 0 without a limit.
        caches: bytes of level 1 (data), 2 and 3 of one core; 0 where there is none.
        memory: bytes that processes may use. load: cores' worth of time that other programs took
            while it was measured. network: bytes/s each way of all its cards as they are sold,
            0 if unknown.
    """

    name: str
    cpu: str
    cores: Count
    sockets: Index = 0
    numa_nodes: Index = 0
    limit: Share = 0.0
    caches: tuple[Index, ...] = (0, 0, 0)
    memory: Index = 0
    load: Share = 0.0
    network: Share = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredDevice:
    """One device: a GPU, or the CPU as a whole.

    Attributes:
        nvlink: version, 0 without; links: how many NVLinks are active, of `links_total`.
        switch: whether its links lead to an NVSwitch.
        pcie: generation; width: lanes; pcie_rate: bytes/s each way. All 0 if unknown.
        numa: NUMA node, where `numa_known`.
        nics: network cards nearest to it.
    """

    index: Index
    name: str
    memory: Index
    nvlink: Index = 0
    links: Index = 0
    links_total: Index = 0
    switch: bool = False
    pcie: Index = 0
    width: Index = 0
    pcie_rate: Share = 0.0
    numa: Index = 0
    numa_known: bool = False
    bus: str = ""
    nics: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DevicePair:
    """What joins two devices (or two CPU cores).

    Attributes:
        path: as `nvidia-smi topo -m` writes it: NV12, PIX, PXB, PHB, NODE, SYS; `MEM` for cores.
        peer: whether one reads the other's memory itself.
        links: NVLinks between them.
        rate: bytes/s each way; latency: seconds of a small message.
        measured: whether rate and latency were measured; else they are the catalogue's, and a
            latency of 0 is unknown.
    """

    first: Index
    second: Index
    path: str
    peer: bool = False
    links: Index = 0
    rate: Share = 0.0
    latency: Share = 0.0
    measured: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredMatmul:
    """One matrix product: the result is [m, n], k is summed over; form as in `FORMS`."""

    dtype: str
    form: str
    m: Count
    n: Count
    k: Count
    seconds: Seconds
    spread: Share = 0.0

    @property
    def rate(self) -> float:
        """Operations/s."""
        return 2.0 * self.m * self.n * self.k / self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredStream:
    """Memory: `bytes` read and written together in one call of `operation`.

    `copy` reads and writes one tensor each, `add` reads two and writes one, `scale` rewrites one
    in place. A small working set lies in a cache, a large one does not. `forward` and `backward`
    are one call of those that a decoder layer makes between its products, on average, with what
    autograd and the code around it add: a forward's results are kept, as its backward needs them.
    """

    operation: str
    bytes: Count
    seconds: Seconds
    spread: Share = 0.0

    @property
    def rate(self) -> float:
        """Bytes/s."""
        return self.bytes / self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatch:
    """What one small operation costs whatever its size, in seconds.

    `forward`: run without autograd. `recorded`: run with autograd. `backward`: its share of the
    backward. `operation`: `add`, `linear`, `view`, `module` (an empty nn.Module called) ...
    """

    operation: str
    forward: Seconds
    recorded: Seconds
    backward: Share


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredKernel:
    """An operation that is neither product nor stream, by shape.

    `attention` [batch, heads, sequence, head size] causal, `cross-entropy` [tokens, vocabulary],
    `embedding` [tokens, vocabulary, hidden], `softmax`, `rms-norm`, `layer-norm`, `gelu`, `silu`
    [tokens, width].

    Of a CPU that serves, forward only (`backward` is 0), by the runtime's own kernels:

        rows      [rows, out, in, count]   a product of few rows, of `count` weights in turn
        half      the same, of weights in bf16 under fp32
        decode    [rows, heads, key/value heads, tokens, head size, layers]   rows that decode
                  attend to so many tokens each, in so many layers in turn
        call      [width]   a norm of next to nothing: what a call of a kernel costs
        chunk     [heads, key/value heads, tokens, head size]   tokens of one prompt attend to
                  those before them
    """

    name: str
    dtype: str
    shape: tuple[Count, ...]
    forward: Seconds
    backward: Share
    spread: Share = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """One step of an optimizer (`adamw`: PyTorch's fused one) over equal fp32 tensors.

    `elements` of all `tensors` together.
    """

    name: str
    elements: Count
    tensors: Count
    seconds: Seconds
    spread: Share = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
    """How many times longer each of `ranks` ranks takes when all compute at once, as one alone.

    `product`: matrix products that fit in a cache. `stream`: memory traffic that does not.
    `dispatch`: small operations. `step`: forward and backward of some layers, which is nearest to
    what ranks do; 0: unknown. `unlike`: the standard deviation among ranks of the processor time
    that the same steps took them, over its mean: ranks with the same work differ on a machine.
    """

    ranks: Count
    product: Rate
    stream: Rate
    dispatch: Rate
    step: Share = 0.0
    unlike: Share = 0.0


PULSES = ("product", "stream", "dispatch")
"""What a pulse is of: a product, memory traffic beyond the caches, small operations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pulse:
    """How fast the machine was while something else was measured: the same small work each time.

    A virtual machine's speed moves within seconds, by up to a third, with what its neighbours do.

    Attributes:
        part: what was measured meanwhile (`products` ...) or just before (`sharing` ...).
        operation: of `PULSES`. seconds: of one call. spread: of the samples.
    """

    part: str
    operation: str
    seconds: Seconds
    spread: Share = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatencyFit:
    """seconds = latency + bytes / rate, for messages of up to `bytes` (the last: for all above)."""

    bytes: Count
    latency: Share
    rate: Rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """One operation over one group size: message sizes in bytes, ascending, and seconds.

    Attributes:
        ranks: of one group.
        world: ranks of all groups that talked at once; `world // ranks` groups did. More of them
            than cores share the cores.
        spread: of each point.
        lines: the fit by regime. error: the median of its relative errors at points that were held
            out of it; worst: the largest.
        busy: processor seconds of one rank in one call, of each point: the mean over ranks, with
            the backend's own threads. The rest of `seconds` is waiting: for others to wake, for
            the wire, or for a core.
    """

    backend: str
    operation: str
    ranks: Count
    world: Count
    sizes: tuple[Count, ...]
    seconds: tuple[Seconds, ...]
    spread: tuple[Share, ...] = ()
    lines: tuple[LatencyFit, ...] = ()
    error: Share = 0.0
    worst: Share = 0.0
    busy: tuple[Share, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineMeasurements:
    """All of it.

    Attributes:
        device: `cpu` or `cuda`. date: ISO, UTC. torch, hocket: versions.
        quick: measured in the quick form. threads: CPU threads of each rank.
        unknown: what could not be measured, a sentence each; `catalogue`: what was taken from
            the catalogue instead.
    """

    device: str
    date: str
    torch: str
    hocket: str
    host: Host
    version: Count = VERSION
    quick: bool = False
    threads: Count = 1
    unknown: tuple[str, ...] = ()
    catalogue: tuple[str, ...] = ()
    devices: tuple[MeasuredDevice, ...] = ()
    pairs: tuple[DevicePair, ...] = ()
    products: tuple[MeasuredMatmul, ...] = ()
    streams: tuple[MeasuredStream, ...] = ()
    dispatch: tuple[Dispatch, ...] = ()
    kernels: tuple[MeasuredKernel, ...] = ()
    updates: tuple[Update, ...] = ()
    sharing: tuple[Sharing, ...] = ()
    curves: tuple[Curve, ...] = ()
    pulses: tuple[Pulse, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values: tables, and rows in the order of each word's fields."""
        found = {
            f.name: getattr(self, f.name)
            for f in dataclasses.fields(self)
            if f.name not in ("host", *_ROWS)
        }
        found |= {"unknown": list(self.unknown), "catalogue": list(self.catalogue)}
        found["host"] = to_table(self.host)
        for name in _ROWS:
            found[name] = to_rows(name, getattr(self, name))
        return found

    @classmethod
    def from_dict(cls, table: Any) -> MachineMeasurements:
        """The inverse of `to_dict`.

        Raises:
            OptionError: what is missing, unknown, or no number that a machine can have.
        """
        if not isinstance(table, Mapping):
            raise OptionError(f"measured is {table!r}; it must be a table")
        version = checked_value("Count", table.get("version", 0) or 1, "version of measured")
        if version != VERSION:
            raise OptionError(
                f"measured is of version {version}; this hocket reads version {VERSION}",
                hint="hocket probe --out cluster.toml",
            )
        known = {field.name: field for field in dataclasses.fields(cls)}
        for key in table:
            if key not in known:
                message, hint = unknown("key of measured", key, known)
                raise OptionError(message, hint=hint)
        missing = [
            n for n, f in known.items() if n not in table and f.default is dataclasses.MISSING
        ]
        if missing:
            raise OptionError(f"measured has no {', '.join(missing)}")
        values: dict[str, Any] = {}
        for name, value in table.items():
            if name == "host":
                values[name] = from_table(Host, value, "measured.host")
            elif name == "curves":
                values[name] = _curves(value)
            elif name in _ROWS:
                values[name] = _rows(name, value)
            else:
                values[name] = checked_value(str(known[name].type), value, f"{name} of measured")
        return cls(**values)

    def to_json(self) -> str:
        """A JSON form with an exact inverse."""
        return json.dumps(self.to_dict(), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> MachineMeasurements:
        """The inverse of `to_json`. Raises OptionError as `from_dict`."""
        try:
            return cls.from_dict(parse_json(text))
        except ValueError as error:
            raise OptionError(f"measured is not JSON: {error}") from None


_ROWS: dict[str, type] = {
    "devices": MeasuredDevice,
    "pairs": DevicePair,
    "products": MeasuredMatmul,
    "streams": MeasuredStream,
    "dispatch": Dispatch,
    "kernels": MeasuredKernel,
    "updates": Update,
    "sharing": Sharing,
    "curves": Curve,
    "pulses": Pulse,
}
_TABLES = ("devices", "curves")


def to_rows(name: str, values: Iterable[Any]) -> list[Any]:
    """Some `products`, `streams` ... as plain values, as in `MachineMeasurements.to_dict`."""
    if name not in _TABLES:
        return [to_row(value) for value in values]
    found = [to_table(value) for value in values]
    for table in found:
        if name == "curves":
            table["lines"] = [to_row(line) for line in table["lines"]]
    return found


def fields_of(name: str) -> tuple[str, ...]:
    """What the values of a row of `products`, `streams` ... are, in their order."""
    return tuple(field.name for field in dataclasses.fields(_ROWS[name]))


def _list(value: Any, what: str) -> Iterable[tuple[str, Any]]:
    if not isinstance(value, list | tuple):
        raise OptionError(f"{what} is {value!r}; it must be a list")
    return [(f"{what}[{number}]", one) for number, one in enumerate(value)]


def _rows(name: str, value: Any) -> tuple[Any, ...]:
    read = from_table if name in _TABLES else from_row
    found: tuple[Any, ...] = tuple(
        read(_ROWS[name], row, what) for what, row in _list(value, f"measured.{name}")
    )
    for one in found:
        if isinstance(one, MeasuredMatmul) and one.form not in FORMS:
            message, hint = unknown("form of a matmul", one.form, FORMS)
            raise OptionError(message, hint=hint)
        if isinstance(one, Pulse) and one.operation not in PULSES:
            message, hint = unknown("operation of a pulse", one.operation, PULSES)
            raise OptionError(message, hint=hint)
    return found


def _curves(value: Any) -> tuple[Curve, ...]:
    found: list[Curve] = []
    for what, table in _list(value, "measured.curves"):
        if not isinstance(table, Mapping):
            raise OptionError(f"{what} is {table!r}; it must be a table")
        lines = _list(table.get("lines", ()), f"lines of {what}")
        plain = {key: one for key, one in table.items() if key != "lines"}
        curve = dataclasses.replace(
            from_table(Curve, plain, what),
            lines=tuple(from_row(LatencyFit, row, where) for where, row in lines),
        )
        if curve.operation not in OPERATIONS:
            message, hint = unknown("operation of a curve", curve.operation, OPERATIONS)
            raise OptionError(message, hint=hint)
        if not curve.sizes or len(curve.sizes) != len(curve.seconds):
            raise OptionError(
                f"{what} has {len(curve.sizes)} sizes and {len(curve.seconds)} seconds; "
                "each size needs its seconds"
            )
        if any(a >= b for a, b in zip(curve.sizes, curve.sizes[1:], strict=False)):
            raise OptionError(f"sizes of {what} do not ascend: {list(curve.sizes)}")
        if curve.ranks > curve.world or curve.world % curve.ranks:
            raise OptionError(f"{what}: groups of {curve.ranks} do not fill {curve.world} ranks")
        found.append(curve)
    return tuple(found)
