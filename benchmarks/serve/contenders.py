"""Contenders: what is measured, how each is started, and how it is asked.

Everybody has all processors of the machine, the client's share included. Threads are what served
each best when it was tried (docs/reference/serving-performance.md); the table's names say them.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serve.client import Ask
from benchmarks.serve.workload import text

ROWS = 64
"""Requests that a contender may run at the same time: as many as the largest load has."""
CACHED = 64 * 1024
"""Tokens that its cache may hold: room for all requests of the largest load, and for prefixes."""
CHUNK = 2048
"""Tokens of one step at most, where that can be said."""
NAMES = {"fp32": "float32", "bf16": "bfloat16"}
"""Of dtypes, as vLLM has them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """One thing to measure.

    Attributes:
        name: as tables print it.
        kind: "server" or "offline".
        project: "hocket", "vllm", "transformers" or "null"; whose interpreter runs it.
        threads: CPU threads per process that computes.
        layout: hocket's, or "".
        dtype: of its weights, by hocket's name.
        method: of an offline contender, what it calls.
        requires: packages without which it is absent.
    """

    name: str
    kind: str
    project: str
    threads: int = 1
    layout: str = ""
    dtype: str = "fp32"
    method: str = ""
    requires: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """What it finds in its environment."""
        common = {
            "OMP_NUM_THREADS": str(self.threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_VERBOSITY": "error",
        }
        if self.project != "vllm":
            return common
        return common | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # It binds its threads to cores unless told; others' threads are not bound either.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }

    def command(self, python: str, folder: Path, port: int, run: Path) -> list[str]:
        """The words that start a server for the model in `folder`; hocket's run folder is `run`."""
        if self.project == "null":
            return [sys.executable, "-m", "benchmarks.serve.null_server", str(port)]
        scripts = Path(python).parent
        if self.project == "vllm":
            return [
                *(str(scripts / "vllm"), "serve", str(folder), "--served-model-name", "m"),
                *("--host", "127.0.0.1", "--port", str(port), "--dtype", NAMES[self.dtype]),
                *("--max-num-seqs", str(ROWS), "--max-model-len", "512"),
                *("--max-num-batched-tokens", str(CHUNK), "--disable-uvicorn-access-log"),
            ]
        if self.project == "transformers":
            return [
                *(str(scripts / "transformers"), "serve", str(folder), "--continuous-batching"),
                *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu"),
                *("--cb-num-blocks", str(CACHED // 32), "--cb-block-size", "32"),
                *("--cb-max-batch-tokens", str(CHUNK), "--log-level", "error"),
            ]
        return [
            *(sys.executable, "-m", "hocket", "serve", str(folder), "--served-model-name", "m"),
            *("--layout", self.layout, "--dtype", self.dtype, "--run", str(run)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--device", "cpu", "--threads", str(self.threads), "--max-num-seqs", str(ROWS)),
            *("--max-model-len", "512", "--max-num-batched-tokens", str(CHUNK)),
        ]

    def ask(self, folder: Path, prompt: list[int], new: int) -> Ask:
        """The request for `new` tokens after `prompt`, greedily, as a stream."""
        body: dict[str, Any] = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": new,
            "temperature": 0,
            "stream": True,
        }
        if self.project == "transformers":
            # Its completions take text alone, and refuse fields they do not know.
            body |= {"model": str(folder), "prompt": text(prompt)}
        else:
            body["ignore_eos"] = True
        return Ask("/v1/completions", body)


def _count(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def _peers(threads: int) -> list[Contender]:
    """The peers with as many threads."""
    hf, vllm = ("torch", "transformers"), ("torch", "vllm")
    kinds: list[tuple[str, str, str, str, tuple[str, ...]]] = [
        ("generate", "offline", "transformers", "generate", hf),
        ("generate_batch", "offline", "transformers", "generate_batch", hf),
        ("transformers serve", "server", "transformers", "", (*hf, "fastapi", "uvicorn")),
        ("vLLM offline", "offline", "vllm", "vllm", vllm),
        ("vLLM serve", "server", "vllm", "", vllm),
    ]
    return [
        Contender(
            name=f"{name}, {_count(threads)}",
            kind=kind,
            project=project,
            method=method,
            threads=threads,
            requires=requires,
        )
        for name, kind, project, method, requires in kinds
    ]


def _ours() -> list[Contender]:
    """hocket: one rank, and each way of splitting two."""
    split = [("dp1", 1), ("dp1", 2), ("tp2", 1), ("pp2", 1), ("dp2", 1)]
    served = [
        Contender(
            name=f"hocket serve {layout}, {_count(threads)} a rank",
            kind="server",
            project="hocket",
            layout=layout,
            threads=threads,
        )
        for layout, threads in split
    ]
    offline = [
        Contender(
            name=f"hocket.LLM {layout}, {_count(threads)} a rank",
            kind="offline",
            project="hocket",
            method="hocket",
            layout=layout,
            threads=threads,
        )
        for layout, threads in split
    ]
    return served + offline


def _in_bf16(several: Sequence[Contender]) -> list[Contender]:
    """Those servers among them that are told a dtype, with weights in bfloat16."""
    return [
        dataclasses.replace(one, name=f"bf16: {one.name}", dtype="bf16")
        for one in several
        if one.kind == "server" and one.project in ("hocket", "vllm")
    ]


_FP32 = (*_ours(), *_peers(1), *_peers(2))
EVERY = (Contender(name="null server", kind="server", project="null"), *_FP32, *_in_bf16(_FP32))
REFERENCE = "generate, 1 thread"
"""Whose tokens the others' are compared with; it also judges where they differ."""


def chosen(parts: Sequence[str]) -> list[Contender]:
    """The contenders whose name begins with one of `parts`, the reference always among them.

    Raises:
        ValueError: a part that begins no name.
    """
    for part in parts:
        if not any(c.name.startswith(part) for c in EVERY):
            raise ValueError(f"no contender's name begins with {part!r}: {[c.name for c in EVERY]}")
    return [c for c in EVERY if c.name == REFERENCE or any(c.name.startswith(p) for p in parts)]
