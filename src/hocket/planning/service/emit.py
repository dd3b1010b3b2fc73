"""Emit: a deployment as the command of another server, or why that server cannot run it.

Rules: vllm/config/{parallel,scheduler,model,cache}.py and engine/arg_utils.py of vLLM 0.33.0;
sglang/srt/arg_groups/{parallel_hook,validation_hook}.py of SGLang 0.5.23.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from hocket.spec.errors import OptionError
from hocket.spec.layout import divisors

VLLM, SGLANG = "vLLM 0.33.0", "SGLang 0.5.23"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Deployment:
    """What a server's command is written from.

    Attributes:
        model: a name on the Hugging Face Hub or a directory; `MODEL` where neither is known.
        tp, pp: of a replica. replicas: independent ones.
        ep: data ranks of a replica, over which its experts are divided.
        redundant: copies of experts in each layer.
        gpu: kind. gpus_per_node: of a node.
        tokens: of the longest request. max_sequences: at once in a data rank.
        max_num_batched_tokens: of one step of a data rank.
        usable: share of a GPU's memory.
        precision: of weights. expert_precision: of the experts' weights; None: the same.
        quantized: the checkpoint itself is stored so. dequantized: it has fewer bits.
        cache_precision: of keys and values.
        heads, layers, experts: of the model; 0 experts where it is dense.
    """

    model: str
    tp: int
    pp: int
    replicas: int
    gpu: str
    gpus_per_node: int
    tokens: int
    max_sequences: int
    max_num_batched_tokens: int
    usable: float
    precision: str
    cache_precision: str
    heads: int
    layers: int
    experts: int = 0
    quantized: bool = False
    dequantized: bool = False
    expert_precision: str | None = None
    ep: int = 1
    redundant: int = 0

    @property
    def num_gpus(self) -> int:
        return self.tp * self.pp * self.ep * self.replicas

    @property
    def nodes(self) -> int:
        """Nodes of one data rank."""
        return -(-self.tp * self.pp // self.gpus_per_node)


def server_command(server: str, deployment: Deployment) -> str:
    """The command of `vllm` or `sglang`.

    Raises:
        OptionError: ranks or layers that the server cannot divide so.
    """
    one = deployment
    if one.heads % one.tp:
        raise OptionError(f"{server} divides {one.heads} heads over tp {one.tp} evenly")
    if one.ep > 1 and one.nodes > 1:
        raise OptionError(
            f"{server}: a data rank of tp {one.tp} x pp {one.pp} is larger than a node of "
            f"{one.gpus_per_node}, and {one.ep} of them divide the experts",
            hint=f"--pin tp={one.gpus_per_node} pp=1",
        )
    if one.nodes > 1 and one.tp * one.pp % one.nodes:
        raise OptionError(
            f"{server} starts as many ranks on each node; a replica has {one.tp * one.pp} on "
            f"{one.nodes} nodes",
            hint=f"--pin tp={one.gpus_per_node}",
        )
    return _WRITERS[server](one)


def _text(
    title: str, one: Deployment, command: str, flags: dict[str, Any], notes: Sequence[str]
) -> str:
    lines = [f"# {title}: {one.num_gpus} {one.gpu}", *(f"# {note}" for note in notes)]
    words = [command]
    for name, value in flags.items():
        if value is not None and value is not False:
            words.append(name if value is True else f"{name} {value}")
    return "\n".join([*lines, " \\\n  ".join(words)]) + "\n"


def _weights(one: Deployment, notes: list[str]) -> None:
    named = one.precision not in ("bf16", "fp16", "fp8") or one.expert_precision is not None
    if one.dequantized or (named and not one.quantized):
        few = one.expert_precision or one.precision
        notes.append(f"the plan is for {few} weights: give a checkpoint made so")


def _vllm(one: Deployment) -> str:
    notes: list[str] = []
    _weights(one, notes)
    # With experts its data ranks are one group, and over nodes its data ranks share a start.
    joined = one.replicas > 1 and not one.experts and one.nodes == 1
    if one.replicas > 1 and not joined:
        why = ": --data-parallel-size would divide the experts over all replicas"
        notes.append(f"start {one.replicas} of these behind a router{why if one.experts else ''}")
    ranks = one.replicas if joined else one.ep
    flags: dict[str, Any] = {
        "--tensor-parallel-size": one.tp,
        "--pipeline-parallel-size": one.pp,
        "--data-parallel-size": ranks if ranks > 1 else None,
        "--enable-expert-parallel": one.ep > 1,
        "--enable-eplb": one.redundant > 0,
        "--eplb-config.num_redundant_experts": one.redundant or None,
    }
    if one.nodes > 1:
        flags |= {
            "--nnodes": one.nodes,
            "--node-rank": "$NODE_RANK",
            "--master-addr": "$HEAD",
        }
        notes.append("on each node, NODE_RANK from 0; add --headless where it is not 0")
    elif ranks * one.tp * one.pp > one.gpus_per_node:
        most = one.gpus_per_node // (one.tp * one.pp)
        local = max(n for n in divisors(ranks) if n <= most)
        flags |= {
            "--data-parallel-size-local": local,
            "--data-parallel-address": "$HEAD",
            "--data-parallel-rpc-port": 29550,
        }
        notes.append(f"on node I > 0: add --headless --data-parallel-start-rank $(({local} * I))")
    flags |= {
        "--max-model-len": one.tokens,
        "--max-num-seqs": min(one.max_sequences, one.max_num_batched_tokens),
        "--max-num-batched-tokens": one.max_num_batched_tokens,
        "--enable-chunked-prefill": True,
        "--gpu-memory-utilization": f"{one.usable:g}",
        "--dtype": "float16" if one.precision == "fp16" else None,
        "--quantization": "fp8_per_tensor"
        if one.precision == "fp8" and not one.quantized
        else None,
        "--kv-cache-dtype": "fp8" if one.cache_precision == "fp8" else None,
    }
    split = ""
    if one.pp > 1 and one.layers % one.pp:
        split = f"VLLM_PP_LAYER_PARTITION={_spread(one)} "
    return _text(VLLM, one, f"{split}vllm serve {shlex.quote(one.model)}", flags, notes)


def _spread(one: Deployment) -> str:
    """Layers of each stage as a deployment is estimated: the longest first, none shorter by 2."""
    each, rest = divmod(one.layers, one.pp)
    return ",".join(str(each + (stage < rest)) for stage in range(one.pp))


def _sglang(one: Deployment) -> str:
    notes: list[str] = []
    _weights(one, notes)
    together = one.num_gpus <= one.gpus_per_node and one.ep == 1
    if one.replicas > 1 and not together:
        notes.append(f"start {one.replicas} of these behind a router")
    flags: dict[str, Any] = {
        "--model-path": shlex.quote(one.model),
        # Its tensor ranks are all ranks of a stage, and attention divides them by data ranks.
        "--tp-size": one.tp * one.ep,
        "--pp-size": one.pp if one.pp > 1 else None,
        "--dp-size": one.replicas if together else None,
        "--attn-dp-size": one.ep if one.ep > 1 else None,
        "--ep-size": one.tp * one.ep if one.ep > 1 else None,
        "--enable-eplb": one.redundant > 0,
        "--ep-num-redundant-experts": one.redundant or None,
    }
    flags = {k: v for k, v in flags.items() if (k, v) != ("--dp-size", 1)}
    nodes = -(-one.tp * one.pp * one.ep // one.gpus_per_node)
    if nodes > 1:
        flags |= {
            "--nnodes": nodes,
            "--node-rank": "$NODE_RANK",
            "--dist-init-addr": "$HEAD:25000",
        }
        notes.append("on each node, NODE_RANK from 0")
    flags |= {
        "--context-length": one.tokens,
        # Of all data ranks together: it divides both by --attn-dp-size.
        "--max-running-requests": one.max_sequences * one.ep,
        "--chunked-prefill-size": one.max_num_batched_tokens * one.ep,
        "--mem-fraction-static": f"{one.usable:g}",
        "--dtype": "float16" if one.precision == "fp16" else None,
        "--quantization": "fp8" if one.precision == "fp8" and not one.quantized else None,
        "--kv-cache-dtype": "fp8_e4m3" if one.cache_precision == "fp8" else None,
    }
    split = ""
    if one.pp > 1 and one.layers % one.pp:
        split = f"SGLANG_PP_LAYER_PARTITION={_spread(one)} "
    return _text(SGLANG, one, f"{split}python -m sglang.launch_server", flags, notes)


_WRITERS: dict[str, Callable[[Deployment], str]] = {"vllm": _vllm, "sglang": _sglang}

SERVERS = tuple(_WRITERS)
"""Servers whose commands can be printed."""
