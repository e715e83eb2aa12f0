// Pairs of half-precision numbers in one word, and products of 16 x 16 by 16 x 8 of them: CUDA's tensor cores.
FN unsigned pair_of(float a, float b) {
  __half2 h = __floats2half2_rn(a, b);
  return *reinterpret_cast<unsigned*>(&h);
}
FN unsigned halves(__half a, __half b) {
  return unsigned(__half_as_ushort(a)) | unsigned(__half_as_ushort(b)) << 16;
}
FN unsigned pair_sub(unsigned a, unsigned b) {
  __half2 h = __hsub2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<unsigned*>(&h);
}
FN unsigned pair_mul(unsigned a, unsigned b) {
  __half2 h = __hmul2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b));
  return *reinterpret_cast<unsigned*>(&h);
}
FN unsigned pair_fma(unsigned a, unsigned b, unsigned c) {
  __half2 h = __hfma2(*reinterpret_cast<__half2*>(&a), *reinterpret_cast<__half2*>(&b), *reinterpret_cast<__half2*>(&c));
  return *reinterpret_cast<unsigned*>(&h);
}
// Rows r and r + 8 of the 16 x 16 matrix are in a0, a2 and a1, a3; the products are added to c, or to zeros.
#define MMA_SYNC "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
FN void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm(MMA_SYNC "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
FN void mma_first(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm(MMA_SYNC "{%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(0.0f));
}
FN unsigned bytes_of(unsigned a, unsigned b, unsigned which) { return __byte_perm(a, b, which); }
// Copies from device memory to shared memory that run beside the products; a group is what was asked for until `close`.
FN unsigned shared_address(const void* p) { return static_cast<unsigned>(__cvta_generic_to_shared(p)); }
// Words of shared memory by the distance in bytes from a place. `zero` keeps the compiler from taking the sum apart.
typedef unsigned Place;
FN Place place_of(const unsigned* p, unsigned zero) { return shared_address(p) ^ zero; }
FN unsigned word_at(Place place, unsigned distance) {
  unsigned x;
  asm("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(place + distance));
  return x;
}
FN void words_at(Place place, unsigned distance, unsigned& a, unsigned& b) {
  asm("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "r"(place + distance));
}
// Four matrices of 8 x 8 halves, turned: lane l says where row l % 8 of matrix l / 8 is, and lane (r, j) gets numbers r of
// rows 2 j and 2 j + 1.
FN void load_turned(const void* at, unsigned (&out)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(at)));
}
template <int BYTES> FN void copy_later(void* to, const void* from) {
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES));
}
// The same for a part of a line of 128 bytes whose rest is asked for soon: it comes with it, as far as the L2 cache.
template <int BYTES> FN void copy_line(void* to, const void* from) {
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from));
  else
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(BYTES));
}
FN void close_group() { asm volatile("cp.async.commit_group;"); }
template <int LEFT> FN void await_groups() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
FN void meet() { __syncwarp(); }
#define POOL(name) extern __shared__ __align__(16) unsigned name[]
