"""Configuration: what a file of another tool says of a layout, and what it leaves open."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hocket.spec.errors import OptionError
from hocket.spec.layout import Layout

LARGEST_FILE = 256 * 1024
"""Bytes of a configuration that is read."""

MOST_DEGREE = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolConfiguration:
    """What a file says; None or an absent field: it says nothing.

    Attributes:
        tool: that it is for, as `--emit` takes it.
        fields: of `Layout`, without dp.
        instances: copies of a ZeRO state, each shared by as many data ranks.
        data_ranks: dp, where the file says it. world: GPUs, likewise.
        microbatch, global_batch: sequences. seq_len: tokens.
        accumulation: microbatches of a data rank and step.
        layers_per_stage: where the number of stages follows from the model's layers.
        edges: layers that embedding and head count as, where stages follow from them all.
        model: the tool's name of the model; precision: of matrix products.
        predictions: layers for multi-token prediction.
        quantization: of a server's weights, as `planning.service.stored` names it.
        server: its other options, as `jobs.serving.plan.serve_plan` takes them.
        unread: keys that have no meaning here, with their values. notes: what a reader should know.
    """

    tool: str
    fields: Mapping[str, Any]
    instances: int = 1
    data_ranks: int | None = None
    world: int | None = None
    microbatch: int | None = None
    accumulation: int | None = None
    layers_per_stage: int | None = None
    edges: tuple[int, int] | None = None
    global_batch: int | None = None
    seq_len: int | None = None
    model: str | None = None
    precision: str | None = None
    predictions: int = 0
    quantization: str | None = None
    server: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def layout(self, gpus: int, global_batch: int | None, layers: int | None = None) -> Layout:
        """The layout on so many GPUs, of a model of so many layers.

        Raises:
            OptionError: degrees that do not divide the GPUs, a batch or layers that do not divide.
            LayoutError: values that no layout has.
        """
        others = 1
        for axis in ("tp", "pp", "cp"):
            others *= int(self.fields.get(axis, 1))
        data = self.data_ranks if self.data_ranks is not None else gpus // others
        if data < 1 or data * others != gpus:
            raise OptionError(
                f"the configuration splits {data} x {others} ways, and the cluster has {gpus} GPUs",
                hint=f"--cluster with {max(1, data) * others} GPUs",
            )
        count = self.accumulation
        if self.microbatch is not None and global_batch is not None:
            count, rest = divmod(global_batch, self.microbatch * data)
            if rest or not count:
                raise OptionError(
                    f"a global batch of {global_batch} is not a multiple of {self.microbatch} "
                    f"sequences x {data} data ranks",
                    hint=f"--global-batch {self.microbatch * data}",
                )
        fields = dict(self.fields)
        pp = int(fields.get("pp", 1))
        if self.edges is not None and layers is not None and pp > 1:
            fields |= self._stages(layers, pp, self.edges)
        elif self.layers_per_stage and layers is not None and pp > 1:
            stages, rest = divmod(layers, self.layers_per_stage)
            if rest or stages % pp:
                raise OptionError(
                    f"{layers} layers do not divide into stages of {self.layers_per_stage} over "
                    f"pp {pp}",
                )
            fields["virtual_stages"] = stages // pp
        if self.instances > 1:
            fields["shard"] = data // self.instances
        if fields.get("shard") == data or not fields.get("zero"):
            fields.pop("shard", None)
        return Layout(dp=data, microbatches=count, **fields)

    def _stages(self, layers: int, pp: int, edges: tuple[int, int]) -> dict[str, Any]:
        """The cut of torchtitan's `generate_llm_fqn_per_model_part`: layers with what embedding and
        head count as are dealt evenly, the first stages have one more. Raises OptionError."""
        virtual, whole = int(self.fields.get("virtual_stages", 1)), layers + sum(edges)
        each = self.layers_per_stage
        stages = pp * virtual if each is None else math.ceil(whole / each)
        asked = f"pipeline_parallel_layers_per_stage {each} of {layers} layers + {sum(edges)}"
        if stages % pp or (virtual == 1) != (stages == pp):
            rule = "one stage a rank" if virtual == 1 else "two stages a rank or more"
            raise OptionError(
                f"{asked} makes {stages} stages over pp {pp}; {self.fields.get('schedule')} needs "
                f"{rule}, as many on each",
                hint="leave it out, or a number that divides so",
            )
        even, more = divmod(whole, stages)
        cut = [even + (stage < more) for stage in range(stages)]
        cut[0], cut[-1] = cut[0] - edges[0], cut[-1] - edges[1]
        if min(cut) < 0:
            raise OptionError(f"{stages} stages for {layers} layers leave one below zero: {cut}")
        return {"pipeline_split": tuple(cut), "virtual_stages": stages // pp}


def whole_number(value: object, key: str, *, least: int = 1) -> int:
    """A whole number of a file. Raises OptionError for anything else, or too large a one."""
    if isinstance(value, str) and re.fullmatch(r" *-?[0-9]{1,18} *", value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= 10**12:
        raise OptionError(f"{key} is {str(value)[:60]!r}; it must be a whole number")
    return value


def degree(value: object, key: str) -> int:
    """As `whole_number`, of a degree of parallelism."""
    found = whole_number(value, key)
    if found > MOST_DEGREE:
        raise OptionError(f"{key} is {found:,}; at most {MOST_DEGREE:,} is read")
    return found


def unread(found: Mapping[str, Any], used: Iterable[str]) -> tuple[str, ...]:
    """Keys that a reader did not use, with their values."""
    known = set(used)
    return tuple(f"{key} = {str(value)[:60]}" for key, value in found.items() if key not in known)


def not_a_layout(what: str) -> OptionError:
    """The error for what a tool can do and no layout has."""
    return OptionError(f"the configuration has {what}, which no layout here has")
