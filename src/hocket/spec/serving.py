"""ServeOptions: every option of a server besides model and layout. Names are the flags'.

The engine's sizes are those of one replica: data-parallel replicas are worlds of their own.
"""

from __future__ import annotations

import dataclasses

BLOCK_SIZE = 16
"""Tokens of a block on CPU, and in estimates that are made before a GPU's kernels are chosen."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What a server is started with; kept in its run folder. Holds no secret.

    Attributes:
        host: address that requests come to; one that is not loopback needs keys.
        port: of requests; 0 takes a free one.
        metrics_port: of Prometheus metrics, on the same address; 0 takes a free one. None: the
            port after `port`.
        api_key_file: a file with one key a line, or a name and a key; then every route but
            /health and /ready needs one of them.
        insecure: open an address that is not loopback without keys.
        served_name: what clients call the model. None: the name of its folder.
        max_batch_tokens: tokens that one step of a replica computes. None: 512 on CPU, 2048 on
            CUDA.
        max_model_len: tokens of a request, prompt and answer. None: the model's positions.
        max_rows: requests that a replica runs at once. None: 64 on CPU, 256 on CUDA.
        block_size: tokens of one block of the key/value cache. None: 16 on CPU; on CUDA what the
            attention kernels read, chosen when the replica starts.
        cache_memory: of each rank's key/value cache, as in 2GB. None: this rank's part of half of
            the memory that is free on CPU, 0.95 of it less the largest step on CUDA; at most twice
            what `max_rows` requests of full length take.
        num_blocks: of each replica's cache; instead of `cache_memory`.
        max_waiting: requests that a replica lets wait beside those that free places of `max_rows`
            take at once; more are sent away with a 429.
        no_prefix_cache: compute shared prompts again.
        deadline: seconds from its arrival after which a request is ended. None: none.
        drain_seconds: seconds that requests have to end when the server is asked to.
        generation_config: auto: sampling that a request leaves open is as the model's
            generation_config.json says; none: as OpenAI's.
        chat_template_file: a Jinja template, instead of the tokenizer's own.
        max_restarts: times in a row that a replica is started again after its ranks died.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    metrics_port: int | None = None
    api_key_file: str | None = None
    insecure: bool = False
    served_name: str | None = None
    max_batch_tokens: int | None = None
    max_model_len: int | None = None
    max_rows: int | None = None
    block_size: int | None = None
    cache_memory: str | None = None
    num_blocks: int | None = None
    max_waiting: int = 256
    no_prefix_cache: bool = False
    deadline: float | None = None
    drain_seconds: float = 30.0
    generation_config: str = "auto"
    chat_template_file: str | None = None
    max_restarts: int = 8
