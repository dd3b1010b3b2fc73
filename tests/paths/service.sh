#!/usr/bin/env bash
# Someone who sizes a service: docs/how-to/serve-plan.md, then docs/how-to/serve.md on this machine.
set -euo pipefail
hocket plan llama-3-70b --serve --cluster H100 --requests-per-second 5 --ttft-ms 2000 --tpot-ms 50
hocket plan llama-3-70b --serve --cluster A100-80,H100 --explain
hocket plan llama-3-70b --serve --cluster 8xH100-SXM --layout dp2.tp4 --emit vllm
hocket train tiny-llama --data CHANGELOG.md --seq-len 64 --global-batch 16 --steps 50 --run runs/served-model
hocket serve runs/served-model --layout tp2 --port "$PORT" --run runs/serve-1 &
server=$!
trap 'kill -TERM $server 2>/dev/null || true' EXIT
./ask "$PORT"
kill -TERM $server
wait $server
trap - EXIT
hocket report runs/serve-1
