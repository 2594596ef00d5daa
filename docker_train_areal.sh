#!/usr/bin/env bash
# A vLLM server and a training run beside it, in containers: MODEL=... TRAIN=... ./docker_train_areal.sh
# docker-compose.areal.yml says what else can be set; arguments go to docker compose up.
set -euo pipefail
exec docker compose -f "$(dirname "$0")/docker-compose.areal.yml" up --abort-on-container-exit "$@"
