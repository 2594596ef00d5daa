#!/usr/bin/env bash
# Serves the documentation on http://127.0.0.1:8000, or builds it into site/: scripts/docs.sh [build]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/install.sh
install_rlsys dev
case ${1:-serve} in
  serve) exec .venv/bin/python -m mkdocs serve --dev-addr "127.0.0.1:${PORT:-8000}" ;;
  build) exec .venv/bin/python -m mkdocs build --strict --site-dir site ;;
  *) echo "usage: scripts/docs.sh [serve|build]" >&2; exit 2 ;;
esac
