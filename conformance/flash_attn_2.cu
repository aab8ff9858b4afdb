// Two kernels of FlashAttention 2 for float16, without masks and dropout, with blocks of 128 queries: for heads of up to
// 32, to which the package pads the split lift, and for heads of 128, whose speed on an A100 is published.
#include <cstdint>
#include <ATen/cuda/PhiloxCudaState.h>
#include "namespace_config.h"
#include "flash.h"
#include "flash_fwd_kernel.h"

using FLASH_NAMESPACE::Flash_fwd_params;

// Width of a head, keys of a block; whether sizes are multiples of those of blocks, and heads as wide as that.
template <int Width, int Keys, bool IsEven>
__device__ void attend(const Flash_fwd_params& params) {
  using Traits = Flash_fwd_kernel_traits<Width, 128, Keys, 4, false, false, cutlass::half_t>;
  FLASH_NAMESPACE::compute_attn<Traits, false, false, false, false, IsEven, IsEven, false, false>(params);
}

extern "C" __global__ void __launch_bounds__(128) flash_attn_2_32(__grid_constant__ const Flash_fwd_params params) {
  attend<32, 128, false>(params);
}

extern "C" __global__ void __launch_bounds__(128) flash_attn_2_128(__grid_constant__ const Flash_fwd_params params) {
  attend<128, 64, true>(params);
}
