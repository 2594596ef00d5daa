#!/usr/bin/env bash
# A vLLM server whose weights a training run replaces after every step (actor_rollout_ref.rollout.name=vllm_remote).
#
#   scripts/run_vllm_base.sh MODEL [further options of the vLLM server]
#
# PYTHON (python) runs it, HOST (127.0.0.1) and PORT (8000) are where it listens, NUM_GPUS (1) share the model.
# FULL_DETERMINISM=1 gives the aligned mode: batch-invariant kernels and logits in float32 (docs/aligned_mode.md).
# RLSYS_SERVER_TOKEN, where set, is the bearer token that requests must carry.
# PROCESS_GROUP=1 lets it take weights over a process group (rollout.checkpoint_engine.backend=nccl): it needs vLLM 0.29
# or newer and this script in its repository, whose rlsys the server imports.
# IMAGES=1 adds the options with which vLLM 0.32 takes the images of prompts; a version that lacks them needs none.
# Replacing weights and pausing are routes of vLLM's development mode, which vLLM's own token does not protect: it is on
# while the server listens on this machine alone, and with PROCESS_GROUP=1, which makes every route ask for the token.
set -euo pipefail
model=${1:?"usage: $0 MODEL [options of the vLLM server]"}
shift
host=${HOST:-127.0.0.1}
options=()
export VLLM_SERVER_DEV_MODE=1
if [ "${PROCESS_GROUP:-}" = 1 ]; then
    root=$(cd "$(dirname "$0")/.." && pwd)
    export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
    export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-0}  # else a trainer that is lost ends the server
    options+=(--worker-extension-cls rlsys.rollout.vllm.server.WeightTransferExtension
        --weight-transfer-config '{"backend": "rlsys"}')
fi
[ "${IMAGES:-}" != 1 ] || options+=(--enable-scale-out --no-mm-device-do-normalize)
case $host in
    127.* | localhost | ::1) ;;
    *)
        : "${RLSYS_SERVER_TOKEN:?"HOST=$host is open to others: set RLSYS_SERVER_TOKEN"}"
        if [ "${PROCESS_GROUP:-}" != 1 ]; then
            echo "HOST=$host: weights cannot be replaced without PROCESS_GROUP=1, the routes for it have no token" >&2
            unset VLLM_SERVER_DEV_MODE
        fi
        ;;
esac
if [ -n "${RLSYS_SERVER_TOKEN:-}" ]; then
    export VLLM_API_KEY=$RLSYS_SERVER_TOKEN
    [ "${PROCESS_GROUP:-}" != 1 ] || options+=(--middleware rlsys.rollout.vllm.server.RequireToken)
fi
if [ "${FULL_DETERMINISM:-}" = 1 ]; then
    export VLLM_BATCH_INVARIANT=1
    set -- --hf-overrides '{"head_dtype": "float32"}' "$@"
fi
exec "${PYTHON:-python}" -m vllm.entrypoints.openai.api_server --model "$model" --host "$host" --port "${PORT:-8000}" \
    --tensor-parallel-size "${NUM_GPUS:-1}" --logprobs-mode processed_logprobs --generation-config vllm \
    "${options[@]}" "$@"
