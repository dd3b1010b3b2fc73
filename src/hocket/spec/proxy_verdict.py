"""Verdict: what a proxy model showed about an architecture, cached in the user's cache folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from hocket.spec import recompute
from hocket.spec.errors import ModelError
from hocket.spec.files import write_text
from hocket.spec.layout import Layout
from hocket.spec.legality import narrowed
from hocket.spec.user_cache import computed_file

_JUDGES = "models", "ranks", "runtime", "serving", "spec", "training"
"""Packages whose code decides whether a model can be cut, split, packed and served."""

_IRRELEVANT = (
    "_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache",
    "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip

RECOMPUTED = {"layers": "full", "cores": "core_attn", "feed_forward": "mlp"}
"""Fields of a verdict on recompute, each with the value that it is tried with."""


@dataclasses.dataclass(frozen=True)
class ProxyVerdict:
    """What the proxy model showed. Empty text: equal. None: not tried.

    Attributes:
        stages: why the model cannot be cut into stages.
        tensors: why its tensors cannot be split over ranks.
        slices: why they cannot be with sequence parallelism.
        context: why its sequences cannot be split over ranks.
        loss: why transformers' own loss of it is not computed.
        pages: why it cannot be served from a paged cache.
        packed: why documents that share a row would see each other.
        layers, cores, feed_forward: why its layers, their attention cores or their feed-forward
            layers cannot be recomputed.
        served: by layout of one replica, why it answers differently when it is served there.
        shifts: whether the model's own forward shifts its labels.
        note: blocks that tensor parallelism holds whole, and why.
    """

    stages: str | None = None
    tensors: str | None = None
    slices: str | None = None
    context: str | None = None
    loss: str | None = None
    pages: str | None = None
    packed: str | None = None
    layers: str | None = None
    cores: str | None = None
    feed_forward: str | None = None
    served: dict[str, str] = dataclasses.field(default_factory=dict)
    shifts: bool | None = None
    note: str = ""

    def missing(self, wanted: Iterable[str]) -> list[str]:
        """Of some parts, those that have not been tried."""
        return [part for part in wanted if getattr(self, part) is None]

    @property
    def ok(self) -> bool:
        """Whether everything that was tried came out equal."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Why not; empty where `ok`."""
        parts = ("stages", "tensors", "slices", "context", "loss", "pages", "packed")
        found = (getattr(self, part) for part in (*parts, *RECOMPUTED))
        return "; ".join(text for text in found if text)


def verdict_fields(
    layout: Layout, *, loss: bool = False, pages: bool = False, packed: bool = False
) -> list[str]:
    """Fields of a Verdict that have to be known before a layout is accepted."""
    wanted = {
        "stages": layout.num_stages > 1,
        "tensors": layout.tp > 1,
        "slices": layout.tp > 1 and layout.sequence_parallel,
        "context": layout.cp > 1,
        "loss": loss,
        "pages": pages,
        "packed": packed,
        "layers": layout.recompute != "none",
        "cores": "core_attn" in recompute.modules(layout.recompute),
        "feed_forward": "mlp" in recompute.modules(layout.recompute),
    }
    return [part for part, want in wanted.items() if want]


def reject(
    known: ProxyVerdict, wanted: Collection[str], layout: Layout, name: str, kind: str
) -> None:
    """Raise ModelError for the first part of `wanted` that came out different."""
    if "stages" in wanted and known.stages:
        raise ModelError(
            f"{name} ({kind}) cannot be cut into pipeline stages: {known.stages}",
            hint=layout.flag_with(pp=1, virtual_stages=1, pipeline_split="balanced"),
        )
    if "tensors" in wanted and known.tensors:
        raise ModelError(
            f"{name} ({kind}) cannot be split over tensor-parallel ranks: {known.tensors}",
            hint=narrowed(layout, tp=1, sequence_parallel=False).flag_with(),
        )
    if "slices" in wanted and known.slices:
        raise ModelError(
            f"{name} ({kind}) cannot run with sequence parallelism: {known.slices}",
            hint=layout.flag_with(sequence_parallel=False),
        )
    if "context" in wanted and known.context:
        raise ModelError(
            f"sequences of {name} ({kind}) cannot be split over cp: {known.context}",
            hint=narrowed(layout, cp=1).flag_with(),
        )
    if "loss" in wanted and known.loss:
        raise ModelError(f"{name} ({kind}) cannot be trained as it is configured: {known.loss}")
    if "pages" in wanted and known.pages:
        raise ModelError(known.pages)
    if "packed" in wanted and known.packed:
        raise ModelError(
            f"documents cannot share a row of {name} ({kind}) without seeing each other: "
            f"{known.packed}",
            hint="--packing none",
        )
    for part in RECOMPUTED:
        if part in wanted and (why := getattr(known, part)):
            raise ModelError(
                f"{name} ({kind}) cannot be trained with recompute={layout.recompute}: {why}",
                hint=f"--recompute {'none' if part == 'layers' else 'full'}",
            )


# --- the cache ---------------------------------------------------------------------------------


def verdict_file(config: Mapping[str, Any], attention: str) -> Path:
    """Where the verdict on a configuration is kept."""
    relevant = {key: value for key, value in config.items() if key not in _IRRELEVANT}
    return computed_file("proxy-checks", [relevant, attention], *_JUDGES)


def read_verdict(file: Path | None) -> ProxyVerdict:
    """The verdict in a file; an empty one where there is none."""
    if file is None:
        return ProxyVerdict()
    try:
        return ProxyVerdict(**json.loads(file.read_text()))
    except (OSError, ValueError, TypeError):  # none yet, or of another version: try again
        return ProxyVerdict()


def write_verdict(file: Path | None, found: ProxyVerdict) -> None:
    """Keep a verdict; a folder that cannot be written to is passed over."""
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, json.dumps(dataclasses.asdict(found)))
    except OSError:
        return  # a cache that cannot be written only costs the next run its second
