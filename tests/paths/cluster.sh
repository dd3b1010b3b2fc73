#!/usr/bin/env bash
# A cluster with Slurm or Kubernetes, up to where it is needed: docs/how-to/slurm.md,
# docs/how-to/kubernetes.md, docs/how-to/resume.md. torchrun starts the ranks in the cluster's place.
set -euo pipefail
hocket plan llama-3-70b --cluster 4x8xH100 --seq-len 4096 --global-batch 64 --top 3
hocket plan llama-3-8b --cluster 8xH100 --top 3 > plan.txt
grep "Global batch: 64 sequences" plan.txt
hocket template slurm tiny-llama --layout dp2 --gpus-per-node 0 --data CHANGELOG.md --run runs/slurm > train.sbatch
bash -n train.sbatch
hocket template kubernetes tiny-llama --layout dp2 --gpus-per-node 0 --data CHANGELOG.md > job.yaml
python -c 'import sys, yaml; assert all("kind" in one for one in yaml.safe_load_all(open("job.yaml")))'
torchrun --nproc-per-node 2 -m -- hocket train tiny-llama --data CHANGELOG.md --seq-len 64 --global-batch 8 --steps 20 --save-every 10 --run runs/long
hocket train --run runs/long --resume --steps 30
hocket train --run runs/long --resume --steps 40 --layout dp2
