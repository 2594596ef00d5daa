#!/usr/bin/env bash
# Install what the tests need into .venv (once) and run them; arguments go to pytest, e.g. `scripts/test.sh -m slow`.
# Without arguments every folder of tests runs in a process of its own: tests that fork ranks need one in which neither
# Ray nor a trainer has run. Tests that start Ray and wait for it run in parallel with those that compute.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/install.sh
install_rlsys dev
if [ $# -gt 0 ]; then exec .venv/bin/python -m pytest "$@"; fi
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
trap 'trap - INT TERM; kill 0' INT TERM

lane() {  # name, folders: print the output of each folder when it has ended and note those that failed
  local folder code
  for folder in "${@:2}"; do
    code=0
    echo "== $folder" >"$log/$1.out"
    .venv/bin/python -m pytest "$folder" >>"$log/$1.out" 2>&1 || code=$?
    cat "$log/$1.out"
    case "$code" in
      0 | 5) ;;  # 5: a folder without tests
      *) echo "$folder" >>"$log/failed" ;;
    esac
  done
}

waiting=(tests/e2e tests/unit/single_controller/)
computing=(tests/contracts tests/golden)
for folder in tests/unit/*/ tests/unit/*.py; do
  [[ " ${waiting[*]} " == *" $folder "* ]] || computing+=("$folder")
done
lane waiting "${waiting[@]}" &
lane computing "${computing[@]}"
wait $!
if [ -e "$log/failed" ]; then echo "failed: $(paste -sd ' ' "$log/failed")"; exit 1; fi
