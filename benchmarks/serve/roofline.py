"""Decoding and prefill beside what the device can do: `python -m benchmarks.serve.roofline`.

Decoding reads every weight and every cached key and value once a step, so its bound is the memory's
bandwidth; prefill multiplies, so its bound is the rate of large matrix products. Both bounds are
measured on the same device just before, by a copy and by one square product, and for a GPU that
hocket's catalogue knows the data sheet's figures stand beside them.

A step's time is the difference between a longer and a shorter answer to the same prompts, so that
prefill, transport and text cancel out. Bytes and operations are counted from the configuration.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.figures import machine
from benchmarks.groups import ROOT
from benchmarks.serve.workload import LARGER, VOCAB, write_tokenizer

RESULTS = ROOT / "benchmarks" / "results"
BYTES = {"fp32": 4, "bf16": 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama's sizes."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    tied: bool = False
    positions: int = 16384

    @property
    def block(self) -> int:
        """Elements of one layer's matrices."""
        attention = self.hidden * self.head * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def read(self) -> int:
        """Elements that a step reads of the weights: all layers and the head, one row of the
        embedding a token being next to nothing."""
        return self.layers * self.block + self.vocab * self.hidden

    def cache_bytes(self, tokens: int, size: int) -> int:
        """Bytes of keys and values of `tokens` tokens."""
        return 2 * tokens * self.layers * self.kv_heads * self.head * size

    def decode_bytes(self, rows: int, context: float, size: int) -> float:
        """Bytes that one step of `rows` sequences of `context` tokens reads."""
        return self.read * size + rows * context * self.cache_bytes(1, size)

    def prefill_operations(self, tokens: int) -> float:
        """Floating-point operations of one prompt: products of every token with the layers, the
        head for the last one alone, and causal attention, half of a square."""
        products = 2.0 * tokens * self.layers * self.block + 2.0 * self.vocab * self.hidden
        square = 2.0 * tokens * tokens * self.heads * self.head * self.layers
        return products + square

    def write(self, folder: Path, dtype: str) -> None:
        """A Hugging Face directory with random weights."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head,
            max_position_embeddings=self.positions,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
            dtype=kind,
        )
        torch.manual_seed(0)
        torch.set_default_dtype(kind)
        try:
            LlamaForCausalLM(config).save_pretrained(folder)
        finally:
            torch.set_default_dtype(torch.float32)
        write_tokenizer(folder)


SHAPES = {
    "larger": Shape(
        hidden=LARGER.hidden,
        intermediate=LARGER.intermediate,
        layers=LARGER.layers,
        heads=LARGER.heads,
        kv_heads=LARGER.kv_heads,
        head=LARGER.hidden // LARGER.heads,
        vocab=VOCAB,
        positions=4096,
    ),
    # Sizes of Llama 3.2 1B and Llama 3.1 8B (the models' own config.json), random weights.
    "llama-1b": Shape(
        hidden=2048,
        intermediate=8192,
        layers=16,
        heads=32,
        kv_heads=8,
        head=64,
        vocab=128256,
        tied=True,
    ),
    "llama-8b": Shape(
        hidden=4096,
        intermediate=14336,
        layers=32,
        heads=32,
        kv_heads=8,
        head=128,
        vocab=128256,
    ),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """What the device was measured to do: bytes and floating-point operations per second."""

    name: str
    bandwidth: float
    rate: float


def bounds(device: str, dtype: str, threads: int) -> Device:
    """Measure a copy and a square product, and leave the device empty."""
    import torch

    torch.set_num_threads(threads)
    cuda = device == "cuda"
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    side, count = (8192, 1 << 30) if cuda else (1024, 1 << 26)
    one, other = torch.randn(2, side, side, device=device).to(kind)
    source = torch.ones(count // 4, device=device)
    target = torch.empty_like(source)

    def best(run: Any, times: int = 10) -> float:
        found = []
        for _ in range(times):
            if cuda:
                torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            if cuda:
                torch.cuda.synchronize()
            found.append(time.perf_counter() - began)
        return min(found)

    rate = 2 * side**3 / best(functools.partial(torch.matmul, one, other))
    # A copy reads and writes each byte; decoding reads alone, at the same rate of bytes.
    bandwidth = 2 * count / best(functools.partial(target.copy_, source))
    del one, other, source, target
    if cuda:
        torch.cuda.empty_cache()
    name = torch.cuda.get_device_name() if cuda else str(machine()["model"])
    return Device(name, bandwidth, rate)


def measure(options: Any, shape: Shape, folder: Path) -> list[dict[str, Any]]:
    """Rows of figures: decode at each batch, then prefill, then how long it took to be ready."""
    from hocket import LLM  # type: ignore[attr-defined]
    from hocket.serving.request import SamplingParams

    size = BYTES[options.dtype]
    draw = random.Random(0)
    longest = max(options.prompt, options.prefill) + options.new + 1
    began = time.perf_counter()
    rows = []
    with LLM(
        folder,
        options.layout,
        dtype=options.dtype,
        device=options.device,
        threads=options.threads,
        max_num_seqs=max(options.batch),
        max_model_len=longest,
        no_prefix_cache=True,
    ) as llm:
        ready = time.perf_counter() - began

        def seconds(count: int, prompt: int, new: int) -> float:
            prompts = [[draw.randrange(VOCAB) for _ in range(prompt)] for _ in range(count)]
            sampling = SamplingParams(max_new_tokens=new, ignore_eos=True)
            began = time.perf_counter()
            made = llm.generate(prompts, sampling, progress=False)
            took = time.perf_counter() - began
            assert [len(one.tokens) for one in made] == [new] * count
            return took

        for count in options.batch:
            short, long = options.new // 4, options.new
            seconds(count, options.prompt, short)
            steps = [
                (seconds(count, options.prompt, long) - seconds(count, options.prompt, short))
                / (long - short)
                for _ in range(options.rounds)
            ]
            context = options.prompt + (long + short) / 2
            amount = shape.decode_bytes(count, context, size)
            rows.append({"what": f"decode, batch {count}", "amount": amount, "seconds": steps})
        seconds(1, options.prefill, 1)
        # What a request costs besides its prompt: one that is next to nothing.
        fixed = statistics.median(seconds(1, 2, 1) for _ in range(options.rounds))
        times = [seconds(1, options.prefill, 1) - fixed for _ in range(options.rounds)]
        operations = shape.prefill_operations(options.prefill)
        rows.append(
            {"what": f"prefill, {options.prefill} tokens", "amount": operations, "seconds": times}
        )
    rows.append({"what": "ready", "amount": 0.0, "seconds": [ready]})
    return rows


def share(row: dict[str, Any], device: Device) -> tuple[float, float] | None:
    """What was reached per second, and its share of the device's bound; None where none applies."""
    if not row["amount"]:
        return None
    reached = row["amount"] / statistics.median(row["seconds"])
    bound = device.bandwidth if row["what"].startswith("decode") else device.rate
    return reached, reached / bound


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve.roofline")
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=list(BYTES), default="bf16")
    parser.add_argument("--layout", default="dp1")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args(arguments)
    shape = SHAPES[options.shape]
    folder = RESULTS / "serve-models" / f"{options.shape}-{options.dtype}"
    if not (folder / "tokenizer.json").exists():
        shape.write(folder, options.dtype)
    device = bounds(options.device, options.dtype, options.threads)
    print(
        f"{device.name}: {device.bandwidth / 1e9:.1f} GB/s copying, "
        f"{device.rate / 1e12:.3f} TFLOP/s multiplying ({options.dtype})",
        flush=True,
    )
    rows = measure(options, shape, folder)
    for row in rows:
        found, each = share(row, device), statistics.median(row["seconds"])
        if found is None:
            print(f"{row['what']:24} {each:10.2f} s, reading of weights included")
            continue
        unit, scale = ("GB/s", 1e9) if row["what"].startswith("decode") else ("TFLOP/s", 1e12)
        print(
            f"{row['what']:24} {each * 1e3:10.2f} ms  {found[0] / scale:8.2f} {unit:8}"
            f"{found[1] * 100:5.0f}% of the bound"
        )
    path = options.json or RESULTS / f"roofline-{time.strftime('%Y%m%d-%H%M%S')}.json"
    report = {"machine": machine(), "device": dataclasses.asdict(device), "rows": rows}
    path.write_text(json.dumps(report | {"options": vars(options)}, indent=1, default=str))
    print(f"written: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
