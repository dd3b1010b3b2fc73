"""OutOfMemory of a served replica: what filled a rank's device, and the flags that free most.

    weights               parameters of the stage
    key/value cache       the blocks of `engine.cache`
    activations           the rest: steps, captured decode steps, logits

Not executed on a GPU yet: tests raise torch's error where a step allocates, on a CPU.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from hocket.runtime.memory_report import (
    OwnedBytes,
    activations,
    device_state,
    living,
    out_of_memory_report,
    owner_of,
    unnamed,
)
from hocket.serving.engine.cache import PagedCache
from hocket.spec.serving import ServeOptions

OTHER = "more ranks: a layout with a larger pp or tp"
"""The hint where no flag frees anything."""
SMALLER_CACHE = 0.1
"""Share of the cache that is given back beyond what was requested."""


def server_owners(device: torch.device, allocated: int) -> list[OwnedBytes]:
    """Who holds the memory of a rank's device; `allocated` in all, 0 if that is not known."""
    seen: set[int] = set()
    # (A proxy of something that is gone has a type, and nothing else.)
    caches = [each for each in gc.get_objects() if issubclass(type(each), PagedCache)]
    pools = itertools.chain.from_iterable((*cache.keys, *cache.values) for cache in caches)
    weights = (each for each in living() if isinstance(each, nn.Parameter))
    found = [
        owner_of("weights", unnamed(weights), device, seen),
        owner_of("key/value cache", unnamed(pools), device, seen),
    ]
    return [*found, activations(found, allocated, seen, device)]


def server_remedies(
    options: ServeOptions, found: Sequence[OwnedBytes], requested: int
) -> list[tuple[str, int]]:
    """Flags of `hocket serve` and about how many bytes each frees on this rank, the most first.

    Args:
        options: with every size chosen, as a rank gets them.
        found: of `server_owners`.
        requested: bytes of the allocation that failed.
    """
    held = {owner.name: owner.nbytes for owner in found}
    fixes: list[tuple[str, int]] = []
    tokens, rows = options.max_num_batched_tokens or 1, options.max_num_seqs or 1
    if tokens > 1 and held["activations"] + requested:
        half = (held["activations"] + requested) // 2
        fixes.append((f"--max-num-batched-tokens {tokens // 2}", half))
    cache = held["key/value cache"]
    smaller = int(cache * (1 - SMALLER_CACHE)) - requested
    if smaller > 0:
        fixes.append((f"--cache-memory {max(1, smaller // 10**6)}MB", cache - smaller))
    if rows > 1 and not cache:  # while the model is built, before the cache is made
        fixes.append((f"--max-num-seqs {rows // 2}", requested // 2))
    fixes.sort(key=lambda each: -each[1])
    return [(flags, saved) for flags, saved in fixes if saved >= 1]


@contextlib.contextmanager
def explaining(rank: int, device: torch.device, options: ServeOptions) -> Iterator[None]:
    """Within, torch's out-of-memory error becomes one that says what to do.

    Raises:
        RankMemoryError: numbers, owners, and flags of `hocket serve` to paste.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:  # its frames still hold what was alive
        state = device_state(error, device)
        found = server_owners(device, state.allocated)
        fixes = server_remedies(options, found, state.requested)
        raise out_of_memory_report(rank, state, found, fixes, OTHER) from error
