"""Optimizer: AdamW (Loshchilov and Hutter 2019) over named parameters, with fp32 master weights.

torch's fused AdamW does the arithmetic: one kernel over all parameters on CUDA, and on CPU three
to four times faster than its loops (3.2 ms against 9.3 and 13.2 for 4.2 million parameters on one
thread). Parameters below fp32 get a master copy here, which is what AdamW steps; the parameter is
its rounding. An offloaded optimizer has one of every parameter, in the host's memory.

`--optimizer adamw_8bit` stores the moments of parameters of at least 4,096 elements in 8 bits
(`runtime.moments_8bit`).

On CUDA a step reads nothing from the device: the learning rate is an argument of the kernel, step
counts are device tensors, and a device tensor tells it to skip a step. An offloaded optimizer
waits, once a step, for the gradients that the host is to step from; one in 8 bits to know whether
the step is skipped, since its kernels take the number of steps from the host.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hocket.runtime.data_parallel.buckets import grad_dtype
from hocket.runtime.data_parallel.flat import to_host
from hocket.runtime.moments_8bit import MEAN, SCALES, SQUARE, AdamW8bit, quantize_moment
from hocket.spec.precision import SMALLEST_8BIT
from hocket.spec.run import TrainOptions

STATE = (MEAN, SQUARE)

WIDENED = 16_000_000
"""Gradients below fp32 that are widened at once, as a number of elements."""


def decays(name: str, dims: int) -> bool:
    """Whether weight decay applies: not to norms, biases and other one-dimensional parameters."""
    return dims >= 2 and not name.endswith("bias")


def in_8bit(shape: tuple[int, ...], options: TrainOptions) -> bool:
    """Whether the moments of a parameter of this whole shape are stored in 8 bits."""
    return options.optimizer == "adamw_8bit" and math.prod(shape) >= SMALLEST_8BIT


class Optimizer:
    """AdamW over the parameters of one rank.

    Args:
        parameters: (global name, parameter, or the part of it that this rank steps); a name
            stands for one parameter.
        options: optimizer, lr, weight_decay, beta1, beta2, eps.
        on_host: its state lives in the host's memory and is stepped there: of every parameter a
            master in fp32, to which gradients are copied, and from which values are copied back
            (Ren et al. 2021, ZeRO-Offload).
        shapes: of the whole parameter by name, where shards are given. None: as the parameters
            have.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        options: TrainOptions,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        *,
        on_host: bool = False,
    ) -> None:
        self.parameters: dict[str, nn.Parameter] = {
            name: p for name, p in parameters if p.requires_grad
        }
        self.masters: dict[str, Tensor] = {
            name: to_host(p.detach().float()) if on_host else p.detach().float().clone()
            for name, p in self.parameters.items()
            if on_host or p.dtype != torch.float32
        }
        stepped = {**self.parameters, **self.masters}

        whole = {n: tuple(p.shape) if shapes is None else shapes[n] for n, p in stepped.items()}
        kinds = {n: (decays(n, len(s)), in_8bit(s, options)) for n, s in whole.items()}
        groups: list[dict[str, Any]] = [
            {
                "params": [p for n, p in stepped.items() if kinds[n] == kind],
                "weight_decay": options.weight_decay if kind[0] else 0.0,
                "bits": 8 if kind[1] else 32,
            }
            for kind in sorted(set(kinds.values()), reverse=True)
        ]
        self._stepped = stepped
        self._adamw: torch.optim.AdamW | AdamW8bit | None = None
        more = {"lr": options.lr, "betas": (options.beta1, options.beta2), "eps": options.eps}
        if groups and options.optimizer == "adamw_8bit":
            self._adamw = AdamW8bit(groups, **more)  # type: ignore[arg-type]
        elif groups:
            self._adamw = torch.optim.AdamW(groups, fused=True, **more)  # type: ignore[arg-type]
        rounded = [p for n, p in self.parameters.items() if n in self.masters]
        self._rounded: list[Tensor] = [*rounded]
        self._exact = list(self.masters.values())
        self._landing = self._landings() if on_host else {}
        self._together = list(_together(rounded, self._exact, self._landing))

    def _landings(self) -> dict[Tensor, tuple[Tensor, Tensor | None]]:
        """Of each master of a CUDA parameter, pinned: where its gradient arrives, and, for another
        dtype than fp32, where the values leave from. Kept, since pinning is slow and waits for the
        device."""
        found: dict[Tensor, tuple[Tensor, Tensor | None]] = {}
        for name, master in self.masters.items():
            given = self.parameters[name]
            if given.is_cuda:
                leaving = None
                if given.dtype != torch.float32:
                    leaving = torch.empty_like(master, dtype=given.dtype, pin_memory=True)
                found[master] = (torch.empty_like(master, pin_memory=True), leaving)
        return found

    def step(self, lr: float, skip: Tensor | None = None) -> None:
        """One step at learning rate `lr` from the gradients in `.grad`.

        `skip`: a fp32 scalar, 1.0 where the step is to change nothing (a loss that is not finite),
        as `torch.amp.GradScaler` gives fused optimizers. None: it is taken.
        """
        if self._adamw is None:
            return
        for group in self._adamw.param_groups:
            group["lr"] = lr
        if isinstance(self._adamw, AdamW8bit):
            if skip is not None and bool(skip):
                return
        elif skip is not None:
            self._adamw.found_inf = self._where_stepped(skip)  # type: ignore[attr-defined]
        for unused in self.parameters.values():
            if unused.grad is None:  # no use of it reaches the loss; it decays on any layout
                unused.grad = torch.zeros_like(unused, dtype=grad_dtype(unused))
        if not self._exact:
            self._adamw.step()
            return
        self._fetch_gradients()
        direct = [(p, p.grad) for n, p in self.parameters.items() if n not in self.masters]
        for together in self._together:
            for parameter, master in together:
                assert parameter.grad is not None
                if master in self._landing:
                    master.grad = self._landing[master][0]
                    continue
                # The very tensor, if gradients are fp32 and lie where the master does.
                master.grad = parameter.grad.to(master.device, torch.float32)
            self._adamw.step()  # what has no gradient now is passed over
            for _, master in together:
                master.grad = None
            for parameter, _ in direct:  # stepped in the first turn, not again in the next
                parameter.grad = None
        for parameter, grad in direct:
            parameter.grad = grad
        self._round()

    def _where_stepped(self, skip: Tensor) -> Tensor:
        stepped = next(iter(self._stepped.values()))
        if stepped.device == skip.device:
            return skip
        host = torch.empty(skip.shape, dtype=skip.dtype, pin_memory=skip.is_cuda)
        host.copy_(skip, non_blocking=True)
        if not self._landing:  # else `_fetch_gradients` waits for both
            _wait()
        return host

    @torch.no_grad()
    def _fetch_gradients(self) -> None:
        """Bring gradients to where the host steps from them: many copies, and one wait."""
        if not self._landing:
            return
        for name, master in self.masters.items():
            if master in self._landing:
                gradient = self.parameters[name].grad
                assert gradient is not None
                self._landing[master][0].copy_(gradient, non_blocking=True)
        _wait()

    @torch.no_grad()
    def _round(self) -> None:
        """Give parameters their masters' values, rounded."""
        if not self._landing:
            torch._foreach_copy_(self._rounded, self._exact)
            return
        for parameter, master in zip(self._rounded, self._exact, strict=True):
            _, leaving = self._landing[master]
            # The next step's wait for gradients comes before the host writes here again.
            source = master if leaving is None else leaving.copy_(master)
            parameter.copy_(source, non_blocking=True)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take the parameters' present values as the masters' (after values were set from
        outside, as by loading a checkpoint that holds no masters)."""
        if self._exact:
            torch._foreach_copy_(self._exact, self._rounded)

    # --- state -----------------------------------------------------------------------------

    def state_tensors(self) -> dict[str, dict[str, Tensor]]:
        """Global name to `exp_avg`, `exp_avg_sq` (local shapes; fp32, or in 8 bits with their
        scales, `exp_avg_absmax`), `step` (a scalar) and, below fp32, `master`. The live tensors,
        not copies. Zeros before the first step.
        """
        if self._adamw is None:
            return {}
        if isinstance(self._adamw, AdamW8bit):
            for group in self._adamw.param_groups:
                for tensor in group["params"]:
                    self._adamw.state_of(tensor, group)
        found = {}
        for name, tensor in self._stepped.items():
            state = self._adamw.state[tensor]
            if not state:
                # What AdamW would make at its first step.
                state["step"] = torch.zeros((), dtype=torch.float32, device=tensor.device)
                for key in STATE:
                    state[key] = torch.zeros_like(tensor, memory_format=torch.preserve_format)
            found[name] = {
                key: state[key]
                for key in ("step", *STATE, *(moment + SCALES for moment in STATE))
                if key in state
            }
            if name in self.masters:
                found[name]["master"] = tensor
        return found

    @torch.no_grad()
    def load_state_tensors(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over a state in the form of `state_tensors`, all moments in fp32.

        Raises:
            KeyError, RuntimeError: names or shapes that are not this optimizer's.
        """
        mine = self.state_tensors()
        if state.keys() != mine.keys():
            raise KeyError(f"optimizer state of other names: {sorted(state.keys() ^ mine.keys())}")
        for name, tensors in mine.items():
            for key, tensor in tensors.items():
                if key.endswith(SCALES):
                    continue
                if tensor.shape != state[name][key].shape:
                    raise RuntimeError(
                        f"optimizer state {name} {key} has the shape "
                        f"{tuple(state[name][key].shape)}, expected {tuple(tensor.shape)}"
                    )
                if key + SCALES in tensors:
                    quantize_moment(tensors, key, state[name][key])
                else:
                    tensor.copy_(state[name][key])

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor it holds: moments and masters."""
        for state in self.state_tensors().values():
            yield from state.values()


def _wait() -> None:
    """Let the host wait for the copies that the current stream has queued."""
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    event.synchronize()


def _together(
    rounded: list[nn.Parameter], exact: list[Tensor], landing: Container[Tensor]
) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Parameters with their masters, in runs whose gradients are widened to fp32 together: all at
    once where they are fp32 already or have a `landing`, else few, so that no second copy of all
    gradients is held."""
    together: list[tuple[Tensor, Tensor]] = []
    size = 0
    for parameter, master in zip(rounded, exact, strict=True):
        together.append((parameter, master))
        if grad_dtype(parameter) != torch.float32 and master not in landing:
            size += parameter.numel()
        if size >= WIDENED:
            yield together
            together, size = [], 0
    if together:
        yield together
