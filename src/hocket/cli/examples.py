"""Examples: the last lines of each verb's help, as the pages of docs/ have them."""

from __future__ import annotations

EXAMPLES = {
    "train": (
        "tiny-llama --data CHANGELOG.md --layout dp2.pp2 --seq-len 64 --global-batch 16 "
        "--steps 40 --run runs/laptop",
        "--run runs/long --resume --steps 30",
    ),
    "serve": (
        "runs/served-model --layout tp2 --port 8000 --run runs/serve-1",
        "Qwen/Qwen3-0.6B --port 8000",
    ),
    "generate": (
        'runs/laptop --prompt "hocket trains" --max-new-tokens 20 --layout tp2',
        "runs/served-model --chat --chat-template-file chatml",
    ),
    "export": ("runs/laptop --to laptop-model", "runs/lora --to merged --merge"),
    "template": (
        "slurm tiny-llama --layout dp2 --gpus-per-node 0 --data CHANGELOG.md --run runs/slurm",
        "docker",
    ),
    "plan": (
        "llama-3-8b --cluster 8xH100 --seq-len 4096 --global-batch 64 --top 3",
        "llama-3-70b --serve --cluster H100 --requests-per-second 5 --ttft-ms 2000 --tpot-ms 50",
    ),
    "rehearse": (
        "tiny-llama --layout dp2.pp2.tp2 --microbatches 4 --seq-len 128",
        "tiny-llama --layout dp4:zero=3,recompute=full --dropout 0.1 --json",
    ),
    "schedule": ("--layout pp4 --schedule 1f1b --microbatches 8",),
    "models": ("--gpus", "check Qwen/Qwen3-0.6B"),
    "check": ("tiny-llama --layout dp2.pp2", "tiny-qwen3 --serve --layout tp2"),
    "chaos": ("tiny-llama --layout dp2 --seed 1 --faults 20",),
    "compare": (
        "tiny-llama --strategies threads data gpipe tensor",
        "tiny-llama --sweep layers --seq-len 32",
    ),
    "validate": ("tests/planning/published_extract.csv",),
    "doctor": ("", "--gpu"),
    "report": ("runs/first --format text", "--history --by machine"),
    "probe": ("--quick --out cluster.toml --svg topology.svg",),
    "config": ("show train tiny-llama --data CHANGELOG.md --lr 1e-4",),
    "completion": ("bash",),
    "demo": ("",),
    "tour": ("", "--lang ko"),
}
"""Of each verb one command or two, without `hocket VERB`."""


def lines(verb: str) -> str:
    """The examples of a verb, one command a line."""
    return "examples:\n" + "".join(
        f"  hocket {verb} {words}".rstrip() + "\n" for words in EXAMPLES[verb]
    )
