#!/usr/bin/env bash
# Writes requirements/cpu.txt (rlsys[dev,trackers], Python 3.11 to 3.13) and requirements/gpu.txt (rlsys[gpu], Linux with
# CUDA 13, Python 3.12) from pyproject.toml. Needs uv (pip install uv).
set -euo pipefail
cd "$(dirname "$0")/.."
lock() { uv pip compile pyproject.toml --quiet --no-annotate --no-header "$@"; }
mkdir -p requirements

echo "torch==2.13.0" | lock --extra dev --extra trackers --universal --python-version 3.11 --constraint - |
  grep -vE '^(nvidia-|cuda-|triton)' >requirements/cpu.txt # what only CUDA builds of torch need

printf '%s\n' "vllm==0.26.0" "megatron-core==0.19.2" |
  lock --extra gpu --python-version 3.12 --python-platform x86_64-manylinux_2_34 --constraint - >requirements/gpu.txt
wc -l requirements/*.txt
