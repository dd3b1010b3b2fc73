"""Rehearsal matrix: tiny models under every schedule, layout and option, rehearsed on fake GPUs.

    Case               one job: a model, a layout (with its schedule) and an option
    RehearsalCell      what its rehearsal found
    RehearsalMatrix    the cells, and what they come to

`CASES` is the whole matrix; a part of it is chosen by index. Cells have a JSON form with an exact
inverse.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from hocket.spec.files import parse_json

OK, REJECTED, HANGS, DIFFERENT, CRASHED = OUTCOMES = (
    "ok", "rejected", "hangs", "different", "crashed",
)  # fmt: skip

MODELS = ("tiny-llama", "tiny-gpt2", "tiny-mixtral", "tiny-gemma3")
"""Of the catalogue: grouped-query attention; a fused query/key/value matrix and learned positions;
experts; sliding windows and tied embeddings."""

LAYERS = 4
"""Layers of a model, where no more are needed to fill the stages."""

SEQ_LEN, ROWS = 64, 2
"""Tokens of a sequence, and sequences of a microbatch on one data rank."""

MEMORY = 0.05
"""How far predicted peak memory may be from the rehearsed peak, as a fraction of it."""

HOST_STEPS = {"optimizer": 1, "params": 4}
"""Offloaded kind to the waits of a step that it needs: an optimizer on the host waits for the
gradients, and of offloaded parameters the host computes the norm, too. Experts over ranks take one
a forward of a layer: the sizes of uneven all-to-alls. Any other job has none."""

SCHEDULES = ("sequential", "gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v")
TWO_STAGES = ("interleaved", "zb-v")
"""Schedules that are given two stages on each rank."""

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {},
    "fp32": {"dtype": "fp32"},
    "fp8": {"dtype": "fp8"},
    "recompute=selective": {"recompute": "selective"},
    "recompute=full": {"recompute": "full"},
    "recompute=norm+activation": {"recompute": "norm+activation"},
    "offload=optimizer": {"offload": "optimizer"},
    "offload=activations": {"offload": "activations"},
    "dropout": {"dropout": 0.1},
    "lora": {"lora_rank": 4},
    "offload=params": {"offload": "params"},
    "compile": {"compile": True},
}
"""Option to the fields of a request that it sets; bf16 wherever it names no other dtype. Parameters
are offloaded under ZeRO-3 alone."""

ONE_EACH = ("recompute=norm+activation", "compile")
"""Options that each schedule of a pipeline is under once, next to those that go round."""

FLAT = (
    "dp2", "dp2:zero=1", "dp2:microbatches=2,zero=2", "dp2:microbatches=2,zero=3", "tp2",
    "tp2:sequence_parallel=true",
)  # fmt: skip
"""Layouts without a pipeline: each under every option."""

PIPELINED = (
    "pp2", "pp2.tp2", "pp2.tp2:sequence_parallel=true", "dp2.pp2:zero=1", "dp2.pp2:zero=2",
    "dp2.pp2:zero=3", "dp2.pp2.tp2:sequence_parallel=true,zero=3",
)  # fmt: skip
"""Layouts with a pipeline: each under every schedule, with an option that goes round."""

MORE = (
    "dp2.pp2", "dp2.pp2.tp2:zero=1", "dp2.pp2.tp2:zero=2",
    "dp2.pp4.tp2:sequence_parallel=true,zero=1", "pp4", "pp4.tp2", "dp2.pp4:zero=2", "pp8",
    "pp8.tp2", "dp2.pp8:zero=3",
)  # fmt: skip
"""More of them, deeper ones too, for the first model."""


CONTEXT, CONTEXT_PIPELINED = ("cp2", "cp2:zero=1"), ("pp2.cp2",)
"""Layouts that split sequences, without a pipeline and with one, for every model."""

EXPERTS, EXPERTS_PIPELINED = ("dp2.ep2", "dp2.tp2.ep4.etp1"), ("dp2.pp2.ep2",)
"""Layouts that place experts over ranks, for `WITH_EXPERTS`."""

WITH_EXPERTS = "tiny-mixtral"


def flat_layouts(model: str) -> tuple[str, ...]:
    """The layouts without a pipeline that a model is under."""
    return (*FLAT, *CONTEXT, *(EXPERTS if model == WITH_EXPERTS else ()))


def pipelined_layouts(model: str) -> tuple[str, ...]:
    """The layouts with a pipeline that a model is under."""
    more = MORE if model == MODELS[0] else ()
    experts = EXPERTS_PIPELINED if model == WITH_EXPERTS else ()
    return (*PIPELINED, *more, *CONTEXT_PIPELINED, *experts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixJob:
    """One job of the matrix.

    Attributes:
        model: a name of the catalogue.
        layout: axes and ZeRO, as a layout's text without schedule and microbatches of a pipeline.
        schedule: its name; "" without a pipeline.
        option: a key of `OPTIONS`.
    """

    model: str
    layout: str
    schedule: str
    option: str

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        from hocket.spec.layout import Layout

        return Layout.parse(self.layout).pp * (2 if self.schedule in TWO_STAGES else 1)

    def request(self) -> dict[str, Any]:
        """The job by the names of the flags; `layers` and `rows` are the rehearsal's own."""
        from hocket.spec.layout import Layout

        fields: dict[str, Any] = {}
        if self.schedule:
            pp = Layout.parse(self.layout).pp
            fields = {"schedule": self.schedule, "microbatches": max(4, pp)}
            if self.schedule in TWO_STAGES:
                fields["virtual_stages"] = 2
        given = {"dtype": "bf16", **fields, **OPTIONS[self.option]}
        return {"model": self.model, "layout": self.layout, "seq_len": SEQ_LEN, **given}

    def command(self) -> str:
        """The command line that rehearses this job alone."""
        flags = {**self.request(), "rows": ROWS, "layers": max(LAYERS, self.stages)}
        model = flags.pop("model")
        words = [
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")
            for name, value in flags.items()
        ]
        return f"hocket rehearse {model} {' '.join(words)}"


