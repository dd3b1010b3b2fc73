"""ServingForecast and ServingMeasured: what a server is expected to do, and what it did.

forecast.json   the forecast of a server, in its run folder, or why there is none
measured.json   what its replicas counted: written again and again, and once more at the end

A *round* is the time in which every running request gets one token: the time per output token. It
is of one replica while the others are as busy.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Self, TypeVar

from hocket.spec.errors import OptionError, RunFolderError
from hocket.spec.files import MALFORMED, parse_json
from hocket.spec.forecast import Prediction
from hocket.spec.rows import require_types


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode:
    """One token for each of `batch` requests of `context` tokens: `seconds` of a round.

    `count`: rounds that were measured; 0 of a forecast.
    """

    batch: float
    context: float
    seconds: float
    count: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill:
    """Reading `tokens` of a prompt and nothing else: `seconds`. `count`: times it was measured."""

    tokens: float
    seconds: float
    count: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceLoad:
    """One replica under requests that arrive at random, `rate` a second.

    Seconds to the first token and for each further one, as percentiles; `tokens_per_second`: that
    it answers with; `batch`: requests that decode together, mean.
    """

    rate: float
    tokens_per_second: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p50: float
    tpot_p90: float
    tpot_p99: float
    batch: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Need:
    """Replicas that carry `rate` requests a second; `within_goals`: and meet the goals as well.

    None: no number that was tried does.
    """

    rate: float
    replicas: int | None
    within_goals: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConsideredServer:
    """A layout that was considered. Rates and seconds are of all its replicas together.

    Attributes:
        layout: text form. ranks: that it takes.
        tokens_per_second: answered with, at most. ttft, tpot: seconds of a request alone.
        cache_tokens: of one replica. fits: whether weights and cache do. chosen: whether it runs.
    """

    layout: str
    ranks: int
    tokens_per_second: float
    ttft: float
    tpot: float
    cache_tokens: int
    fits: bool = True
    chosen: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingForecast(Prediction):
    """What a server is expected to give.

    Attributes:
        decode, prefill: of one replica. tokens_per_second: that a replica answers with at most.
        prompt_len, output_len: of the requests that `loads` and `needs` are made of; ttft_ms,
            tpot_ms, percentile: the goals of `needs`.
        loads: one replica under load, lightest first. needs: replicas for a load.
        memory: for each rank of a replica, by `weights`, `step`, `cache`.
        cache_bytes: of one token on the peak rank. cache_tokens: that a replica holds.
        alternatives: what else was considered, best first.
    """

    decode: tuple[Decode, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    prompt_len: int = 0
    output_len: int = 0
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    percentile: int = 90
    loads: tuple[ServiceLoad, ...] = ()
    needs: tuple[Need, ...] = ()
    cache_bytes: int = 0
    cache_tokens: int = 0
    alternatives: tuple[ConsideredServer, ...] = ()

    def to_json(self) -> str:
        """A JSON form with an exact inverse."""
        return json.dumps({"serving": True, **dataclasses.asdict(self)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`. Raises RunFolderError for what is no such forecast."""
        rows = {"decode": Decode, "prefill": Prefill, "loads": ServiceLoad, "needs": Need}
        return _read(cls, text, {**rows, "alternatives": ConsideredServer}, ("memory", "notes"))


