"""Scans and convolutions of split sequences, through the functions that transformers' mixers call.

A recurrent mixer (Mamba2, Gated DeltaNet, Kimi Delta Attention) or a short convolution computes two
things that look at earlier tokens: `causal_conv1d_fn`, and the scan of its family. Both are
functions of its module. Here they are replaced by functions that cut a rank's tokens into its two
chunks and ask `ContextParallel` what came before each; while no mixer of a split model runs, they
are transformers' own. No model code changes. A server's prompts are cut into one run of tokens a
rank, whose convolutions find the inputs before them in the cache (`continuing`).

All chunks of a sequence are scanned at once, each from zero. Scans are linear in the state h that
they begin at, so what h adds is added afterwards:

    Mamba2       y_t += exp(a_1 + ... + a_t) C_t h        a: step sizes times A
                 T = exp(a_1 + ... + a_S)                 (Dao and Gu 2024, section 6)
    delta rule   y_t += q_t (T_t ... T_1) h               T_t = decay (I - beta k k')
                 (Yang et al. 2024, Gated Delta Networks). The scan itself finds the products: its
                 values are widened by Dk columns of zeros, and these begin at the identity

Legend: B rows, L tokens of this rank, C channels, H heads, P and N sizes of a Mamba2 state, Dk and
Dv of that of a delta rule.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hocket.models.recurrent import CONV, MixerCache, cache_argument, has_state
from hocket.spec.errors import ModelError
from hocket.spec.model_shape import Handed

ATTRIBUTE = "context_parallel"
"""Of a module: what it goes through to other ranks (`runtime.context_parallel.apply`)."""

_RUNNING: list[Any] = []
"""What the mixers that are running go through; None: the model of one is not split."""


def splits_state(module: nn.Module) -> bool:
    """Whether a module hands all that it hands on along the sequence through functions that are
    replaced here."""
    forward = inspect.unwrap(type(module).forward)
    code = getattr(forward, "__code__", None)
    if code is None or "causal_conv1d_fn" not in code.co_names:
        return False
    scans = set(code.co_names) & set(_SCANS)
    return bool(scans) or not has_state(module)


def split_states(model: nn.Module) -> None:
    """Let mixers hand their states over context ranks, where `splits_state` finds any."""
    for module in model.modules():
        if not splits_state(module):
            continue
        replace_scans(module)
        if _begins not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_begins)
            module.register_forward_hook(_ends, always_call=True)


def replace_scans(mixer: nn.Module) -> None:
    """Replace the functions that a mixer calls; each is its own until something is running."""
    names = inspect.unwrap(type(mixer).forward).__globals__
    for name, replaced in _REPLACED.items():
        own = names.get(name)
        if own is not None and not hasattr(own, "over_chunks"):
            names[name] = _over_chunks(own, replaced)


def state_sizes(model: nn.Module, hidden_size: int) -> dict[str, Handed]:
    """What each module that `splits_state` names hands on from chunk to chunk, by name; the model
    is on the meta device."""
    found = {}
    for name, module in model.named_modules():
        if not splits_state(module):
            continue
        cache = MixerCache(None)
        weight = next(module.parameters())
        linear = any(isinstance(each, nn.Linear) for each in module.modules())
        # A convolution alone may be over keys and values (Inkling).
        width = hidden_size if linear else weight.shape[0]
        hidden = torch.empty(1, 1, width, dtype=weight.dtype, device=weight.device)
        with torch.no_grad():
            type(module).forward(module, hidden, **{cache_argument(module): cache})
        inputs = state = width = 0
        for (kind, _), (sizes, _) in cache.shapes.items():
            if kind == CONV:
                *channels, taps = sizes
                inputs += math.prod(channels) * (taps - 1)
                width = max(width, taps - 1)
            else:
                state += math.prod(sizes)
        found[name] = Handed(inputs=inputs, state=state, width=width)
    return found


@contextmanager
def continuing(cache: Any) -> Iterator[None]:
    """Within, scans continue from what `cache.previous_states` returns. None: from what they are
    given."""
    _RUNNING.append(cache)
    try:
        yield
    finally:
        _RUNNING.pop()


def _begins(module: nn.Module, args: Any) -> None:
    _RUNNING.append(getattr(module, ATTRIBUTE, None))


def _ends(module: nn.Module, args: Any, output: Any) -> None:
    _RUNNING.pop()


def _over_chunks(own: Callable[..., Any], replaced: Callable[..., Any]) -> Callable[..., Any]:
    def function(*args: Any, **kwargs: Any) -> Any:
        context = _RUNNING[-1] if _RUNNING else None
        if context is None or context.axis.size == 1:
            return own(*args, **kwargs)
        if kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None:
            raise ModelError("its scans are given packed documents, which cp does not cut")
        return replaced(own, context, *args, **kwargs)

    function.over_chunks = True  # type: ignore[attr-defined]
    return function


def _chunks(tensor: Tensor, count: int) -> Tensor:
    """[B, L, ...] to [count B, L/count, ...]: front chunks of all rows, then back chunks."""
    return torch.unflatten(tensor, 1, (count, -1)).transpose(0, 1).flatten(0, 1)


def _whole(chunks: Tensor, count: int) -> Tensor:
    """The inverse of `_chunks`."""
    return torch.unflatten(chunks, 0, (count, -1)).transpose(0, 1).flatten(1, 2).contiguous()


def _convolution(
    own: Callable[..., Tensor],
    context: Any,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`causal_conv1d_fn`: [B, C, L] to the same."""
    if context.chunks == 1:  # its cache has put the inputs before them
        return own(hidden_states, weight, bias, **options)
    width = weight.shape[-1] - 1
    before = context.previous_inputs(hidden_states, width)
    chunks = torch.unflatten(hidden_states, -1, (2, -1)).movedim(-2, 0)
    inputs = torch.cat([before, chunks], -1).flatten(0, 1)
    out = own(inputs, weight, bias, **options)[..., width:]
    return torch.unflatten(out, 0, (2, -1)).movedim(0, -2).flatten(-2).contiguous()


