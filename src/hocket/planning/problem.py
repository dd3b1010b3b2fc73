"""Problem: one model, one cluster, one batch; its layouts are estimated through `cost`.

The machine's numbers are those of the links that are there: measured collectives are taken from
the same kind of GPU and link.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from hocket.catalogue import models
from hocket.catalogue.curves import curves_of
from hocket.catalogue.families import families
from hocket.catalogue.hardware import capability, gpu_names
from hocket.cost.constants import (
    FEW_BITS,
    Constants,
    constants,
    few_bits,
    fitted_family,
    memory_quantiles,
    quantiles,
)
from hocket.cost.layout_batch import NAMES, SCHEDULES, Layouts, RankLayers, bent_in_flight
from hocket.cost.machine import ClusterNumbers, machine
from hocket.cost.memory import MemoryEstimate, peak_memory
from hocket.cost.step import StepTimes, step_times
from hocket.cost.terms import Floats, Terms, has_latent, terms
from hocket.planning.enumeration import SearchSpace, legal_parts
from hocket.planning.fit import fits_host, proposable
from hocket.planning.layouts import LATE, concatenate, runs_here
from hocket.planning.pins import Pins
from hocket.planning.tools.limits import Facts, ToolLimits
from hocket.schedules.registry import build_schedule, stage_ranks
from hocket.simulation import durations, simulate
from hocket.spec import recompute
from hocket.spec.capabilities import TRAINED, refused_precision
from hocket.spec.cluster import PRECISIONS, Cluster
from hocket.spec.cut import Cut
from hocket.spec.errors import OptionError, unknown
from hocket.spec.layout import Layout
from hocket.spec.model_shape import ModelShape
from hocket.spec.precision import StateBytes, state_bytes
from hocket.spec.prices import Prices
from hocket.spec.schedule import Schedule
from hocket.spec.timeline import Timeline

STACK = "megatron-core"
"""The software whose constants stand for a runtime that fuses attention and overlaps gradients."""

OWN = "hocket"
"""The constants of hocket itself: eager PyTorch's, and memory as its own execution allocates it."""

PRODUCTS = 2, 3
"""Of an embedding or a head that is frozen, and of one that is trained: forward, the gradient of
its input, that of its matrix."""

EXPERT_IMBALANCE = 1.5
"""Tokens of the expert rank that gets most, over the mean: real traffic was measured at 1.5 to 1.9.
Not fitted; published runs with natural routing are predicted better with it than without
(docs/reference/accuracy.md)."""

CHUNK = 65536
"""Rows estimated at once: their columns stay in the processor's cache."""

SHORT = 3
"""Rounds of pp microbatches that are simulated of a long schedule, in addition to the one that
repeats. Since messages of a rank queue, interleaved schedules reach their period in the third."""

MOST = 10**9
"""Tokens of a sequence, and sequences of a step: what is more is a slip of the pen."""

