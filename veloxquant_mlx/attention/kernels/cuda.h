// The words that the kernels are written in, for CUDA (through NVRTC).
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define FN __device__ __forceinline__
#define SHARED __shared__
#define THREAD
#define BARRIER() __syncthreads()
#define UNROLL _Pragma("unroll")
#define SOME_UNROLL _Pragma("unroll 8")
FN float EXP2(float x) {  // two units in the last place, and zero below the normal numbers
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
template <typename T> FN T shfl(T x, int lane) { return __shfl_sync(~0u, x, lane); }
template <typename T> FN T shfl_xor(T x, int mask) { return __shfl_xor_sync(~0u, x, mask); }
FN void FENCE() { __threadfence(); }
FN unsigned ticket(unsigned* at, unsigned last) { return atomicInc(at, last); }  // after the last comes zero
FN bool any_lane(bool x) { return __any_sync(~0u, x); }
typedef float FLOAT32;
typedef __half FLOAT16;
typedef __nv_bfloat16 BFLOAT16;
