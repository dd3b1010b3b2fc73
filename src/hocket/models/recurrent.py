"""Recurrent layers (Mamba, Gated DeltaNet, short convolutions), run in pieces from a given state.

transformers' mixers keep the last inputs of their convolution and a recurrent state in a cache that
they are handed (`get_conv_state`, `update_recurrent_state` and so on). A mixer is recognised by
these calls; `interpose` puts a function between the model and each of them, which may run the mixer
over any part of the tokens with a `MixerCache` of its own. The model's code does not change.

Mamba's first form (`mamba_selective_scan`) starts each scan at zero. Its recurrence is linear in
the state, so what an earlier state h adds to it is added here (Gu and Dao 2023, equation 2a):

    y_t += C_t (exp(A (d_1 + ... + d_t)) h)         d: step sizes after softplus

Mamba's second form bounds step sizes (`time_step_limit`) where it runs over several tokens, and not
in transformers' update by one; here both do (Nemotron-H, Zamba2).

Legend: B rows, S tokens, H hidden, D channels, N state size, W last inputs of a convolution.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hocket.spec.errors import ModelError

CONV, STATE = "conv", "state"

StateKey = tuple[str, int]
"""`CONV` or `STATE`, and the number of such a state of a mixer."""

_KEEPS = frozenset({"update_conv_state", "update_recurrent_state"})
_CACHES = ("cache_params", "past_key_values")
_IGNORED = frozenset(
    {
        "attention_mask", "position_ids", "use_cache", "cache_position", "output_attentions",
        "output_hidden_states", "return_dict", "output_router_logits", "logits_to_keep",
        "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx",
        "num_items_in_batch", "is_causal", "position_embeddings",
    }
)  # fmt: skip
"""Arguments that are of the packed row as a whole, or say nothing about the result."""


Call = Callable[[Tensor, "MixerCache | None"], Tensor]
"""A mixer over some tokens [B, S, H], from the state that a cache holds."""


Runs = Callable[[int, Call, Tensor], Tensor]
"""Number of a mixer, how to call it, and the tokens [1, S, H] of a step, to its output."""


class MixerCache:
    """What one mixer is handed as its cache: the states of B rows, updated in place.

    Args:
        states: by key, [B, ...]. None: shapes are noted (`shapes`), and rows begin with no state.
    """

    def __init__(self, states: dict[StateKey, Tensor] | None) -> None:
        self.states = {} if states is None else states
        self.notes = states is None
        self.shapes: dict[StateKey, tuple[tuple[int, ...], torch.dtype]] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """[B, D, W], or None where there is no state yet."""
        return self.states.get((CONV, state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """[B, ...], or None where there is no state yet."""
        return self.states.get((STATE, state_idx))

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether inputs are kept to roll back to: never."""
        return False

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        """Whether there is a state."""
        return bool(self.states)

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Append inputs [B, D, S] and keep the last W; all of them, the earlier W first."""
        key = (CONV, state_idx)
        if self.notes:
            kept = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self.shapes[key] = ((*conv_states.shape[1:-1], kept), conv_states.dtype)
            return nn.functional.pad(conv_states, (max(0, kept - conv_states.shape[-1]), 0))
        kept_states = self.states[key]
        full = torch.cat([kept_states, conv_states], -1)
        kept_states.copy_(full[..., -kept_states.shape[-1] :])
        return full

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Replace a recurrent state."""
        key = (STATE, state_idx)
        if self.notes:
            self.shapes[key] = (tuple(recurrent_states.shape[1:]), recurrent_states.dtype)
            return recurrent_states
        return self.states[key].copy_(recurrent_states)


def mixers(model: nn.Module) -> dict[str, nn.Module]:
    """By name, the modules that keep all they keep of earlier tokens in convolution and recurrent
    states of a cache. An attention layer that does so besides its keys and values is none."""
    return {name: module for name, module in model.named_modules() if _is_mixer(module)}


def cache_argument(module: nn.Module) -> str:
    """The name by which a mixer is handed its cache."""
    parameters = inspect.signature(type(module).forward).parameters
    return next(name for name in _CACHES if name in parameters)


