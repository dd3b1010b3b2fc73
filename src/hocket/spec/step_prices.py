"""StepPrices: what every part of one whole training step costs on each rank of one machine.

`Prices` knows the actions of a schedule. A step has more: collectives inside of a forward,
gradients summed over replicas, the norm, the optimizer. Seconds are of two kinds: those of a
processor, which ranks on the same cores share, and those of a message's way, which cost nobody
anything.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective on each rank that takes part.

    Attributes:
        name: `all-reduce` ...; axis: of the mesh; bytes: as `runtime.record` counts them.
        give: a processor's seconds until the others can have what this rank brings.
        wait: seconds from the last one's giving until the ranks go on; no processor is needed.
        take: a processor's seconds then.
    """

    name: str
    axis: str
    bytes: int
    give: float
    wait: float
    take: float

    @property
    def seconds(self) -> float:
        """Seconds where every rank comes at the same moment."""
        return self.give + self.wait + self.take


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageStep:
    """One pipeline stage on one rank, for one microbatch.

    Attributes:
        forward, input, weight: a processor's seconds of F, I and W without communication; B is I
            and W together.
        first_weight: what W takes more, or less, in a step's first microbatch.
        forward_collectives, backward_collectives: over tp, in the order they come.
        message: what one F sends to the next stage, and one B back; None on the last stage.
        reductions: sums of gradients over dp once a step, in the order they begin.
    """

    forward: float
    input: float
    weight: float
    first_weight: float = 0.0
    forward_collectives: tuple[Collective, ...] = ()
    backward_collectives: tuple[Collective, ...] = ()
    message: Collective | None = None
    reductions: tuple[Collective, ...] = ()

    @property
    def backward(self) -> float:
        """A processor's seconds of B."""
        return self.input + self.weight


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankStep:
    """What one rank does outside its stages, once a step; a processor's seconds.

    Attributes:
        before: batch and cleared gradients. sums: of tied and partial gradients.
        norm: of the gradients, and clipping. optimizer: the update. after: what a loop says.
    """

    before: float = 0.0
    sums: tuple[Collective, ...] = ()
    norm: float = 0.0
    optimizer: float = 0.0
    after: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPrices:
    """All of a step.

    Attributes:
        stages: by number. ranks: by index on the pp axis.
        loss: its sum over all ranks. norm: its sum over a replica. None where one rank is alone.
    """

    stages: tuple[StageStep, ...]
    ranks: tuple[RankStep, ...]
    loss: Collective | None = None
    norm: Collective | None = None
