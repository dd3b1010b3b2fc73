"""An offline contender's process: loads a model once, then continues batches that it is told of.

Started by `benchmarks.serve.processes` in the contender's own environment, so nothing outside the
standard library is imported before the contender is known. A line of JSON on standard input is one
order, a line on the pipe it was given is the answer:

    {"prompts": [[..]], "new": 64}     ->  {"seconds": 1.2, "tokens": [[..]]}
    {"judge": [[[..], [..]], ..]}      ->  {"gaps": [0.0, ..]}     (`generate` alone)
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

Continue = Callable[[list[list[int]], int], list[list[int]]]


def main() -> None:
    """Serve orders until standard input ends."""
    options, pipe = json.loads(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w")

    def say(message: dict[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    began = time.perf_counter()
    judge = None
    run: Continue
    if options["method"] == "generate":
        run, judge = generate(options)
    else:
        run = {"generate_batch": generate_batch, "vllm": vllm, "hocket": hocket}[options["method"]](
            options
        )
    say({"ready": time.perf_counter() - began})
    for line in sys.stdin:
        order = json.loads(line)
        if "judge" in order:
            assert judge is not None
            say({"gaps": judge(order["judge"])})
            continue
        began = time.perf_counter()
        made = run(order["prompts"], order["new"])
        say({"seconds": time.perf_counter() - began, "tokens": made})


def _model(options: dict[str, Any]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options["threads"])
    return AutoModelForCausalLM.from_pretrained(
        options["folder"], dtype=torch.float32, attn_implementation="sdpa"
    ).eval()


def generate(options: dict[str, Any]) -> tuple[Continue, Any]:
    """transformers' generate on the whole batch at once, and the judge of others' tokens."""
    import torch

    model = _model(options)

    def run(prompts: list[list[int]], new: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False
        )
        return made[:, ids.shape[1] :].tolist()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def judge(pairs: list[list[list[int]]]) -> list[float]:
        """By how many logits each continuation's worst token lies below the most probable one."""
        gaps = []
        for prompt, made in pairs:
            logits = model(torch.tensor([prompt + made])).logits[0, len(prompt) - 1 : -1]
            taken = logits.gather(1, torch.tensor(made)[:, None])[:, 0]
            gaps.append(float((logits.max(1).values - taken).max()))
        return gaps

    return run, judge


def generate_batch(options: dict[str, Any]) -> Continue:
    """transformers' continuous batching, its manager kept alive between batches."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = _model(options)
    config = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=options["cached"] // 32,
        max_num_batched_tokens=options["chunk"],
        max_requests_per_batch=options["rows"],
    )

    def run(prompts: list[list[int]], new: int) -> list[list[int]]:
        made = model.generate_batch(
            prompts,
            generation_config=GenerationConfig(max_new_tokens=new, do_sample=False, pad_token_id=0),
            continuous_batching_config=config,
            persistent_manager=True,
        )
        return [list(output.generated_tokens) for output in made.values()]

    return run


def vllm(options: dict[str, Any]) -> Continue:
    """vLLM's LLM, with prefix caching as its server has it."""
    from vllm import LLM, SamplingParams, TokensPrompt

    engine = LLM(
        options["folder"],
        dtype="float32",
        max_num_seqs=options["rows"],
        max_model_len=512,
        max_num_batched_tokens=options["chunk"],
        enable_prefix_caching=True,
        disable_log_stats=True,
    )

    def run(prompts: list[list[int]], new: int) -> list[list[int]]:
        sampling = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        made = engine.generate(asked, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in made]

    return run


def hocket(options: dict[str, Any]) -> Continue:
    """hocket.LLM on the layout it is told."""
    from hocket import LLM  # type: ignore[attr-defined]
    from hocket.serving.request import SamplingParams

    engine = LLM(
        options["folder"],
        options["layout"],
        threads=options["threads"],
        max_num_seqs=options["rows"],
        max_model_len=512,
        max_num_batched_tokens=options["chunk"],
    )

    def run(prompts: list[list[int]], new: int) -> list[list[int]]:
        made = engine.generate(prompts, SamplingParams(max_new_tokens=new, ignore_eos=True))
        return [list(output.tokens) for output in made]

    return run


if __name__ == "__main__":
    main()