def _mamba2(  # noqa: PLR0917  as transformers calls it
    own: Callable[..., Any],
    context: Any,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **options: Any,
) -> Any:
    """`mamba2_chunk_scan`: inputs [B, L, H, P], step sizes [B, L, H], A [H], B and C [B, L, G, N]
    to [B, L, H, P], and the last states [B, H, P, N] where they are asked for."""
    count = _chunks_of(context, initial_states, return_final_states)
    hidden_states, dt, B, C = (_chunks(each, count) for each in (hidden_states, dt, B, C))
    out, ends = own(
        hidden_states, dt, A, B, C, chunk_size=chunk_size, dt_bias=dt_bias,
        dt_softplus=dt_softplus, dt_limit=dt_limit, return_final_states=True, **options,
    )  # fmt: skip
    steps = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    steps = (nn.functional.softplus(steps) if dt_softplus else steps).clamp(*dt_limit)
    decay = (A.to(ends.dtype) * steps.to(ends.dtype)).cumsum(1).exp()
    last = decay[:, -1, :, None, None]
    before = context.previous_states(
        torch.unflatten(ends, 0, (count, -1)), torch.unflatten(last, 0, (count, -1))
    ).flatten(0, 1)
    groups = C.shape[2]
    begin = torch.unflatten(before, 1, (groups, -1))
    more = torch.einsum("blgn,bghpn->blghp", C.to(ends.dtype), begin).flatten(2, 3)
    found = _whole(out + (more * decay[..., None]).to(out.dtype), count)
    return (found, ends + last * before) if return_final_states else found


def _delta_rule(  # noqa: PLR0917  as transformers calls it
    own: Callable[..., tuple[Tensor, Tensor]],
    context: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`torch_chunk_gated_delta_rule` and Kimi's: queries and keys [B, L, Hk, Dk], values
    [B, L, H, Dv], decays [B, L, H] (or of each key entry), beta [B, L, H] to [B, L, H, Dv], and
    the last states [B, H, Dk, Dv] where they are asked for."""
    count = _chunks_of(context, initial_state, output_final_state)
    query, key, value, g, beta = (_chunks(each, count) for each in (query, key, value, g, beta))
    keys, values = key.shape[-1], value.shape[-1]
    wide = torch.cat([value, value.new_zeros(*value.shape[:-1], keys)], -1)
    begin = torch.eye(keys, dtype=torch.float32, device=value.device)
    begin = nn.functional.pad(begin, (values, 0))
    begin = begin.expand(value.shape[0], value.shape[2], -1, -1).contiguous()
    out, ends = own(
        query, key, wide, g=g, beta=beta, initial_state=begin, output_final_state=True, **options
    )
    ends, factor = (
        torch.unflatten(each, 0, (count, -1)) for each in (ends[..., :values], ends[..., values:])
    )
    before = context.previous_states(ends, factor, matrix=True)
    more = torch.einsum("blhk,bhkv->blhv", out[..., values:].to(before.dtype), before.flatten(0, 1))
    found = _whole(out[..., :values] + more.to(out.dtype), count)
    return found, (ends + factor @ before).flatten(0, 1) if output_final_state else None


def _fused(own: Callable[..., Any], context: Any, *args: Any, **kwargs: Any) -> None:
    """A kernel for a whole mixer: none, so that the mixer calls its convolution and its scan."""


def _chunks_of(context: Any, initial: Tensor | None, returned: bool) -> int:
    """Chunks of a sequence on a rank. A cache, which a server's alone has, is of one."""
    if initial is not None or returned != (context.chunks == 1):
        raise ModelError("its scan continues a cache, whose tokens cp does not split")
    return int(context.chunks)


_SCANS: dict[str, Callable[..., Any]] = {
    "mamba2_chunk_scan": _mamba2,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
}
_REPLACED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolution,
    "mamba2_split_conv1d_scan_combined": _fused,
    **_SCANS,
}