def matrix_jobs() -> Iterator[MatrixJob]:
    """The whole matrix.

    Each layout without a pipeline is under every option; each with a pipeline is under every
    schedule, and its option is the next one from cell to cell, so that the first model is under
    every schedule with every option, and of the others each under most.
    """
    options = [name for name in OPTIONS if name not in ("offload=params", *ONE_EACH)]
    for index, model in enumerate(MODELS):
        for layout in flat_layouts(model):
            for option in OPTIONS:
                if option != "offload=params" or "zero=3" in layout:
                    yield MatrixJob(model=model, layout=layout, schedule="", option=option)
        for row, layout in enumerate(pipelined_layouts(model)):
            for column, schedule in enumerate(SCHEDULES):
                option = options[(row + column + index) % len(options)]
                yield MatrixJob(model=model, layout=layout, schedule=schedule, option=option)
        for option in ONE_EACH:
            for layout, schedule in zip(PIPELINED, SCHEDULES, strict=False):
                yield MatrixJob(model=model, layout=layout, schedule=schedule, option=option)


CASES = tuple(matrix_jobs())


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearsalCell:
    """What the rehearsal of one case found.

    Attributes:
        case: the job.
        outcome: `ok`; `rejected` before a rank is executed, for the `reason`; `hangs` under one of
            NCCL's rules; `different`: host reads, collectives or memory, the reason has the
            numbers; `crashed`: a rank raised.
        memory: of the rank whose peak the prediction misses most: predicted / rehearsed - 1. None:
            nothing was predicted or executed.
        ranks: of the job. executed: of them, the others being equal to one of these.
        seconds: that the rehearsal took.
    """

    case: MatrixJob
    outcome: str
    reason: str = ""
    memory: float | None = None
    ranks: int = 0
    executed: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        assert self.outcome in OUTCOMES, self.outcome

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RehearsalCell:
        """The inverse of `to_json`."""
        data = parse_json(text)
        return cls(**{**data, "case": MatrixJob(**data["case"])})


@dataclasses.dataclass(frozen=True, kw_only=True)
class RehearsalMatrix:
    """The cells, and what made them.

    Attributes:
        cells: in the order of `CASES`.
        versions: of what was run, by package. date: of the run, as in 2026-11-23.
        seconds: of the whole run.
    """

    cells: tuple[RehearsalCell, ...]
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    date: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every job that is not rejected completes as predicted."""
        found = self.outcomes()
        return bool(self.cells) and found[OK] + found[REJECTED] == len(self.cells)

    def outcomes(self) -> dict[str, int]:
        """Outcome to the number of cells."""
        counts = dict.fromkeys(OUTCOMES, 0)
        for cell in self.cells:
            counts[cell.outcome] += 1
        return counts

    def to_json(self) -> str:
        """What made the cells, on one line, without them."""
        return json.dumps(
            {"versions": dict(self.versions), "date": self.date, "seconds": round(self.seconds)}
        )
