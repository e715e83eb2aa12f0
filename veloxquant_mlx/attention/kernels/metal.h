// The words that the kernels are written in, for Metal. No Metal device has run them yet.
#define FN inline
#define SHARED threadgroup
#define THREAD thread
#define EXP2(x) metal::exp2(x)
#define BARRIER() threadgroup_barrier(mem_flags::mem_threadgroup)
#define UNROLL _Pragma("clang loop unroll(full)")
#define SOME_UNROLL
template <typename T> FN T shfl(T x, int lane) { return simd_shuffle(x, ushort(lane)); }
template <typename T> FN T shfl_xor(T x, int mask) { return simd_shuffle_xor(x, ushort(mask)); }
FN bool any_lane(bool x) { return simd_any(x); }
typedef float FLOAT32;
typedef half FLOAT16;
typedef bfloat16_t BFLOAT16;
