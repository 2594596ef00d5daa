#!/usr/bin/env bash
# A vLLM server that takes new LoRA adapters from a training run while it serves
# (actor_rollout_ref.rollout.name=vllm_remote, rollout.servers.lora_name=actor, model.lora_rank <= MAX_LORA_RANK).
#
#   scripts/run_vllm_training.sh MODEL [further options of the vLLM server]
#
# PYTHON (python) runs it, HOST (127.0.0.1) and PORT (8000) are where it listens, NUM_GPUS (1) share the model,
# MAX_LORA_RANK (32) bounds the adapters, of which MAX_LORAS (3) are kept ready at a time.
# FULL_DETERMINISM=1 gives the aligned mode: batch-invariant kernels and logits in float32 (docs/aligned_mode.md).
# RLSYS_SERVER_TOKEN, where set, is the bearer token that requests must carry; beyond this machine it is required.
set -euo pipefail
model=${1:?"usage: $0 MODEL [options of the vLLM server]"}
shift
host=${HOST:-127.0.0.1}
case $host in
    127.* | localhost | ::1) ;;
    *) : "${RLSYS_SERVER_TOKEN:?"HOST=$host is open to others: set RLSYS_SERVER_TOKEN"}" ;;
esac
if [ -n "${RLSYS_SERVER_TOKEN:-}" ]; then
    export VLLM_API_KEY=$RLSYS_SERVER_TOKEN
fi
unset VLLM_SERVER_DEV_MODE
export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True
if [ "${FULL_DETERMINISM:-}" = 1 ]; then
    export VLLM_BATCH_INVARIANT=1
    set -- --hf-overrides '{"head_dtype": "float32"}' "$@"
fi
exec "${PYTHON:-python}" -m vllm.entrypoints.openai.api_server --model "$model" --host "$host" --port "${PORT:-8000}" \
    --tensor-parallel-size "${NUM_GPUS:-1}" --logprobs-mode processed_logprobs --generation-config vllm \
    --enable-lora --max-lora-rank "${MAX_LORA_RANK:-32}" --max-loras "${MAX_LORAS:-3}" "$@"