MOST_GPUS = 2**20
"""Of a cluster, likewise."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """What is asked.

    Attributes:
        shape: the model. cluster: the GPUs.
        seq_len: tokens of a sequence. global_batch: sequences of a step.
        precision: of matrix products, one of `spec.cluster.PRECISIONS`.
        grad_dtype: of gradients, as `TrainOptions.grad_dtype`. None: as a run without the flag.
        optimizer: as `TrainOptions.optimizer`.
        stack: software whose constants price it, one of `cost.constants.stacks()`.
        division: of layers over stages, as `Layout.pipeline_split`.
        limits: software that must be able to run every layout; none: any layout is legal.
        model_type: of the model's Hugging Face configuration; empty where not known.
        expert_imbalance: tokens of the expert rank that gets most, over the mean.
    """

    shape: ModelShape
    cluster: Cluster
    seq_len: int
    global_batch: int
    precision: str = "bf16"
    grad_dtype: str | None = None
    optimizer: str = "adamw"
    stack: str = STACK
    division: str | tuple[int, ...] = "balanced"
    limits: tuple[ToolLimits, ...] = ()
    model_type: str = ""
    expert_imbalance: float = EXPERT_IMBALANCE

    def __post_init__(self) -> None:
        if self.stack != OWN and self.shape.own_attention:  # other software has its own, too
            plain = dataclasses.replace(self.shape, own_attention=False)
            object.__setattr__(self, "shape", plain)
        check_imbalance(self.expert_imbalance)
        for name in ("seq_len", "global_batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"{name} is {value!r}; it must be a whole number of at least 1")
            if value > MOST:
                raise OptionError(f"{name} is {value:,}; at most {MOST:,} is planned")
        check_size(self.cluster)
        rates = self.cluster.node.gpu.flops
        if self.precision not in PRECISIONS:
            message, hint = unknown("precision", self.precision, PRECISIONS)
            raise OptionError(message, hint=hint)
        if self.precision not in rates:
            name, has = self.cluster.node.gpu.name, ", ".join(rates)
            raise OptionError(
                f"{name} has no matmuls in {self.precision}; it has {has}",
                hint=f"--dtype {'bf16' if 'bf16' in rates else has.partition(',')[0]}",
            )
        self.state_bytes  # noqa: B018  rejects what cannot be

    @functools.cached_property
    def model(self) -> Terms:
        return terms(self.shape, eager=bool(self.constants.eager_saved))

    @property
    def state_bytes(self) -> StateBytes:
        """Bytes of a parameter's state and of an activation's element."""
        return state_bytes(self.precision, self.grad_dtype, self.optimizer)

    @functools.cached_property
    def constants(self) -> Constants:
        gpu = self.cluster.node.gpu
        found = constants(
            gpu.name, self.stack, precision=self.precision, grad_dtype=self.grad_dtype,
            optimizer=self.optimizer, expert_imbalance=self.expert_imbalance,
        )  # fmt: skip
        if self.precision in FEW_BITS and "bf16" in gpu.flops:
            return few_bits(found, gpu.flops, self.precision)
        return found

    @functools.cached_property
    def axes(self) -> tuple[str, ...] | None:
        """Axes under which the model's type was found to train as one process does; None of a type
        that was not checked."""
        found = families().get(self.model_type)
        return None if found is None else found.trains

    @property
    def borrowed(self) -> str | None:
        """The family of GPUs whose constants stand for this one's; None where it has its own."""
        name = self.cluster.node.gpu.name
        family = fitted_family(name)
        return None if family == name.partition("-")[0] else family

    @functools.cached_property
    def machine(self) -> ClusterNumbers:
        return machine(self.cluster, self.precision, curves_of(self.cluster.node))

    @property
    def usable(self) -> int:
        """Bytes that the peak of a proposed layout may reach at the 95th percentile."""
        return proposable(self.cluster.node.gpu.usable)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq_len * self.global_batch

    @property
    def flops(self) -> float:
        """Operations of the model in a step, as published utilisation counts them: without
        recompute, and with the masked half of attention."""
        return self.tokens * self.shape.flops_per_token(self.seq_len, causal=False)

    def refused(self, *, halved: bool = False) -> str | None:
        """Why hocket cannot train in this precision on these GPUs; None: it can.

        Args:
            halved: under a schedule that puts weight gradients off.
        """
        if self.precision not in TRAINED:
            return f"{self.precision}: this version trains in {', '.join(TRAINED)}"
        name = self.cluster.node.gpu.name
        found = capability(name) if name in gpu_names() else None
        return refused_precision(self.precision, cuda=True, capability=found, halved=halved)

    def trains(self, layouts: Layouts) -> np.ndarray:
        """[r] bool: rows whose schedule hocket can train in this precision."""
        late = np.isin(layouts.schedule, [SCHEDULES.index(NAMES[name]) for name in LATE])
        here = [self.refused(halved=halved) is None for halved in (False, True)]
        return np.where(late & (layouts.pp > 1), here[1], here[0])

    def legal(self, num_gpus: int, *, pins: Pins | None = None, here: bool = False) -> Layouts:
        """Every legal layout of so many GPUs that `limits` allow."""
        return concatenate(list(self.legal_parts(num_gpus, pins=pins, here=here)))

    def legal_parts(
        self, num_gpus: int, *, pins: Pins | None = None, here: bool = False
    ) -> Iterator[Layouts]:
        """The same, as `enumeration.legal_parts`."""
        asked = self.shape, num_gpus, self.seq_len, self.global_batch
        for found in legal_parts(*asked, pins=pins, here=here, space=self.space):
            for limit in self.limits:
                found = found.take(np.flatnonzero(limit.allowed(found, self.facts)))
            yield found.take(np.flatnonzero(runs_here(found, self.axes))) if here else found

    @functools.cached_property
    def facts(self) -> Facts:
        """What flags of other software depend on, apart from the layout."""
        name, node = self.shape.name, self.cluster.node
        known = name in models.model_names()
        return Facts.of(
            self.shape,
            model=name,
            seq_len=self.seq_len,
            global_batch=self.global_batch,
            precision=self.precision,
            hub_id=models.entry(name).hub_id if known else None,
            model_type=models.config(name)["model_type"] if known else self.model_type,
            gpus_per_node=node.num_gpus,
            capability=capability(node.gpu.name) if node.gpu.name in gpu_names() else None,
            half_of_layers=bool(self.constants.selective_halves),
        )

    def exchanged(self, layouts: Layouts, times: StepTimes) -> np.ndarray:
        """[r] bool: rows whose faster exchange over cp all of `limits` have."""
        found = np.ones(len(layouts), dtype=bool)
        for limit in self.limits:
            if "ulysses" not in limit.context:
                found &= ~(times.ulysses > 0)
            if "ring" not in limit.context:
                found &= (times.ulysses > 0) | (layouts.cp == 1)
        return found

    @functools.cached_property
    def space(self) -> SearchSpace:
        """What a search considers. Selective recompute where it frees anything: of fused attention,
        which saves no more than its inputs and output, it does not."""
        stack = self.constants
        again = recompute.choices(has_latent(self.shape))
        cores = any(float(block.saved_core[0]) > 0 for _, block in self.model.kinds)
        if stack.flash and not (stack.selective_halves or cores):
            again = tuple(kind for kind in again if kind != "selective")
        return SearchSpace(
            recompute=again, domain=self.cluster.domain, deferred=bool(stack.eager_saved)
        )

    def times(self, layouts: Layouts) -> StepTimes:
        """Seconds by closed forms, [r]."""
        length = np.array(float(self.seq_len))
        ranks = self.rank_layers(layouts)
        return step_times(self.model, layouts, length, self.machine, self.constants, ranks=ranks)

    def memory(self, layouts: Layouts) -> MemoryEstimate:
        """Bytes of the peak GPU at the worst moment, [r]."""
        length = np.array(float(self.seq_len))
        ranks = self.rank_layers(layouts)
        return peak_memory(self.model, layouts, length, self.constants, ranks=ranks)

    def rank_layers(self, layouts: Layouts) -> RankLayers:
        """Whole layers that the pipeline ranks hold as the runtime would cut, [r]."""
        bent = layouts.schedule == SCHEDULES.index("zb-v")
        # More microbatches than that are never in flight.
        flight = np.where(bent, np.minimum(layouts.microbatches, 2 * layouts.pp), 0)
        cuts = np.stack([layouts.pp, layouts.virtual, flight, layouts.lighter]).astype(int)
        sizes = tuple(1 + cuts.max(axis=1, initial=0))
        key = np.ravel_multi_index(tuple(cuts), sizes)
        unique, place = np.unique(key, return_inverse=True)
        found = map(tuple, np.stack(np.unravel_index(unique, sizes), axis=1).tolist())
        table = [self._known.get(cut) or self._rank_layers(*cut) for cut in found]
        names = [field.name for field in dataclasses.fields(RankLayers)]
        columns = np.array(table, dtype=np.float64).reshape(-1, len(names))[place].T
        return RankLayers(**dict(zip(names, columns, strict=True)))

    def _rank_layers(self, pp: int, virtual: int, bent: int, lighter: int) -> tuple[float, ...]:
        """One row of `rank_layers`, in the order of its fields; `bent`: microbatches under ZB-V."""
        layout = Layout(
            pp=pp,
            virtual_stages=virtual,
            schedule="zb-v" if bent else "1f1b",
            pipeline_split="light-ends" if lighter else "balanced",
        )
        stages: list[list[int]] = [[] for _ in range(pp)]
        for layers, rank in zip(self.cut(layout), stage_ranks(layout), strict=True):
            stages[rank].append(layers)
        held = [sum(own) for own in stages]
        flight = [0.0] * pp
        if bent and pp > 1:
            down, up = np.array(stages, dtype=np.float64).T
            both = np.full(pp, float(pp)), np.full(pp, float(bent))
            flight = bent_in_flight(down, up, *both, np.arange(float(pp))).tolist()
        early = stages[0][0] - held[0] / len(stages[0])
        inner = max(flight[1:], default=0.0)
        found = held[0], held[-1], max(held), early, flight[0], inner
        return self._known.setdefault((pp, virtual, bent, lighter), found)

    @functools.cached_property
    def _known(self) -> dict[tuple[int, ...], tuple[float, ...]]:
        return {}

    def proposable(self, layouts: Layouts, high: Floats | None = None) -> np.ndarray:
        """[r] bool: rows whose memory fits, on the GPUs (`planning.fit`) and on the hosts.

        Args:
            high: their `high_memory`, where it is known.
        """
        high = self.high_memory(layouts) if high is None else high
        fits = high <= self.usable
        if np.any(layouts.offload):
            held = self.memory(layouts)
            ranks = self._ranks_of_a_host(layouts)
            fits &= fits_host(held.host * ranks, held.pinned * ranks, self.cluster.node)
        return fits

    def host_memory(self, layouts: Layouts) -> Floats:
        """Bytes of a host that its ranks keep state and activations in, [r]."""
        if not np.any(layouts.offload):
            return np.zeros(len(layouts))
        return self.memory(layouts).host * self._ranks_of_a_host(layouts)

    def _ranks_of_a_host(self, layouts: Layouts) -> Floats:
        ranks = layouts.dp * layouts.cp * layouts.tp * layouts.pp
        found: Floats = np.minimum(self.cluster.node.num_gpus, ranks)
        return found

    def high_memory(self, layouts: Layouts) -> Floats:
        """Bytes of the peak GPU at the 95th percentile, [r]; what must fit."""
        parts = [
            self.memory(layouts.take(np.arange(start, min(start + CHUNK, len(layouts))))).peak
            for start in range(0, len(layouts), CHUNK)
        ]
        return self.memory_range * np.concatenate([np.empty(0), *parts])

    # --- event by event ----------------------------------------------------------------------

    def cut(self, layout: Layout) -> Cut:
        """Layers per stage as the runtime cuts: as the layout says, and where it leaves that to
        its default by `division`."""
        split = self.division if layout.pipeline_split == "balanced" else layout.pipeline_split
        return self.shape.cut(split, layout.num_stages, cuda=True)

    def pipelines(self, layouts: Sequence[Layout], times: StepTimes) -> Floats:
        """Seconds of the pipeline, [r], by playing the schedule that the runtime would run.

        Args:
            layouts: equal in `simulated_microbatches` and schedule: one is simulated for all.
            times: their prices.
        """
        first = layouts[0]
        counts = np.array([float(layout.microbatches or 1) for layout in layouts])
        seconds = self.stage_seconds(first, times)

        def seconds_of(microbatches: int) -> Floats:
            plain = Layout(
                pp=first.pp, virtual_stages=first.virtual_stages, schedule=first.schedule
            )
            return durations(_schedule(plain, microbatches), seconds)

        short, long = simulated_microbatches(first, int(counts[0]))
        before = seconds_of(short)
        if long == short:
            return before
        after = seconds_of(long)
        # Long past its warm-up a schedule repeats itself with every round of microbatches.
        rounds = (counts - long) / (long - short)
        found = after + (after - before) * rounds
        # Where ranks compute unequally long, the slowest one holds up all others in the end, be it
        # at once or, at the least, when its own work exceeds what was simulated: between the two.
        busy, around = _slowest(first, seconds)
        least = np.maximum(found, (counts * busy + around).max(axis=0))
        most = np.maximum(found, after + (counts - long) * busy.max(axis=0))
        middle: Floats = (least + most) / 2
        return middle

    def timeline(self, layout: Layout, times: StepTimes, *, most: int = 16) -> Timeline:
        """The pipeline of one layout, at most `most` microbatches of it, as it is simulated.

        Args:
            times: its own, of one row.
        """
        seconds = self.stage_seconds(layout, times)
        prices = Prices(seconds={kind: tuple(map(float, row[0])) for kind, row in seconds.items()})
        plain = Layout(pp=layout.pp, virtual_stages=layout.virtual_stages, schedule=layout.schedule)
        count = layout.microbatches or 1
        if count > most:
            count = next(n for n in range(most, 0, -1) if n % layout.pp == 0 or n == 1)
        return simulate(_schedule(plain, count), prices)

    def stage_seconds(self, first: Layout, times: StepTimes) -> dict[str, Floats]:
        """Seconds of a microbatch by action and stage, [r, stages], for layouts as in `pipelines`.

        Args:
            first: one of them. times: of all.
        """
        num_stages = first.num_stages
        # Layers of each stage, those that take longer than the mean counted as more than one.
        costs = np.array(self.shape.cut_costs(cuda=True)["layer_costs"])
        ends_of = np.cumsum([0, *self.cut(first)])
        cut = np.diff(np.append(0.0, np.cumsum(costs / costs.mean()))[ends_of])
        # Seconds of one layer: what a middle rank takes, over the layers it holds on average.
        layers = (len(self.shape.layers) + 2.0 * (first.pipeline_split == "light-ends")) / first.pp
        ends = np.zeros((2, num_stages))
        ends[0, 0] = ends[1, -1] = 1.0

        def stages(each: Floats, share: float) -> Floats:
            inside = np.outer(each / layers, cut)
            return (
                inside
                + share * np.outer(times.embedding, ends[0])
                + share * np.outer(times.head, ends[1])
            )

        message = np.repeat(times.exchange[:, None], num_stages, axis=1)
        frozen = all(p.frozen for p in self.shape.blocks["head"].products)
        one = 1 / PRODUCTS[not frozen]
        inputs = stages(times.inputs, one)
        weights = stages(times.weights, 0.0 if frozen else one)
        return {
            "F": stages(times.forward, one),
            "B": inputs + weights,
            "I": inputs,
            "W": weights,
            "SEND_F": message,
            "SEND_B": message,
        }

    @functools.cached_property
    def time_range(self) -> tuple[float, float]:
        """Measured over predicted step time, 10th and 90th percentile of the validation."""
        return quantiles(experts=self.shape.experts > 0)

    @functools.cached_property
    def memory_range(self) -> float:
        """Measured over predicted memory, 95th percentile of the validation."""
        return memory_quantiles()[1]


