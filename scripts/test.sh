#!/usr/bin/env bash
# Installs what the tests need into .venv (once) and runs them; arguments go to pytest, e.g. `scripts/test.sh -m slow`.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/install.sh
install_rlsys dev
exec .venv/bin/python -m pytest "$@"
