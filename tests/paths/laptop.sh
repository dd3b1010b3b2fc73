#!/usr/bin/env bash
# A laptop without a GPU: docs/tutorials/laptop.md, whole.
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
./ask "$PORT"
kill -TERM $server
wait $server