def check_imbalance(value: float) -> None:
    """Raises OptionError where it is no ratio of a rank's tokens to the mean."""
    if not 1 <= value <= MOST:  # a NaN fails both
        raise OptionError(
            f"expert_imbalance is {value:g}; it is a ratio from 1 up: tokens of the most loaded "
            "rank over the mean",
            hint=f"--expert-imbalance {EXPERT_IMBALANCE:g}",
        )


def check_size(cluster: Cluster) -> None:
    """Raises OptionError for more GPUs than stand anywhere together."""
    if cluster.num_gpus > MOST_GPUS:
        raise OptionError(
            f"{cluster.num_gpus:,} GPUs; at most {MOST_GPUS:,} are planned",
            hint="NODESxGPUSxNAME: 2x8xH100-SXM is two nodes of eight",
        )


def simulated_microbatches(layout: Layout, count: int) -> tuple[int, int]:
    """Microbatches that `Problem.pipelines` plays of `count`: all of them (twice the same number),
    or two numbers a round apart, from which the rest follows."""
    size, rest = layout.pp, count % layout.pp
    if layout.virtual_stages > 1 and layout.schedule in ("1f1b", "interleaved"):
        size, rest = count // max(1, count // layout.pp), 0  # its rounds are equal
    short = SHORT * size + rest
    return (count, count) if count <= short + size else (short, short + size)


def _slowest(layout: Layout, seconds: dict[str, Floats]) -> tuple[Floats, Floats]:
    """Seconds that each rank computes for one microbatch, and that pass before the first activation
    reaches it and after its last gradient left it: [pp, r] each."""
    place = np.array(stage_ranks(layout))
    whole = seconds["F"] + seconds["B"]
    way = seconds["F"] + seconds["I"] + 2 * seconds["SEND_F"]
    busy = [whole[:, place == rank].sum(axis=1) for rank in range(layout.pp)]
    first = [int(np.flatnonzero(place == rank)[0]) for rank in range(layout.pp)]
    return np.stack(busy), np.stack([way[:, :stage].sum(axis=1) for stage in first])


@functools.lru_cache(maxsize=512)
def _schedule(layout: Layout, microbatches: int) -> Schedule:
    return build_schedule(layout, microbatches, checked=False)