def has_state(module: nn.Module) -> bool:
    """Whether a module keeps a recurrent state, and not inputs of a convolution alone."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "update_recurrent_state" in code.co_names


def _is_mixer(module: nn.Module) -> bool:
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None:
        return False
    names = set(code.co_names)
    cached = [name for name in _CACHES if name in inspect.signature(forward).parameters]
    return bool(names & _KEEPS) and len(cached) == 1 and "update" not in names


def interpose(model: nn.Module, runs: Runs) -> list[nn.Module]:
    """Have `runs` called in the place of each mixer's forward; the mixers, by number.

    Raises:
        ModelError: when the model runs, a mixer is handed something that cannot be cut by tokens.
    """
    found = list(mixers(model).values())
    for number, module in enumerate(found):
        module.forward = _interposed(number, module, runs)  # type: ignore[method-assign]
    return found


def _interposed(number: int, module: nn.Module, runs: Runs) -> Callable[..., Tensor]:
    own = module.forward
    signature = inspect.signature(own)
    name = cache_argument(module)
    scans = inspect.unwrap(type(module).forward).__globals__
    if "mamba_selective_scan" in scans:
        scans["mamba_selective_scan"] = _continuing(scans["mamba_selective_scan"])
    if "mamba2_selective_state_update" in scans:
        update = scans["mamba2_selective_state_update"]
        scans["mamba2_selective_state_update"] = _bounding(update)
    low, high = getattr(module, "time_step_limit", None) or (0.0, math.inf)
    bounds = (float(low), float(high)) if low > 0 or high < math.inf else None

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        bound = signature.bind(*args, **kwargs)
        given = dict(bound.arguments)
        given |= given.pop("kwargs", {})
        given.pop(name, None)
        hidden = given.pop("hidden_states")
        strange = [k for k, v in given.items() if k not in _IGNORED and isinstance(v, Tensor)]
        if strange:
            raise ModelError(
                f"{type(module).__name__} is handed {', '.join(sorted(strange))}, which hocket "
                "does not cut by sequences"
            )
        rest = {k: v for k, v in given.items() if k not in _IGNORED}

        def call(tokens: Tensor, cache: MixerCache | None) -> Tensor:
            state = None if cache is None else cache.get_recurrent_state(0)
            with _Continued(state, bounds):
                out = own(tokens, **{name: cache}, **rest)
            if isinstance(out, Tensor):
                return out
            raise ModelError(
                f"{type(module).__name__} keeps a recurrent state and returns several tensors, "
                "which hocket does not cut by sequences"
            )

        return runs(number, call, hidden)

    return forward


class _Continued:
    """Within, scans of Mamba's first form continue a state [B, D, N], or, of a mixer with several
    heads, [B, heads, D, N], one head a scan; and step sizes of its second form have `bounds`."""

    current: Tensor | None = None
    head = 0
    bounds: tuple[float, float] | None = None

    def __init__(self, state: Tensor | None, bounds: tuple[float, float] | None) -> None:
        self.state = state  # which the mixer writes in place only after its scans
        self.limits = bounds

    def __enter__(self) -> None:
        _Continued.current, _Continued.head = self.state, 0
        _Continued.bounds = self.limits

    def __exit__(self, *_: object) -> None:
        _Continued.current = _Continued.bounds = None


def _continuing(scan: Callable[..., Any]) -> Callable[..., Any]:
    """A scan that begins at the state of `_Continued`, if there is one."""
    if hasattr(scan, "continues"):
        return scan

    def scanned(  # noqa: PLR0917  as transformers calls it
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        z: Tensor | None = None,
        **options: Any,
    ) -> Any:
        state = _Continued.current
        if state is None:
            return scan(hidden_states, dt, A, B, C, D, z=z, **options)
        if state.dim() == A.dim() + 2:
            state, _Continued.head = state[:, _Continued.head], _Continued.head + 1
        wanted = options.pop("return_last_state", False)
        out, last = scan(hidden_states, dt, A, B, C, D, z=None, return_last_state=True, **options)
        bias = options.get("delta_bias")
        steps = dt if bias is None else dt + bias.to(dt.dtype)[..., None]
        if options.get("delta_softplus"):
            steps = nn.functional.softplus(steps)
        decay = torch.exp(A[None, :, None, :] * steps.float().cumsum(-1)[..., None])
        kept = decay * state.float()[:, :, None, :]
        out = out + torch.einsum("bdsn,bns->bds", kept, C.float()).to(out.dtype)
        last = last + kept[:, :, -1].to(last.dtype)
        if z is not None:
            out = out * nn.functional.silu(z)
        return (out, last) if wanted else out

    scanned.continues = True  # type: ignore[attr-defined]
    return scanned


def _bounding(update: Callable[..., Any]) -> Callable[..., Any]:
    """An update by one token whose step sizes have the bounds of `_Continued`, if there are any."""
    if hasattr(update, "bounds"):
        return update

    def updated(
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,
        *others: Any,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        **options: Any,
    ) -> Any:
        bounds = _Continued.bounds
        if bounds is not None:
            dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
            dt = (nn.functional.softplus(dt) if dt_softplus else dt).clamp(*bounds)
            dt_bias, dt_softplus = None, False
        options |= {"dt_bias": dt_bias, "dt_softplus": dt_softplus}
        return update(state, hidden_states, dt, *others, **options)

    updated.bounds = True  # type: ignore[attr-defined]
    return updated
