#!/usr/bin/env bash
# Install what the tests need into .venv (once) and run them; arguments go to pytest, e.g. `scripts/test.sh -m slow`.
# Without arguments the tests run in parts, each in a process of its own, the longest first: tests that fork ranks need one
# in which neither Ray nor a trainer has run. On 2 cores three run at a time, since those that start Ray wait much.
# `scripts/test.sh -m gpu` runs the tests that need GPUs in parts too, sixteen at a time on one GPU and 28 on two.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/install.sh
install_rlsys dev
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes import the same files
if [ $# -gt 0 ] && [ "$*" != '-m gpu' ]; then exec .venv/bin/python -m pytest "$@"; fi
log=$(mktemp -d)
trap 'rm -rf "$log"' EXIT
trap 'trap - INT TERM; kill 0' INT TERM

run() {  # part, GPUs: print the output of its tests when they have ended and note it if they failed
  local out
  [ "$2" = all ] || export CUDA_VISIBLE_DEVICES=$2
  # shellcheck disable=SC2086  # a part is several words
  out=$(.venv/bin/python -m pytest $1 2>&1) || echo "$1" >>"$log/failed"
  (flock 9; echo "== $1"; echo "$out") 9>"$log/lock"
}
export -f run
export log

gpu=(  # the longest first; gated delta layers in two waves, since all of them build the same kernels
  'tests/gpu/test_gated_delta_cuda.py -k (trains_as)and(full)and(not(1-one))and(next)'
  'tests/gpu/test_gated_delta_cuda.py -k (trains_as)and(full)and(not(1-one))and(3.5)'
  'tests/gpu/test_gated_delta_cuda.py -k (float64)and(3.5)'
  'tests/gpu/test_gated_delta_cuda.py -k next-float32'
  'tests/e2e/test_gated_delta.py -k fsdp'
  'tests/e2e/test_gated_delta.py -k not(fsdp)'
  'tests/e2e/test_vision.py -k (images_on_a_gpu)and(fsdp)'
  'tests/e2e/test_vision.py -k (images_on_a_gpu)and(megatron)'
  'tests/gpu/test_sglang_cuda.py -k keep'
  'tests/gpu/test_sglang_cuda.py -k recompute'
  'tests/gpu/test_megatron_cuda.py -k not((every_layout)or(of_the_source)or(shared_sequences)or(float64)or(products)or(fp8_trains))'
  'tests/gpu/test_megatron_cuda.py -k (products)or(fp8_trains)'
  'tests/gpu/test_fsdp_cuda.py -k not((compiled)or(loss_and_gradients))'
  tests/gpu/test_several_nodes_cuda.py
  'tests/e2e/test_experts.py -k (large_updates)and(sglang)'
  'tests/e2e/test_router_replay.py -k (vllm)and(not(copies))'
  'tests/gpu/test_vllm_cuda.py -k two_stages'
  'tests/gpu/test_gated_delta_cuda.py -k (trains_as)and(lora)and(not(1-one))and(next)'
  'tests/gpu/test_gated_delta_cuda.py -k (trains_as)and(lora)and(not(1-one))and(3.5)'
  'tests/gpu/test_sglang_cuda.py -k retracts'
  'tests/gpu/test_elastic_cuda.py -k sglang'
  'tests/gpu/test_fp8_cuda.py -k 128-sglang'
  'tests/gpu/test_fp8_cuda.py -k (kernel)or(128-vllm)'
  tests/gpu/test_vision_cuda.py
  'tests/gpu/test_fsdp_cuda.py -k compiled'
  'tests/gpu/test_vllm_cuda.py -k not(two_stages)'
  'tests/e2e/test_router_replay.py -k vllm-copies'
  'tests/gpu/test_megatron_cuda.py -k trains_as'
  'tests/gpu/test_megatron_cuda.py -k same_adapters'
  'tests/gpu/test_megatron_cuda.py -k (of_the_source)or(float64)'
  'tests/gpu/test_megatron_cuda.py -k shared_sequences'
  'tests/gpu/test_gated_delta_cuda.py -k (trains_as)and(1-one)'
  'tests/gpu/test_gated_delta_cuda.py -k next-bfloat16'
  'tests/gpu/test_elastic_cuda.py -k vllm'
  'tests/e2e/test_router_replay.py -k (sglang)and(not(copies))'
  'tests/e2e/test_router_replay.py -k sglang-copies'
  'tests/e2e/test_experts.py -k gpt_oss'
  'tests/gpu/test_fp8_cuda.py -k checkpoint[128]'
  'tests/e2e/test_experts.py -k (processes_of_a_copy)and(vllm)'
  'tests/e2e/test_experts.py -k (processes_of_a_copy)and(sglang)'
  'tests/gpu/test_fp8_cuda.py -k latent-sglang'
  'tests/gpu/test_fp8_cuda.py -k checkpoint[latent]'
  'tests/gpu/test_fp8_cuda.py -k 64-sglang'
  'tests/gpu/test_fp8_cuda.py -k checkpoint[64]'
  'tests/e2e/test_experts.py -k (large_updates)and(vllm)'
  'tests/gpu/test_fp8_cuda.py -k 64-vllm'
  'tests/e2e/test_latent_attention.py -k vllm'
  'tests/gpu/test_fp8_cuda.py -k latent-vllm'
  'tests/e2e/test_latent_attention.py -k sglang'
  'tests/gpu/test_fp8_cuda.py -k checkpoint[experts]'
  'tests/gpu/test_fp8_cuda.py -k experts-sglang'
  'tests/gpu/test_fp8_cuda.py -k experts-vllm'
  'tests/gpu/test_fp8_cuda.py -k copies-sglang'
  'tests/gpu/test_fp8_cuda.py -k copies-vllm'
  'tests/gpu/test_fsdp_cuda.py -k loss_and_gradients'
  'tests/gpu/test_gated_delta_cuda.py -k bit_by_bit'
)
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
if [ $# -eq 0 ]; then
  printf '%s\0all\0' "${parts[@]}" | xargs -0 -n 2 -P 3 bash -c 'run "$@"' _ &
else
  rest='' number=0
  while read -r file; do
    [[ " ${gpu[*]} " == *" $file "* ]] || rest+=" $file"
  done < <(grep -rl --include='test_*.py' 'mark\.gpu' tests)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # as in jobs: threads of many processes wait for each other
  orders=(all all) at_once=16
  if [ "$(nvidia-smi -L | wc -l)" -ge 2 ]; then
    orders=('0,1' '1,0') at_once=28  # tests that need one GPU take the first that they see
  fi
  for part in "$rest" "${gpu[@]}"; do
    printf '%s -m gpu\0%s\0' "$part" "${orders[number++ % 2]}"
  done | xargs -0 -n 2 -P "$at_once" bash -c 'run "$@"' _ &
fi
wait $!
if [ -e "$log/failed" ]; then echo "failed: $(paste -sd ' ' "$log/failed")"; exit 1; fi
