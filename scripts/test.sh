#!/usr/bin/env bash
# Installs what the tests need into .venv (once) and runs them; arguments go to pytest, e.g. `scripts/test.sh -m slow`.
# Without arguments every folder of tests gets a process of its own: tests that fork ranks need one in which neither Ray
# nor a trainer has run. What fails is tried once more, since deadlines of a second or two can pass on a busy machine.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/install.sh
install_rlsys dev
pytest=(.venv/bin/python -m pytest)
if [ $# -gt 0 ]; then exec "${pytest[@]}" "$@"; fi
failed=()
for folder in tests/contracts tests/e2e tests/golden tests/unit/*/ tests/unit/test_structure.py; do
  echo "== $folder"
  code=0
  "${pytest[@]}" "$folder" || code=$?
  if [ "$code" = 1 ]; then code=0; "${pytest[@]}" --last-failed --last-failed-no-failures none "$folder" || code=$?; fi
  if [ "$code" != 0 ] && [ "$code" != 5 ]; then failed+=("$folder"); fi
done
if [ ${#failed[@]} -gt 0 ]; then echo "failed: ${failed[*]}"; exit 1; fi
