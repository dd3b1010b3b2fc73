#!/usr/bin/env bash
# One node of eight GPUs, up to where the GPUs are needed: docs/tutorials/first-gpu-node.md,
# docs/how-to/fine-tune-8b.md and docs/how-to/fine-tune-70b.md.
set -euo pipefail
hocket plan llama-3-8b --cluster 8xH100 --seq-len 4096 --global-batch 64 --top 3 --explain
hocket rehearse llama-3-8b --layers 2 --layout dp8:zero=2 --microbatches 8 --seq-len 4096 --dtype bf16
hocket doctor
hocket train meta-llama/Llama-3.1-8B --data chats.jsonl --global-batch 64 --seq-len 4096 --dry-run
hocket plan llama-3-70b --cluster 2x8xH200 --seq-len 4096 --global-batch 64 --top 2
hocket plan llama-3-70b --cluster 8xH100 --seq-len 4096 --global-batch 32 --lora-rank 16 --top 2
hocket rehearse llama-3-70b --layers 4 --layout pp4.tp8:schedule=1f1b,sequence_parallel=true --microbatches 8 --seq-len 4096 --dtype bf16
