#!/bin/sh
# One GPU: a training step of the shape of Qwen3-0.6B beside the same step in plain PyTorch.
#
#   [PEAK=989] bash benchmarks/gpu.sh [WORKLOADS]
#
# PEAK: TFLOP/s of the GPU in bfloat16; an H100 has 989 (NVIDIA H100 datasheet, without sparsity).
# Q/H: bfloat16, 8 prompts of 512 tokens with 8 samples of 1,024 each. Ends in a table. Needs a JAX
# and a torch that see the GPU; TRL is not needed.
set -eu
cd "$(dirname "$0")/.."
# Both contenders keep their memory while the other computes: neither may take the whole GPU.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
exec "${PYTHON:-python}" -m benchmarks.versus --device cuda --against torch \
  --workloads "${1:-Q/H}" --pairs 3 --peak "${PEAK:-989}"
