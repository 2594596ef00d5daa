#!/usr/bin/env bash
# Install what the tests need into .venv (once) and run them; arguments go to pytest, e.g. `scripts/test.sh -m slow`.
# Without arguments the tests run in parts, each in a process of its own, the longest first: tests that fork ranks need one
# in which neither Ray nor a trainer has run. On 2 cores three run at a time, since those that start Ray wait much.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/install.sh
install_rlsys dev
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes import the same files
if [ $# -gt 0 ]; then exec .venv/bin/python -m pytest "$@"; fi
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
trap 'trap - INT TERM; kill 0' INT TERM

run() {  # part: print the output of its tests when they have ended and note it if they failed
  local out
  out=$(.venv/bin/python -m pytest $1 2>&1) || echo "$1" >>"$log/failed"
  (flock 9; echo "== $1"; echo "$out") 9>"$log/lock"
}
export -f run
export log

first=(
  'tests/e2e/test_[a-m]*.py'
  'tests/e2e/test_[n-z]*.py'
  'tests/contracts --ignore=tests/contracts/test_worker_group.py'
)
last=(
  'tests/unit/single_controller/ tests/unit/protocol/ tests/contracts/test_worker_group.py'
  'tests/unit/engines/ tests/unit/model_merger/ tests/unit/models/ tests/unit/roles/ tests/unit/weights/'
  'tests/unit/agent/ tests/unit/rewards/ tests/unit/rollout/'
  tests/unit/fleet/
)
others=('tests/unit/test_*.py')
for folder in tests/unit/[a-z]*/; do
  [[ " ${last[*]} " == *" $folder "* ]] || others+=("$folder")
done
parts=("${first[@]}" "${others[*]}" "${last[@]}")
printf '%s\0' "${parts[@]}" | xargs -0 -P 3 -I{} bash -c 'run "$1"' _ {} &
wait $!
if [ -e "$log/failed" ]; then echo "failed: $(paste -sd ' ' "$log/failed")"; exit 1; fi
