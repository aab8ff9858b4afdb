// The kernel that torch's _scaled_dot_product_efficient_attention launches for float32 numbers on sm_80 and later, for
// widths up to 64: instantiated from the headers that torch ships, so that its PTX can be emulated.
#include <ATen/native/transformers/cuda/mem_eff_attention/kernel_forward.h>

// Scalar, architecture, aligned; queries and keys of a block, largest width; dropout and bias are supported.
using Attention = PyTorchMemEffAttention::AttentionKernel<float, cutlass::arch::Sm80, true, 64, 64, 64, true, true>;

extern "C" __global__ void __launch_bounds__(Attention::kNumThreads, Attention::kMinBlocksPerSm)
    efficient(typename Attention::Params params) {
#ifdef __CUDA_ARCH__
  if (params.advance_to_block()) {
    Attention::attention_kernel(params);
  }
#endif
}
