#!/usr/bin/env bash
# A vLLM server whose weights a training run replaces after every step (actor_rollout_ref.rollout.name=vllm_remote).
#
#   scripts/run_vllm_base.sh MODEL [further options of the vLLM server]
#
# PYTHON (python) runs it, HOST (127.0.0.1) and PORT (8000) are where it listens, NUM_GPUS (1) share the model.
# FULL_DETERMINISM=1 gives the aligned mode: batch-invariant kernels and logits in float32 (docs/aligned_mode.md).
# RLSYS_SERVER_TOKEN, where set, is the bearer token that requests must carry.
# Replacing weights and pausing are routes of vLLM's development mode, which no token protects: it is on only while the
# server listens on this machine alone. A server on another host is updated through adapters: run_vllm_training.sh.
set -euo pipefail
model=${1:?"usage: $0 MODEL [options of the vLLM server]"}
shift
host=${HOST:-127.0.0.1}
case $host in
    127.* | localhost | ::1) export VLLM_SERVER_DEV_MODE=1 ;;
    *)
        : "${RLSYS_SERVER_TOKEN:?"HOST=$host is open to others: set RLSYS_SERVER_TOKEN"}"
        echo "HOST=$host: weights cannot be replaced, the routes for it have no token" >&2
        unset VLLM_SERVER_DEV_MODE
        ;;
esac
if [ -n "${RLSYS_SERVER_TOKEN:-}" ]; then
    export VLLM_API_KEY=$RLSYS_SERVER_TOKEN
fi
if [ "${FULL_DETERMINISM:-}" = 1 ]; then
    export VLLM_BATCH_INVARIANT=1
    set -- --hf-overrides '{"head_dtype": "float32"}' "$@"
fi
exec "${PYTHON:-python}" -m vllm.entrypoints.openai.api_server --model "$model" --host "$host" --port "${PORT:-8000}" \
    --tensor-parallel-size "${NUM_GPUS:-1}" --logprobs-mode processed_logprobs --generation-config vllm "$@"
