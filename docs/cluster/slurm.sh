#!/bin/bash
#SBATCH --job-name=rlsys
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
# Submit with: sbatch docs/cluster/slurm.sh. The checkout, its .venv and the paths below are on a shared file system.
set -euo pipefail

# shellcheck disable=SC1091
source .venv/bin/activate
RAY_AUTH_TOKEN=$(python -c "import secrets; print(secrets.token_hex(32))")
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0 # srun hands the environment on

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
export RAY_ADDRESS="$head:6379"

srun --nodes=1 --ntasks=1 --nodelist="$head" --overlap \
  ray start --head --port=6379 --dashboard-host=127.0.0.1 --block &
timeout 300 bash -c 'until ray status >/dev/null 2>&1; do sleep 2; done' ||
  { echo "Ray's head on $head did not answer within 300 s" >&2 && exit 1; }
if ((${#nodes[@]} > 1)); then
  srun --nodes=$((${#nodes[@]} - 1)) --ntasks=$((${#nodes[@]} - 1)) --exclude="$head" --overlap \
    ray start --address="$RAY_ADDRESS" --block &
fi
timeout 300 python - "${#nodes[@]}" <<'EOF' || { echo "not all of ${nodes[*]} joined Ray within 300 s" >&2 && exit 1; }
import sys, time, ray
ray.init(logging_level="ERROR")
while sum(node["Alive"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(2)
EOF

python -m trainer.main_ppo \
  trainer.nnodes=2 trainer.n_gpus_per_node=8 trainer.rollout_workers=16 trainer.max_staleness=2 \
  actor_rollout_ref.rollout.name=vllm actor_rollout_ref.model.path=/shared/models/Qwen3-8B \
  data.train_files=/shared/data/train.parquet trainer.default_local_dir=/shared/runs/first &
job=$!
trap 'kill -TERM "$job"' TERM # before the time limit, with which Ray ends on all nodes: a checkpoint is written to its end
wait "$job" || wait "$job"    # the first wait ends with the signal
