// How packed rows are read. A row of codes is a little-endian bit stream in 32-bit words.

#define LOW -3.0e38f
#define LOG2E 1.4426950408889634f

FN float highest_of_lanes(float x) {
  UNROLL
  for (int m = 16; m > 0; m >>= 1) {
    const float other = shfl_xor(x, m);
    x = other > x ? other : x;
  }
  return x;
}
FN float sum_of_lanes(float x) {
  UNROLL
  for (int m = 16; m > 0; m >>= 1) x += shfl_xor(x, m);
  return x;
}

// Hadamard transform of 32 N numbers, those of number LANE + 32 i in x[i]; not yet orthonormal.
template <int N> FN void hadamard(THREAD float (&x)[N], int lane) {
  UNROLL
  for (int i = 0; i < N; i++) {
    UNROLL
    for (int m = 1; m < 32; m <<= 1) {
      const float other = shfl_xor(x[i], m);
      x[i] = lane & m ? other - x[i] : x[i] + other;
    }
  }
  UNROLL
  for (int step = 1; step < N; step <<= 1) {
    UNROLL
    for (int i = 0; i < N; i++) {
      if (i & step) continue;
      const float a = x[i], b = x[i + step];
      x[i] = a + b;
      x[i + step] = a - b;
    }
  }
}

template <int BITS, typename P> FN unsigned code_at(P row, int at) {
  int bit = at * BITS, word = bit >> 5, shift = bit & 31;
  unsigned x = row[word] >> shift;
  if (32 % BITS != 0 && shift + BITS > 32) x |= row[word + 1] << (32 - shift);
  return x & ((1u << BITS) - 1);
}

// Codes `at` to `at + 7`, where `at` is a multiple of 8: they begin at a whole byte.
template <int BITS, typename P> FN void eight_codes(P row, int at, THREAD unsigned (&out)[8]) {
  int bit = at * BITS, word = bit >> 5, shift = bit & 31;
  uint64_t x = row[word];
  if (shift + 8 * BITS > 32) x |= uint64_t(row[word + 1]) << 32;
  x >>= shift;
  if (BITS == 7 && shift > 8) x |= uint64_t(row[word + 2]) << (64 - shift);
  UNROLL
  for (int i = 0; i < 8; i++) out[i] = unsigned(x >> (BITS * i)) & ((1u << BITS) - 1);
}

template <int BITS, typename P> FN unsigned bits_at(P row, int at) {
  int bit = at * BITS, byte = bit >> 3, shift = bit & 7;
  unsigned x = unsigned(row[byte]) >> shift;
  if (8 % BITS != 0 && shift + BITS > 8) x |= unsigned(row[byte + 1]) << (8 - shift);
  return x & ((1u << BITS) - 1);
}

// Index number `place` of the `PLACES` of a row of bytes: above 8 bits all low bytes come first.
template <int BITS, int PLACES, typename P> FN unsigned index_at(P row, int place) {
  if (BITS <= 8) return bits_at<(BITS <= 8 ? BITS : 8)>(row, place);
  return row[place] | bits_at<(BITS > 8 ? BITS - 8 : 1)>(row + PLACES, place) << 8;
}
