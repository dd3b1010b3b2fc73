"""ServeOptions: every option of a server besides model and layout. Names are the flags'.

The engine's sizes are those of one replica: data-parallel replicas are worlds of their own. Where
experts are placed over several data ranks, those are one replica, and sizes are of each of them.
"""

from __future__ import annotations

import dataclasses
import math

from hocket.spec.layout import Layout

BLOCK_SIZE = 16
"""Tokens of a block on CPU, and in estimates that are made before a GPU's kernels are chosen."""

SPLIT_TOKENS = 16
"""Tokens of each context rank from which on a step is split; of fewer, gathering costs more than
computing them on every rank."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What a server is started with; kept in its run folder. Holds no secret.

    Attributes:
        host: address to listen on; any other than loopback needs --api-key-file or --insecure.
        port: port of the API; 0 picks a free one.
        metrics_port: port of Prometheus metrics, on the same address; 0 picks a free one (default:
            --port + 1).
        api_key_file: file with one `KEY` or `NAME KEY` per line; every route but /health, /ready
            and /docs then needs a key.
        insecure: allow an address other than loopback without keys.
        quantization: precision of the weights of linear layers and experts, on GPUs of compute
            capability 8.9 or higher (default: that of --dtype). One of: fp8.
        kv_cache_dtype: precision of the key/value cache: auto (that of --dtype), bf16, or fp8
            (e4m3, half the bytes; on CPUs and on GPUs of compute capability 8.9 or higher). One of:
            auto, bf16, fp8.
        redundant_experts: copies of the most used experts in each layer, over all ranks of ep, to
            balance their load.
        rebalance_steps: steps between placements of these copies by the load since the last one.
        served_model_name: model name in the API (default: the name of the model folder).
        max_num_batched_tokens: maximum number of tokens per step of a replica, with ep of each of
            its data ranks (default: 512 on CPU, 2048 on CUDA).
        max_model_len: maximum number of tokens of a request, prompt and answer (default: the
            model's positions).
        max_num_seqs: maximum number of running requests per replica, with ep per data rank
            (default: 64 on CPU, 256 on CUDA).
        block_size: tokens per block of the key/value cache (default: 16 on CPU; on CUDA chosen for
            the attention kernels).
        cache_memory: key/value cache per rank, as in 2GB (default: on CPU an equal fraction of half
            of the free memory, on CUDA 0.95 of the free memory less the largest step; at most what
            twice --max-num-seqs requests of full length need).
        gpu_memory_utilization: fraction of each GPU's memory that may be in use, by weights, steps,
            CUDA graphs, cache and other processes; sets the cache, instead of --cache-memory.
        num_blocks: key/value cache blocks per replica, instead of --cache-memory.
        max_queue: maximum number of queued requests per replica, in addition to those that can
            start at once; more are rejected with status 429.
        no_prefix_cache: disable reuse of cached prompt prefixes.
        deadline: seconds from arrival to cancellation of a request (default: no limit).
        drain_seconds: seconds that running requests may take to finish at shutdown.
        generation_config: sampling defaults: auto (the model's generation_config.json) or none
            (OpenAI's). One of: auto, none.
        chat_template_file: chat template that replaces the tokenizer's own: a Jinja file, or one of
            chatml, llama-3, zephyr.
        max_restarts: consecutive restarts of a replica whose ranks died.
        reload_dir: allow POST /v1/models/reload to load weights of models below this folder, and
            SIGHUP to read the served ones again, one replica after the other (default: neither).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    metrics_port: int | None = None
    api_key_file: str | None = None
    insecure: bool = False
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    redundant_experts: int = 0
    rebalance_steps: int = 1000
    served_model_name: str | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None
    cache_memory: str | None = None
    gpu_memory_utilization: float | None = None
    num_blocks: int | None = None
    max_queue: int = 256
    no_prefix_cache: bool = False
    deadline: float | None = None
    drain_seconds: float = 30.0
    generation_config: str = "auto"
    chat_template_file: str | None = None
    max_restarts: int = 8
    reload_dir: str | None = None


def cached_bytes(kv_cache_dtype: str) -> int:
    """Bytes of an entry of the cache; 0: as of what attention computes in."""
    return 1 if kv_cache_dtype == "fp8" else 0


def replica_layout(layout: Layout) -> Layout:
    """One replica of a server: the fewest data ranks that together hold the model. Without expert
    parallelism that is one; `dp4.ep2` has two replicas of two data ranks each, which exchange
    tokens in every layer of experts."""
    ranks = layout.ep * layout.expert_tp
    dp = ranks // math.gcd(ranks, layout.cp * layout.tp)
    return dataclasses.replace(layout, dp=dp, microbatches=1)


def num_replicas(layout: Layout) -> int:
    """Replicas of a server of this layout."""
    return layout.dp // replica_layout(layout).dp


def snapshots_of(max_num_seqs: int) -> int:
    """Snapshots of recurrent states that a replica keeps for its prefix cache: one for every two
    requests that run at once, at least 4."""
    return max(4, max_num_seqs // 2)
