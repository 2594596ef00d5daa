#!/usr/bin/env bash
# An SGLang server whose weights a training run replaces after every step (actor_rollout_ref.rollout.name=sglang_remote).
#
#   scripts/run_sglang.sh MODEL [further options of sglang.launch_server]
#
# PYTHON (python) runs it, HOST (127.0.0.1) and PORT (30000) are where it listens, NUM_GPUS (1) share the model.
# FULL_DETERMINISM=1 gives the aligned mode: batch-invariant kernels (GPUs) and logits in float32 (docs/aligned_mode.md).
# DEVICE=cpu adds the options that SGLang needs on a CPU.
# IMAGES=1 lets a training run, and no other client, give the model images: it needs this script in its repository, whose rlsys
# the server imports.
# RLSYS_SERVER_TOKEN, where set, is the bearer token that requests must carry; beyond this machine it is required.
set -euo pipefail
model=${1:?"usage: $0 MODEL [options of sglang.launch_server]"}
shift
host=${HOST:-127.0.0.1}
case $host in
    127.* | localhost | ::1) ;;
    *) : "${RLSYS_SERVER_TOKEN:?"HOST=$host is open to others: set RLSYS_SERVER_TOKEN"}" ;;
esac
options=(--model-path "$model" --host "$host" --port "${PORT:-30000}" --tp-size "${NUM_GPUS:-1}"
    --stream-interval "${STREAM_INTERVAL:-16}" --incremental-streaming-output)
if [ "${DEVICE:-}" = cpu ]; then
    export SGLANG_USE_CPU_ENGINE=1
    options+=(--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none
        --disable-cuda-graph --disable-overlap-schedule)
fi
if [ "${IMAGES:-}" = 1 ]; then
    root=$(cd "$(dirname "$0")/.." && pwd)
    export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$root SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE=rlsys.rollout.sglang.server
    options+=(--skip-server-warmup)
fi
if [ "${FULL_DETERMINISM:-}" = 1 ]; then
    options+=(--enable-fp32-lm-head)
    [ "${DEVICE:-}" = cpu ] || options+=(--enable-deterministic-inference)
fi
if [ -n "${RLSYS_SERVER_TOKEN:-}" ]; then
    settings=$(mktemp --suffix=.yaml) # in a file, so that no list of processes shows it
    printf 'api-key: "%s"\n' "$RLSYS_SERVER_TOKEN" >"$settings"
    options+=(--config "$settings")
fi
exec "${PYTHON:-python}" -m sglang.launch_server "${options[@]}" "$@"
