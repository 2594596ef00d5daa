#!/usr/bin/env bash
# A vLLM server and a training run beside it, in containers: MODEL=... TRAIN=... scripts/docker_train_areal.sh
# scripts/compose.external.yaml says what else can be set; arguments go to docker compose up.
set -euo pipefail
exec docker compose -f "$(dirname "$0")/compose.external.yaml" up --abort-on-container-exit "$@"
