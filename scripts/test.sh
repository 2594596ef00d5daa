#!/usr/bin/env bash
# Installs what the tests need into .venv (once) and runs them; arguments go to pytest, e.g. `scripts/test.sh -m slow`.
# Without arguments every folder of tests gets a process of its own: tests that fork ranks need one in which neither Ray
# nor a trainer has run. Those that start Ray and wait for it run beside the others, which compute. What fails is tried
# once more, alone, since deadlines of a second or two can pass on a busy machine.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/install.sh
install_rlsys dev
if [ $# -gt 0 ]; then exec .venv/bin/python -m pytest "$@"; fi
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
trap 'trap - INT TERM; kill 0' INT TERM

run() {  # folder, further arguments of pytest; a folder without tests (5) is well
  local code=0
  .venv/bin/python -m pytest "${@:2}" -o cache_dir=".pytest_cache/${1//\//.}" "$1" || code=$?
  [ "$code" = 5 ] || return "$code"
}

lane() {  # name, folders: prints what each said when it has ended, and notes those that failed
  local folder code
  for folder in "${@:2}"; do
    code=0
    echo "== $folder" >"$log/$1.out"
    run "$folder" >>"$log/$1.out" 2>&1 || code=$?
    cat "$log/$1.out"
    [ "$code" = 0 ] || echo "$code $folder" >>"$log/$1.failed"
  done
}

waiting=(tests/e2e tests/unit/single_controller/)
computing=(tests/contracts tests/golden)
for folder in tests/unit/*/ tests/unit/test_structure.py; do
  [[ " ${waiting[*]} " == *" $folder "* ]] || computing+=("$folder")
done
lane waiting "${waiting[@]}" &
lane computing "${computing[@]}"
wait $!
touch "$log/waiting.failed" "$log/computing.failed"
failed=()
while read -r code folder; do
  if [ "$code" = 1 ]; then
    echo "== $folder, once more"
    code=0
    run "$folder" --last-failed --last-failed-no-failures none </dev/null || code=$?
  fi
  [ "$code" = 0 ] || failed+=("$folder")
done < <(cat "$log"/*.failed)
if [ ${#failed[@]} -gt 0 ]; then echo "failed: ${failed[*]}"; exit 1; fi
