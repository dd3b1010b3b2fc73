"""Layout: where everything lives.

A layout says how many ways each thing is split, and which rank holds which part. Its text form
names the axes (`dp2.pp2.tp2`, in any order, an absent axis is 1) and, after a colon, every field
that differs from its default: `dp2.pp2:schedule=gpipe,microbatches=4`. Reading the text back
gives an equal layout.

World size = dp x pp x cp x tp. Expert parallelism reuses the ranks of one stage: ep x etp divides
dp x cp x tp, and what remains are copies of the experts (`dp4.tp2.ep8.etp1`; Liu et al. 2025, MoE
parallel folding, section 3).
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import re
from collections.abc import Mapping
from typing import Any

from hocket.spec import legality, recompute, renamed
from hocket.spec.errors import LayoutError, nearest, unknown
from hocket.spec.layout_hints import EXAMPLES, meant_layout

AXES = ("dp", "pp", "cp", "tp")
"""The mesh axes, in the order the text form prints them."""

DEGREES = (*AXES, "ep")

TERMS = (*DEGREES, "etp")
"""What the text form names before the colon."""

CUTS = ("balanced", "even", "light-ends")
DATA_PARALLEL = ("processes", "threads")
OFFLOAD = (
    "none", "optimizer", "params", "activations", "optimizer+activations", "params+activations",
)  # fmt: skip

_TERM = re.compile(r"([a-z]+)([0-9]{1,18})")  # int() reads no more than 4,300 digits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a job is split over ranks.

    Attributes:
        dp: degree of data parallelism: replicas of the model, each with its own sequences.
        pp: degree of pipeline parallelism: ranks of consecutive layers, which send hidden states.
        cp: degree of context parallelism: ranks with different tokens of the same sequences.
        tp: degree of tensor parallelism: ranks with shards of each layer's matrices.
        ep: degree of expert parallelism: ranks that together store all experts.
        etp: ranks over which each expert's matrices are split. None: tp (and so is a value that
            equals tp).
        schedule: name of the pipeline schedule, or the path of a schedule file.
        microbatches: microbatches per data rank and step (gradient accumulation). None: without a
            pipeline the fewest that fit, else the largest divisor of the batch up to 2 x pp.
        virtual_stages: stages of each pipeline rank.
        pipeline_split: layers per stage as a tuple, `"balanced"` (by cost, embedding and head
            counted) or `"even"` (equal numbers of layers) or `"light-ends"` (one layer fewer on the
            first and on the last stage, as if embedding and head were a layer each).
        zero: ZeRO stage: shards the optimizer's state (1), gradients (2) and parameters (3) over
            data ranks; 0 shards nothing.
        shard: data ranks over which the ZeRO state is sharded (needs zero=1, 2 or 3). None: dp.
        offload: state in host memory: `"none"`, `"optimizer"` (moments and masters, stepped there),
            `"params"` (parameter shards too; needs zero=3), `"activations"` (tensors saved for
            backward; GPUs), or two of them, as in `"optimizer+activations"`.
        recompute: activations recomputed in backward (activation checkpointing): `"none"`, `"full"`
            (each layer), `"selective"` (attention cores) or modules, as in `"norm+activation"`.
        recompute_layers: layers of each stage, the first ones, that are recomputed. None: all.
        sequence_parallel: norms and residuals on 1/tp of the sequence, sharded over tp ranks.
        data_parallel: `"processes"` (one rank a replica) or `"threads"` (one process).
        order: mesh axes from the fastest-varying rank digit to the slowest.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int | None = None
    schedule: str = "1f1b"
    microbatches: int | None = None
    virtual_stages: int = 1
    pipeline_split: str | tuple[int, ...] = "balanced"
    zero: int = 0
    shard: int | None = None
    offload: str = "none"
    recompute: str = "none"
    recompute_layers: int | None = None
    sequence_parallel: bool = False
    data_parallel: str = "processes"
    order: tuple[str, ...] = ("tp", "cp", "dp", "pp")

    def __post_init__(self) -> None:
        degrees = {name: getattr(self, name) for name in (*DEGREES, "virtual_stages")}
        if self.etp is not None:
            degrees["etp"] = self.etp
        wrong = {
            name: value
            for name, value in degrees.items()
            if not isinstance(value, int) or isinstance(value, bool) or value < 1
        }
        for name, value in wrong.items():
            raise LayoutError(
                f"{name} is {value!r}; a degree is a whole number of at least 1",
                hint=self.flag_with(**dict.fromkeys(wrong, 1)),
            )
        if self.etp == self.tp:
            object.__setattr__(self, "etp", None)
        if self.microbatches is not None and self.microbatches < 1:
            raise LayoutError(
                f"microbatches is {self.microbatches}; it must be at least 1",
                hint=self.flag_with(microbatches=1),
            )
        if self.zero not in (0, 1, 2, 3):
            raise LayoutError(
                f"zero is {self.zero}; ZeRO has the stages 0, 1, 2 and 3",
                hint=self.flag_with(zero=3),
            )
        if self.shard is not None and not self.zero:
            raise LayoutError(
                f"shard is {self.shard}, and zero is 0: every data rank holds a whole state, and "
                "shards one under zero=1, 2 or 3",
                hint=self.flag_with(zero=1),
            )
        if self.shard is not None and (
            self.shard < 1 or not legality.shard(self.dp, self.shard, self.zero)
        ):
            most = max(n for n in divisors(self.dp) if n <= max(1, self.shard))
            raise LayoutError(
                f"shard is {self.shard}; it must divide dp = {self.dp}",
                hint=self.flag_with(shard=most),
            )
        object.__setattr__(self, "recompute", recompute.parse(self.recompute))
        for field, choices in (
            ("data_parallel", DATA_PARALLEL),
            ("offload", OFFLOAD),
        ):
            if getattr(self, field) not in choices:
                message, hint = unknown(field, str(getattr(self, field)), choices)
                raise LayoutError(message, hint=hint)
        if self.offloads("params") and self.zero != 3:
            raise LayoutError(
                f"offload={self.offload} keeps parameter shards on the host and gathers a "
                f"layer from there when it runs, which is zero=3; zero is {self.zero}",
                hint=self.flag_with(zero=3),
            )
        if self.recompute_layers is not None and self.recompute_layers < 1:
            raise LayoutError(
                f"recompute_layers is {self.recompute_layers}; it must be at least 1",
                hint=self.flag_with(recompute_layers=1),
            )
        if self.recompute_layers is not None and self.recompute == "none":
            raise LayoutError(
                f"recompute_layers is {self.recompute_layers}, and recompute is none",
                hint=self.flag_with(recompute="full"),
            )
        if sorted(self.order) != sorted(AXES):
            raise LayoutError(
                f"order is {'-'.join(self.order)}; it must name each of {', '.join(AXES)} once",
                hint="order=tp-cp-dp-pp",
            )
        if isinstance(self.pipeline_split, tuple):
            if len(self.pipeline_split) != self.num_stages:
                pp, rest = divmod(len(self.pipeline_split), self.virtual_stages)
                raise LayoutError(
                    f"pipeline_split {'-'.join(map(str, self.pipeline_split))} names "
                    f"{len(self.pipeline_split)} stages, "
                    f"the layout has {self.num_stages} (pp {self.pp} x {self.virtual_stages})",
                    hint=self.flag_with(pipeline_split="balanced")
                    if rest or not pp
                    else self.flag_with(pp=pp),
                )
            if any(n < 0 for n in self.pipeline_split):
                raise LayoutError(
                    f"pipeline_split {self.pipeline_split} holds a negative number of layers",
                    hint=self.flag_with(pipeline_split="balanced"),
                )
        elif self.pipeline_split not in CUTS:
            message, hint = unknown("pipeline_split", self.pipeline_split, CUTS)
            raise LayoutError(message, hint=f"{hint}; or layers per stage: pipeline_split=3-5")
        if not legality.expert_ranks(self.dp, self.cp, self.ep, self.tp, self.expert_tp):
            self._reject_expert_ranks()
        if self.data_parallel == "threads" and self.splits_experts:
            raise LayoutError(
                f"data_parallel=threads keeps whole replicas in one process; the layout is "
                f"{self.axes_text()}",
                hint=self.flag_with(ep=1, etp=None),
            )
        if self.data_parallel == "threads" and self.pp * self.cp * self.tp > 1:
            raise LayoutError(
                "data_parallel=threads runs in one process and takes no other axis; "
                f"the layout is {self.axes_text()}",
                hint=self.flag_with(pp=1, cp=1, tp=1),
            )
        if self.data_parallel == "threads" and self.zero:
            raise LayoutError(
                f"data_parallel=threads keeps one state, on its first replica: zero={self.zero} "
                "has nothing to shard",
                hint=self.flag_with(data_parallel="processes"),
            )
        if self.data_parallel == "threads" and self.offload != "none":
            raise LayoutError(
                "data_parallel=threads is there to be compared, and offloads nothing: "
                f"offload={self.offload}",
                hint=self.flag_with(data_parallel="processes"),
            )
        if self.data_parallel == "threads" and self.recompute != "none":
            raise LayoutError(
                "data_parallel=threads draws from one generator, in whatever order its threads "
                f"come: recompute={self.recompute} could not draw the same again",
                hint=self.flag_with(data_parallel="processes"),
            )

    # --- sizes -----------------------------------------------------------------------------

    def offloads(self, kind: str) -> bool:
        """Whether `optimizer`, `params` or `activations` live in the host's memory."""
        return kind in self.offload.split("+")

    @property
    def world_size(self) -> int:
        """Ranks (processes) the layout needs."""
        if self.data_parallel == "threads":
            return 1
        return self.dp * self.pp * self.cp * self.tp

    @property
    def num_stages(self) -> int:
        """Pipeline stages: pp x virtual_stages."""
        return self.pp * self.virtual_stages

    def degree(self, axis: str) -> int:
        """The size of one mesh axis."""
        assert axis in AXES, axis
        return int(getattr(self, axis))

    def _reject_expert_ranks(self) -> None:
        """Say which number does not divide, and the nearest layouts in which it does."""
        etp, ranks = self.expert_tp, self.dp * self.cp * self.tp
        legal = [(n, etp) for n in divisors(ranks // etp)] if ranks % etp == 0 else []
        legal = legal or [(n, 1) for n in divisors(ranks)]
        below = [pair for pair in legal if pair[0] <= self.ep][-1:]
        above = [pair for pair in legal if pair[0] > self.ep][:1]
        near = sorted(below + above, key=lambda pair: abs(math.log2(pair[0] / self.ep)))
        rule = (
            f"ep {self.ep} must divide dp x cp = {self.dp * self.cp}"
            if self.etp is None
            else f"ep x etp = {self.ep} x {etp} must divide dp x cp x tp = {ranks}"
        )
        texts = (self.flag_with(ep=n, etp=None if m == self.tp else m) for n, m in near)
        raise LayoutError(rule, hint=" or ".join(texts))

    # --- who holds which experts -----------------------------------------------------------

    @property
    def expert_tp(self) -> int:
        """Ranks over which each expert is sliced: etp, or tp where it is absent."""
        return self.etp or self.tp

    @property
    def splits_experts(self) -> bool:
        """Whether experts are placed by ep and etp, and not as tp places all else."""
        return self.ep > 1 or self.etp is not None

    @property
    def expert_copies(self) -> int:
        """Ranks of one stage that hold the same shard of the experts."""
        return self.dp * self.cp * self.tp // (self.ep * self.expert_tp)

    def expert_groups(self, axis: str) -> list[tuple[int, ...]]:
        """The groups of one axis of the experts, each ascending, ordered by first rank.

        The ranks of a stage are counted as `order` has them, expert_tp fastest, then expert, then
        expert_data; where etp is tp, the groups of tp stay together.

        Args:
            axis: `expert` (ranks that together hold all experts), `expert_tp` (that hold slices of
                the same experts) or `expert_data` (that hold the same shard).
        """
        rows: dict[tuple[int, ...], list[int]] = {}
        sizes = {"expert_tp": self.expert_tp, "expert": self.ep, "expert_data": self.expert_copies}
        for rank in range(self.world_size):
            where = self.coordinate(rank)
            digits = [name for name in self.order if name != "pp"]
            if self.etp is None:
                digits = ["tp", *(name for name in digits if name != "tp")]
            number, stride = 0, 1
            for name in digits:
                number += where[name] * stride
                stride *= self.degree(name)
            place = {"pp": where["pp"]}
            for name, size in sizes.items():
                number, place[name] = divmod(number, size)
            key = tuple(index for name, index in place.items() if name != axis)
            rows.setdefault(key, []).append(rank)
        return sorted(tuple(row) for row in rows.values())

    # --- who shares a state (ZeRO) ---------------------------------------------------------

    @property
    def data_degree(self) -> int:
        """Ranks that hold the same dense parameters and compute gradients of different tokens:
        dp x cp."""
        return self.dp * self.cp

    def data_groups(self) -> list[tuple[int, ...]]:
        """The ranks that differ in dp and cp alone, each ascending, ordered by first rank."""
        rows: dict[tuple[int, int], list[int]] = {}
        for rank in range(self.world_size):
            where = self.coordinate(rank)
            rows.setdefault((where["pp"], where["tp"]), []).append(rank)
        return sorted(tuple(row) for row in rows.values())

    def shard_groups(self) -> list[tuple[int, ...]]:
        """Ranks that share one state: neighbours along dp, `shard` of them, each with all of its
        context ranks; none without ZeRO."""
        count = self.shard or self.dp
        if not self.zero or count * self.cp == 1:
            return []
        rows: dict[tuple[int, int, int], list[int]] = {}
        for rank in range(self.world_size):
            where = self.coordinate(rank)
            rows.setdefault((where["pp"], where["tp"], where["dp"] // count), []).append(rank)
        return sorted(tuple(row) for row in rows.values())

    def replica_groups(self) -> list[tuple[int, ...]]:
        """Data ranks that hold the same share of a state, where fewer than all of dp share one
        (hybrid sharding)."""
        count = self.shard or self.dp
        if not self.zero or count == self.dp:
            return []
        rows = (row[i::count] for row in self.groups("dp") for i in range(count))
        return sorted(rows)

    # --- rank and coordinate ---------------------------------------------------------------

    def coordinate(self, rank: int) -> dict[str, int]:
        """Axis to index, for one rank of 0 .. world_size - 1."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is outside the {self.world_size} ranks of {self}")
        where = {}
        for axis in self.order:
            rank, where[axis] = divmod(rank, self.degree(axis))
        return where

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """The rank at a coordinate; an absent axis is index 0."""
        rank, stride = 0, 1
        for axis in self.order:
            index = coordinate.get(axis, 0)
            assert 0 <= index < self.degree(axis), (axis, index)
            rank += index * stride
            stride *= self.degree(axis)
        return rank

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `axis`, in order of their index."""
        where = self.coordinate(rank)
        return tuple(self.rank({**where, axis: i}) for i in range(self.degree(axis)))

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Every group of ranks along `axis`, each once, ordered by first rank."""
        others = [a for a in self.order if a != axis]
        found = []
        for indices in itertools.product(*(range(self.degree(a)) for a in others)):
            where = dict(zip(others, indices, strict=True))
            found.append(tuple(self.rank({**where, axis: i}) for i in range(self.degree(axis))))
        return sorted(found)

    # --- text ------------------------------------------------------------------------------

    def axes_text(self) -> str:
        """The degrees alone: `dp2.pp2.tp2`; `dp1` when nothing is split."""
        terms = [f"{name}{getattr(self, name)}" for name in DEGREES if getattr(self, name) > 1]
        terms += [f"etp{self.etp}"] if self.etp is not None else []
        return ".".join(terms) or "dp1"

    def __str__(self) -> str:
        options = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in TERMS or value == field.default:
                continue
            if isinstance(value, tuple):
                value = "-".join(map(str, value))
            elif isinstance(value, bool):
                value = str(value).lower()
            options.append(f"{field.name}={value}")
        return self.axes_text() + (":" + ",".join(options) if options else "")

    def flag_with(self, **fields: Any) -> str:
        """For hints: the flag of this layout with other values, which are not checked."""
        other = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(other, name, value)
        return f"--layout {other}"

    @classmethod
    def parse(cls, text: str, **flags: Any) -> Layout:
        """Read a text form; `flags` other than None fill the fields that the text leaves out.

        Raises:
            LayoutError: an unknown axis or field, a value that cannot be, or a flag that says
                something else than the text.
        """
        if not text.strip():
            raise LayoutError(
                "the layout is empty", hint="--layout dp2.pp2.tp2, or dp1 for one process"
            )
        axes, _, options = text.strip().partition(":")
        given: dict[str, Any] = {}
        names = [f.name for f in dataclasses.fields(cls)]
        for term in axes.strip().split(".") if axes.strip() else ():
            match = _TERM.fullmatch(term.strip())
            if match is None:
                raise LayoutError(
                    f"{term!r} in layout {text!r} is not an axis and a degree",
                    hint=meant_layout(text, TERMS, names)
                    or f"--layout {nearest(axes, ['auto']) or 'dp2.pp2.tp2'}",
                )
            axis, degree = match.groups()
            if axis not in TERMS:
                message, hint = unknown("axis", axis, TERMS)
                near = nearest(axis, TERMS) or axis
                raise LayoutError(
                    f"layout {text!r}: {message}",
                    hint=meant_layout(text.replace(axis, near, 1), TERMS, names) or hint,
                )
            if axis in given:
                raise LayoutError(
                    f"layout {text!r} names the axis {axis} twice",
                    hint=f"give it once: {axis}{given[axis]}",
                )
            given[axis] = int(degree)
        for option in filter(None, options.split(",")):
            key, equals, value = option.partition("=")
            (key,) = renamed.present_options({key.strip(): None}, names)
            if key not in names:
                message, hint = unknown("layout field", key, names)
                near = nearest(key, names) or ""
                hint = f"--layout {text.replace(key, near, 1)}" if near else hint
                raise LayoutError(f"layout {text!r}: {message}", hint=hint)
            if not equals:
                raise LayoutError(
                    f"layout {text!r}: {key} has no value",
                    hint=f"--layout {text.replace(key, f'{key}={EXAMPLES.get(key, 1)}', 1)}",
                )
            if key in given:
                raise LayoutError(
                    f"layout {text!r} gives {key} twice", hint=f"give it once: {option.strip()}"
                )
            given[key] = _value(key, value.strip())
        flags = {key: value for key, value in flags.items() if value is not None}
        for key, value in renamed.present_options(flags, names).items():
            if key not in names:
                message, hint = unknown("layout field", key, names)
                raise LayoutError(message, hint=hint)
            if isinstance(value, str):
                value = _value(key, value)
            if key in given and given[key] != value:
                raise LayoutError(
                    f"the layout has {key}={given[key]}, the flag has {value}",
                    hint=f"give it once: --layout {text}",
                )
            given[key] = value
        if given.get("schedule") == "zb-v":
            given.setdefault("virtual_stages", 2)  # the only number that it has
        return cls(**given)

    @classmethod
    def stored(cls, text: str) -> Layout:
        """Read a text form that this release or the previous one wrote to a file."""
        return cls.parse(renamed.layout_text(text))


def _value(key: str, text: str) -> Any:
    """The value of one field from its text."""
    if key in (*TERMS, "microbatches", "virtual_stages", "zero", "shard", "recompute_layers"):
        if not re.fullmatch(r"[0-9]{1,18}", text):
            raise LayoutError(f"{key}={text[:60]!r} is not a whole number", hint=f"{key}=1")
        return int(text)
    if key == "sequence_parallel":
        if text not in ("true", "false"):
            raise LayoutError(f"{key}={text!r} is neither true nor false", hint=f"{key}=true")
        return text == "true"
    if key == "order":
        return tuple(text.split("-"))
    if key == "pipeline_split" and re.fullmatch(r"[0-9]{1,18}(-[0-9]{1,18})*", text):
        return tuple(int(n) for n in text.split("-"))
    return text


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending; beyond 2^40, which no layout has, only some."""
    small = [n for n in range(1, min(math.isqrt(number), 1 << 20) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
