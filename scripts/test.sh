#!/usr/bin/env bash
# Install what the tests need into .venv (once) and run them; arguments go to pytest, e.g. `scripts/test.sh -m slow`.
# Without arguments every part of the tests runs in a process of its own, the longest first: tests that fork ranks need one
# in which neither Ray nor a trainer has run. On 2 cores three run at a time, since those that start Ray wait much.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/install.sh
install_rlsys dev
if [ $# -gt 0 ]; then exec .venv/bin/python -m pytest "$@"; fi
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
trap 'trap - INT TERM; kill 0' INT TERM

run() {  # pattern: print the output of its tests when they have ended and note it if they failed
  local out code=0
  out=$(.venv/bin/python -m pytest $1 2>&1) || code=$?
  (flock 9; echo "== $1"; echo "$out") 9>"$log/lock"
  case "$code" in
    0 | 5) ;;  # 5: a folder without tests
    *) echo "$1" >>"$log/failed" ;;
  esac
}
export -f run
export log

parts=('tests/e2e/test_[n-z]*.py' 'tests/e2e/test_[a-m]*.py' tests/contracts tests/unit/single_controller/ tests/unit/trainer/)
for folder in tests/unit/*/ 'tests/unit/test_*.py' tests/golden; do
  [[ " ${parts[*]} " == *" $folder "* ]] || parts+=("$folder")
done
printf '%s\0' "${parts[@]}" | xargs -0 -P 3 -I{} bash -c 'run "$1"' _ {} &
wait $!
if [ -e "$log/failed" ]; then echo "failed: $(paste -sd ' ' "$log/failed")"; exit 1; fi
