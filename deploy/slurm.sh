#!/usr/bin/env bash
# One model on 2 hosts of 8 GPUs, and the gateway on the first of them: sbatch deploy/slurm.sh
# docs/scale-out.md explains it. It has not run on a cluster. Replace model and paths; all hosts must see them.
#SBATCH --job-name=jaxsgl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --signal=TERM@90
set -euo pipefail
model=${MODEL:-/models/my-model}
secret=${SECRET:-$HOME/.jaxsgl-secret}
[ -e "$secret" ] || (umask 077 && openssl rand -hex 32 > "$secret")

srun --kill-on-bad-exit=1 python -m jaxsgl.serve --model "$model" --served-model-name my-model \
    --nnodes auto --tp 16 --dist-secret-file "$secret" --drain-s 60 &
hosts=$!
smg launch --worker-urls grpc://127.0.0.1:30001 --policy cache_aware --block-size 64 \
    --worker-startup-timeout-secs 1800 --health-check-interval-secs 5 --host 0.0.0.0 --port 8000 &
gateway=$!
trap 'kill -TERM "$hosts" "$gateway" 2>/dev/null || true; wait "$hosts"' TERM INT
wait "$hosts"   # hosts end together; the job's supervisor starts another one
kill -TERM "$gateway" 2>/dev/null || true
