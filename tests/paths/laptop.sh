#!/usr/bin/env bash
# A laptop without a GPU: docs/tutorials/laptop.md; the tour has a test of its own.
set -euo pipefail
hocket schedule --layout pp4 --schedule 1f1b --microbatches 8
hocket train tiny-llama --data CHANGELOG.md --layout dp2.pp2 --seq-len 64 --global-batch 16 --steps 40 --run runs/laptop
hocket check tiny-llama --layout dp2.pp2
hocket report runs/laptop --format text
hocket generate runs/laptop --prompt "hocket trains" --max-new-tokens 20 --layout tp2
hocket export runs/laptop --to laptop-model
test -f laptop-model/model.safetensors
hocket serve runs/laptop --layout tp2 --port "$PORT" &
server=$!
trap 'kill -TERM $server 2>/dev/null || true' EXIT
./ask "$PORT"
kill -TERM $server
wait $server
trap - EXIT
hocket models
