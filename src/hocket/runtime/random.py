"""Streams: random numbers that agree on what is replicated and differ on what is sharded.

Dropout draws from the device's default generator. Before every layer that generator is seeded with
a key of (seed, step, microbatch, layer), where microbatches are numbered over all data ranks: ranks
that hold the same activations draw the same numbers, and the cut into stages changes nothing.
Between a column-parallel layer's output and the row-parallel layer's input, where activations are
sharded, a stream of the tensor rank's own takes its place. With sequence parallelism they are
sharded everywhere else too: the rank's own is the rule, and the shared stream is drawn from where
all ranks compute the same from gathered products. A model without dropout is left alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.mesh import Mesh
from hocket.runtime.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from hocket.spec.plan import StagePlan

_WORDS = ("dropout", "pdrop", "jitter")


def draws_random_numbers(module: nn.Module) -> bool:
    """Whether training `module` draws random numbers: some dropout probability is above 0."""
    configs: dict[int, Any] = {}
    for child in module.modules():
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0:
            return True
        if _has_probability(vars(child)):
            return True
        config = vars(child).get("config")
        if config is not None:
            configs[id(config)] = config
    return any(_has_probability(getattr(config, "__dict__", {})) for config in configs.values())


def _has_probability(fields: dict[str, Any]) -> bool:
    return any(
        isinstance(value, float) and value > 0 and any(word in name for word in _WORDS)
        for name, value in fields.items()
    )


def _mix(*values: int) -> int:
    """A 64-bit key of several numbers (the finalizer of splitmix64, Steele et al. 2014)."""
    state = 0
    for value in values:
        state = (state ^ value) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


Moment = tuple[tuple[int, int, int], int, Tensor | None, Tensor | None, Tensor]
"""State of `Streams`: place, key, the two states that are not drawn from, and that which is."""


class Streams:
    """The random streams of one rank.

    Attributes:
        step: the optimizer step, set by the engine.
        microbatch: number of the microbatch among those of all data ranks, set by the engine.
    """

    def __init__(self, seed: int, mesh: Mesh, *, slices: bool = False) -> None:
        """`slices`: activations between split blocks are slices of the sequence."""
        self.seed = seed
        self.slices = slices
        self.step = 0
        self.microbatch = 0
        self._rank = mesh.axis("tp").index
        if mesh.device.type == "cuda":
            index = mesh.device.index if mesh.device.index is not None else 0
            self._generator: torch.Generator = torch.cuda.default_generators[index]
        else:
            self._generator = torch.default_generator
        self._key = _mix(seed)
        self._layer = 0
        self._home: Tensor | None = None
        self._away: Tensor | None = None

    def enter_layer(self, layer: int) -> None:
        """Seed for one layer; 0 is what runs before the first."""
        self._layer = layer
        self._key = _mix(self.seed, self.step, self.microbatch, layer)
        self._home = self._away = None
        self._generator.manual_seed(self._own if self.slices else self._key)

    @property
    def _own(self) -> int:
        """The seed of this tensor rank alone; `_key` is that of all of them."""
        return _mix(self._key, 1 + self._rank)

    @property
    def place(self) -> tuple[int, int, int]:
        """(step, microbatch, layer) of what runs."""
        return self.step, self.microbatch, self._layer

    def enter_again(self, place: tuple[int, int, int]) -> None:
        """Seed for a layer that ran before, at `place`: it draws the same numbers again."""
        self.step, self.microbatch, layer = place
        self.enter_layer(layer)

    def moment(self) -> Moment:
        """The state of all streams now."""
        state = self._generator.get_state()
        return self.place, self._key, self._home, self._away, state

    def return_to(self, moment: Moment) -> None:
        """Draw again what was drawn from that moment on."""
        (self.step, self.microbatch, self._layer), self._key, self._home, self._away, state = moment
        self._generator.set_state(state)

    def enter_sharded(self) -> None:
        """Draw from this tensor rank's own stream from here on."""
        if not self.slices:
            self._leave_home(self._own)

    def enter_replicated(self) -> None:
        """Draw from the stream that all tensor ranks share from here on."""
        if self.slices:
            self._leave_home(self._key)

    def leave_sharded(self) -> None:
        """Draw again from the stream that a layer begins with."""
        if self._home is None:
            return
        self._away = self._generator.get_state()
        self._generator.set_state(self._home)
        self._home = None

    def _leave_home(self, seed: int) -> None:
        if self._home is not None:
            return
        self._home = self._generator.get_state()
        if self._away is None:
            self._generator.manual_seed(seed)
        else:
            self._generator.set_state(self._away)

    def install(self, module: nn.Module, stages: StagePlan | None) -> None:
        """Hook one stage's module: every layer is seeded, split layers switch streams."""
        if stages is None:
            self._seed_before(module, 0)
        else:
            self._seed_before(module.get_submodule(stages.decoder), 0)
            layers = module.get_submodule(stages.layers)
            for number, layer in enumerate(layers.children(), start=1):
                self._seed_before(layer, number)
            for number, name in enumerate((*stages.after, *stages.head), start=1):
                self._seed_before(module.get_submodule(name), stages.num_layers + number)
        for child in module.modules():
            if isinstance(child, ColumnParallelLinear | RowParallelLinear):
                child.streams = self

    def _seed_before(self, module: nn.Module, layer: int) -> None:
        def hook(child: nn.Module, args: Any) -> None:
            if child.training:
                self.enter_layer(layer)

        module.register_forward_pre_hook(hook)
