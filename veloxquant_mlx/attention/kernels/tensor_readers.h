// Codes as pairs of halves. A unit is 8 codes of a row, in the low bits of a word.

#define ONES 0x00010001u
#define INTEGER 0x64006400u  // 1024 as a half: its last bits count by one

// Loads `BYTES` bytes at `at`, which is a multiple of the largest power of two in `BYTES`.
template <int BYTES> FN void load(const void* at, unsigned (&out)[(BYTES + 3) / 4]) {
  if (BYTES % 16 == 0) {
    UNROLL
    for (int i = 0; i < BYTES / 16; i++) {
      const uint4 x = reinterpret_cast<const uint4*>(at)[i];
      out[4 * i] = x.x, out[4 * i + 1] = x.y, out[4 * i + 2] = x.z, out[4 * i + 3] = x.w;
    }
  } else if (BYTES % 8 == 0) {
    UNROLL
    for (int i = 0; i < BYTES / 8; i++) {
      const uint2 x = reinterpret_cast<const uint2*>(at)[i];
      out[2 * i] = x.x, out[2 * i + 1] = x.y;
    }
  } else if (BYTES % 4 == 0) {
    UNROLL
    for (int i = 0; i < BYTES / 4; i++) out[i] = reinterpret_cast<const unsigned*>(at)[i];
  } else if (BYTES % 2 == 0) {
    UNROLL
    for (int i = 0; i < (BYTES + 3) / 4; i++) out[i] = 0;
    UNROLL
    for (int i = 0; i < BYTES / 2; i++)
      out[i / 2] |= unsigned(reinterpret_cast<const uint16_t*>(at)[i]) << (16 * (i % 2));
  } else {
    UNROLL
    for (int i = 0; i < (BYTES + 3) / 4; i++) out[i] = 0;
    UNROLL
    for (int i = 0; i < BYTES; i++) out[i / 4] |= unsigned(reinterpret_cast<const uint8_t*>(at)[i]) << (8 * (i % 4));
  }
}

template <int BITS, int WORDS_> FN unsigned unit(const unsigned (&words)[WORDS_], int u) {
  const int bit = 8 * BITS * u, word = bit >> 5, shift = bit & 31;
  unsigned x = words[word] >> shift;
  if (shift + 8 * BITS > 32) x |= words[word + 1 < WORDS_ ? word + 1 : word] << ((32 - shift) & 31);
  return x;
}

// The first (`high` = 0) or last 4 codes of two units side by side: in the low and in the high half of a word.
template <int BITS> FN unsigned facing(unsigned a, unsigned b, int high) {
  if (BITS == 4) return bytes_of(a, b, high ? 0x7632 : 0x5410);
  const unsigned keep = (1u << (4 * BITS)) - 1;
  return ((a >> (high ? 4 * BITS : 0)) & keep) | (((b >> (high ? 4 * BITS : 0)) & keep) << 16);
}

// Codes of two units side by side: all 8 in each half where they fit in (1 or 2 bits), else those of `facing`.
template <int BITS> FN unsigned abreast(unsigned a, unsigned b, int high) {
  return BITS <= 2 ? bytes_of(a, b, 0x5410) : facing<BITS>(a, b, high);
}
// Code i of 8 in words as `abreast` leaves them: 1024 + 2^left * code as a pair of halves. The last 10 bits of a half are
// its digits: a code need not be moved to the lowest of them. `masks` are those of `mask_of`.
template <int BITS> FN int dropped(int i) {
  return BITS == 1 ? 0 : BITS == 2 ? (i < 5 ? 0 : 6) : BITS * (i % 4) + BITS <= 10 ? 0 : BITS == 4 ? 8 : 9;
}
template <int BITS> FN int left_of(int i) { return BITS * (BITS <= 2 ? i : i % 4) - dropped<BITS>(i); }
template <int BITS> FN unsigned mask_of(int i) { return ONES * (((1u << BITS) - 1) << (BITS * i)); }
template <int BITS> FN unsigned digits(unsigned words, int i, const unsigned (&masks)[8]) {
  return ((words >> dropped<BITS>(i)) & masks[left_of<BITS>(i) / BITS]) | INTEGER;
}
// The same as a pair of whole numbers.
template <int BITS> FN unsigned whole(unsigned words, int i, const unsigned (&masks)[8]) {
  const int left = left_of<BITS>(i);
  const unsigned x = digits<BITS>(words, i, masks);
  if (left == 0) return pair_sub(x, INTEGER);
  const unsigned inverse = (15u - left) << 10, offset = 0x8000u | (25u - left) << 10;  // 2^-left, -2^(10 - left)
  return pair_fma(x, inverse * ONES, offset * ONES);
}

// Code i of each half as one number: that of the low half in the low bits.
template <int BITS> FN unsigned both(unsigned halves, int i) {
  const unsigned x = halves >> (BITS * i), low = (1u << BITS) - 1;
  return (x & low) | ((x >> (16 - BITS)) & (low << BITS));
}

// Codes of two words by turns, one of a and one of b: the even (`odd` = 0) or the odd ones of both (2 or 4 bits).
template <int BITS> FN unsigned laced(unsigned a, unsigned b, int odd) {
  const unsigned even = BITS == 2 ? 0x33333333u : 0x0f0f0f0fu;
  return odd ? ((a >> BITS) & even) | (b & ~even) : (a & even) | ((b << BITS) & ~even);
}

// Number `i` of the parts of `BITS` bits of x.
template <int BITS> FN unsigned part_of(unsigned x, int i) {
  return BITS == 8 ? bytes_of(x, 0, 0x4440 + i) : (x >> (BITS * i)) & ((1u << BITS) - 1);
}

// The levels of a pair of codes; the copies of one lane begin at `pairs`.
template <int COPIES_> FN unsigned level(Place pairs, unsigned codes) { return word_at(pairs, codes * (4 * COPIES_)); }
// The levels of 4 codes, a byte, as two pairs.
template <int COPIES_> FN void four_levels(Place pairs, unsigned codes, unsigned& a, unsigned& b) {
  words_at(pairs, codes * (4 * COPIES_), a, b);
}

// Unit r of bytes in shared memory, 3 bits wide ones too.
template <int BITS> FN unsigned unaligned(const uint8_t* at, int r) {
  unsigned out[1];
  if (BITS != 3) {
    load<BITS == 3 ? 4 : BITS>(at + r * BITS, out);
    return out[0];
  }
  const unsigned* words = reinterpret_cast<const unsigned*>(at);
  const int word = 3 * r / 4, shift = 24 * r & 31;
  return words[word] >> shift | (shift > 8 ? words[word + 1] << (32 - shift) : 0u);
}

// Copies `BYTES` bytes of half-precision sizes, a multiple of 16.
template <int BYTES, typename P> FN void copy_sizes(uint8_t* to, P from, int lane) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(from);
  UNROLL
  for (int i = lane * 16; i < BYTES; i += 512) copy_later<16>(to + i, bytes + i);
}
