#!/usr/bin/env bash
# Makes .venv, installs rlsys (the CPU build of torch where there is no NVIDIA GPU) and trains the start model by GRPO.
# Arguments go to the job, e.g. `scripts/quickstart.sh trainer.total_training_steps=5`.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/install.sh
install_rlsys ""
exec .venv/bin/python -m trainer.main_ppo "$@"