@dataclasses.dataclass(frozen=True)
class Percentiles:
    """Of one latency over the requests, in seconds."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0

    def at(self, percentile: int) -> float:
        """One of them by its number: 50, 90 or 99."""
        return float(getattr(self, f"p{percentile}"))

    def later(self, seconds: float) -> Percentiles:
        """Each later by so much."""
        return Percentiles(self.p50 + seconds, self.p90 + seconds, self.p99 + seconds)


_ATTENTION = ("kernel", "layers", "num_heads", "num_kv_heads", "key_size", "dtype", "block_size")
"""What each row of `ReplicaMeasured.attention` holds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaMeasured:
    """One replica. `starts`: of its ranks; `requests`: that were sent to it.

    `decode`, `prefill`: steps by what was in them; `cache_tokens`: that its cache holds; `memory`:
    bytes of each rank, `weights`, `cache` and what else it reports; `attention`: the kernel of each
    kind of layer of each stage, and why; `graphs`: of each rank, the captured decode steps;
    `counts`: its own counters.
    """

    number: int
    starts: int = 1
    requests: int = 0
    cache_tokens: int = 0
    decode: tuple[Decode, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    memory: tuple[dict[str, int], ...] = ()
    attention: tuple[dict[str, Any], ...] = ()
    graphs: tuple[dict[str, Any], ...] = ()
    counts: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingMeasured:
    """What a server did since it was ready.

    Attributes:
        seconds: that it has been ready for. start_seconds: from its start until then.
        requests: that ended with an answer. refused: sent away. failed: ended without, by a rank's
            death among others. restarts: of replicas.
        prompt_tokens, cached_tokens: read, and of those found in a cache. output_tokens: answered.
        busy_seconds: in which at least one request was there.
        ttft, tpot, end_to_end: of the newest requests.
        loads: what the requests met with, by how many came a second.
    """

    layout: str
    seconds: float = 0.0
    start_seconds: float = 0.0
    requests: int = 0
    refused: int = 0
    failed: int = 0
    restarts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    busy_seconds: float = 0.0
    ttft: Percentiles = Percentiles()
    tpot: Percentiles = Percentiles()
    end_to_end: Percentiles = Percentiles()
    loads: tuple[ServiceLoad, ...] = ()
    replicas: tuple[ReplicaMeasured, ...] = ()

    @property
    def tokens_per_second(self) -> float:
        """Answered with, while there was anything to answer."""
        return self.output_tokens / self.busy_seconds if self.busy_seconds > 0 else 0.0

    def to_json(self) -> str:
        """A JSON form with an exact inverse."""
        return json.dumps({"serving": True, **dataclasses.asdict(self)}, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`. Raises RunFolderError for what is nothing of the kind."""
        found = _read(
            cls, text, {"loads": ServiceLoad}, ("replicas",), ("ttft", "tpot", "end_to_end")
        )
        try:
            replicas = tuple(
                _row(
                    ReplicaMeasured,
                    {
                        **one,
                        "decode": tuple(_row(Decode, row) for row in one["decode"]),
                        "prefill": tuple(_row(Prefill, row) for row in one["prefill"]),
                        **{
                            key: _tables(one.get(key, ()), texts=key != "memory")
                            for key in ("memory", "attention", "graphs")
                        },
                    },
                )
                for one in found.replicas
            )
            for row in (row for one in replicas for row in one.attention):
                for name in _ATTENTION:
                    row[name]
        except (*MALFORMED, OptionError) as error:
            raise RunFolderError(f"measured.json cannot be read: {error}") from None
        return dataclasses.replace(found, replicas=replicas)


def _read(
    kind: Any,
    text: str,
    rows: dict[str, type],
    plain: tuple[str, ...],
    single: tuple[str, ...] = (),
) -> Any:
    try:
        data = parse_json(text)
        if not data.pop("serving", False):
            raise ValueError("it is not of a server")
        for name, row in rows.items():
            data[name] = tuple(_row(row, one) for one in data[name])
        for name in plain:
            data[name] = (
                tuple(map(str, data[name]))
                if name == "notes"
                else _tables(data[name], texts=name != "memory")
            )
        for name in single:
            data[name] = _row(Percentiles, data[name])
        return _row(kind, data)
    except (*MALFORMED, OptionError) as error:
        raise RunFolderError(f"{kind.__name__} cannot be read: {error}") from None


def _row(kind: type[Row], values: dict[str, Any]) -> Row:
    """A dataclass from a table, each plain value of its type and finite. Raises ValueError."""
    require_types(kind, values)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} is {value}")
    return kind(**values)


def _tables(rows: Any, *, texts: bool) -> tuple[dict[str, Any], ...]:
    """Tables by name; without `texts`, of counts alone. Raises ValueError."""
    found = tuple(dict(row) for row in rows)
    for row in () if texts else found:
        for name, value in row.items():
            if type(value) is not int or not 0 <= value < 2**63:
                raise ValueError(f"{name} is {value!r:.40}")
    return found


Row = TypeVar("Row")
