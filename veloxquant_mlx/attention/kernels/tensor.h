// Decode attention by CUDA's tensor cores over rows whose keys and values are both packed: LO to HI of `decode.h`.
//
// A warp takes TILE rows at a time, and the codes of the next STAGES - 1 tiles are on their way while it works. Scores:
// queries (16) times keys (8 rows): lane (r, j) = (LANE / 4, LANE % 4) has query rows r and r + 8, and keys of row r.
// Sums: values (16 channels) times weights (8 queries): the weights of lane (r, j) are those of query r, as the scores
// left them. Which number of a row counts as which of the 16 is free, so each lane reads neighbouring codes: keys in
// chunks of D / 4 channels, values in chunks of DV / 8.

const int HELD = counts[7] - counts[6];
const int r = LANE >> 2, j = LANE & 3;
const size_t head = GROUP_Y;
// The compiler would load constants anew for every use: it cannot know that this is zero.
const unsigned zero = unsigned(counts[0]) >> 31;
#define STEPS (DT / 16)
#define BLOCKS (DV / 16)
#define SUBS (TILE / 32)
// The group of unit u of chunk i, both powers of two: either all of a chunk is in one group, or it is whole groups.
#define GROUP_OF(i, chunk, u, group) ((group) >= (chunk) ? (i) * (chunk) / (group) : (i) * ((chunk) / (group)) + 8 * (u) / (group))
#define SHIFT 15.0f  // weights are kept below 2^15: the smallest of them then keep their digits in half precision

#if KEYS == CHANNEL_AFFINE
#define STEPS_IN_QUERY (K_GROUP >= 32)  // steps of keys go into the queries
#define BY_HALVES (STEPS_IN_QUERY && K_BITS == 4)  // a product is over one half of the tile, else over both
#if BY_HALVES
#define TILE_ROW(sub, n, e) (32 * (sub) + 8 * j + 4 * (e) + (n))  // the row of score (n, e) of this lane
#define V_PLACE(row) (((row) & 32) | ((row) & 7) << 2 | ((row) >> 3 & 3))  // rows of lanes that read together lie together
#else
#define TILE_ROW(sub, n, e) (16 * j + 8 * (e) + 4 * (sub) + (n))
#define V_PLACE(row) (((row) & 15) * 4 + ((row) >> 4))
#endif
#define QUERY_CHANNEL(step, x) (16 * (step) + 8 * ((x) / 2) + 2 * j + (x) % 2)
// Where byte `at` of a channel lies: lanes that read together do not wait for one bank.
#define K_MOVED(channel, at) (BY_HALVES ? (at) ^ ((channel) & 4) << 2 : (at))
#define K_BYTES (DT * 8 * K_BITS)
#define STAGED (2 * K_GROUP == TILE)
#define K_SIZES (STAGED ? 4 * DT : 0)
#else
#define TILE_ROW(sub, n, e) (8 * (n) + 2 * j + (e))
#if KEYS == TOKEN_AFFINE
#define QUERY_CHANNEL(step, x) (j * (DT / 4) + 8 * ((step) / 2) + 2 * ((step) % 2) + (x) / 2 + 4 * ((x) % 2))
#define K_SIZES (2 * TILE * K_GROUPS)
#else
#define QUERY_CHANNEL(step, x) (j * (DT / 4) + 4 * (step) + (x))
#define K_SIZES (2 * TILE)
#endif
#define V_PLACE(row) (((row) & ~7) | ((row) & 1) << 2 | ((row) & 7) >> 1)
#define K_BYTES (TILE * DT / 8 * K_BITS)
#endif
#define V_ROW (DV / 8 * V_BITS)
#define V_LANE (V_ROW / 8)
#define V_SPREAD (V_ROW == 64 || V_ROW == 128)  // then rows are moved about, so that lanes do not wait for one bank
#define V_BYTES (TILE * V_ROW)
#define V_SIZES (2 * TILE * (VALUES == TOKEN_AFFINE ? V_GROUPS : 1))
#define K_SIZES_AT (K_BYTES + V_BYTES)
#define V_SIZES_AT (K_SIZES_AT + K_SIZES * (KEYS == CODEBOOK ? 1 : 2))
#define STAGE_BYTES (V_SIZES_AT + V_SIZES * (VALUES == CODEBOOK ? 1 : 2))

// Levels of all pairs of codes, or of all bytes of four codes (2 bits), a copy for every lane (or for two, or four):
// lanes then never wait for the same bank. An entry takes as many bytes either way: a pair is half as long as two.
#define PAIR_CODES(bits) ((bits) == 2 ? 4 : 2)  // codes of an entry
#define TABLE_WORDS(bits) ((1 << PAIR_CODES(bits) * (bits)) * COPIES)
#define K_TABLE_WORDS (KEYS == CODEBOOK ? TABLE_WORDS(K_BITS) : 0)
#define V_TABLE_WORDS (VALUES == CODEBOOK && !SAME_TABLE ? TABLE_WORDS(V_BITS) : 0)
POOL(pool);
SHARED float tops[WARPS * 16], weights[WARPS * 16];
uint8_t* stages = reinterpret_cast<uint8_t*>(pool + K_TABLE_WORDS + V_TABLE_WORDS) + WARP * STAGES * STAGE_BYTES;

#if QUERY_SIGNS
// Queries in the basis of the codes lie where codes will be.
float* turned = reinterpret_cast<float*>(pool + K_TABLE_WORDS + V_TABLE_WORDS);
for (int row = WARP; row < ALL_ROWS; row += WARPS) {
  float x[DT / 32];
  UNROLL
  for (int i = 0; i < DT / 32; i++)
    x[i] = float(q[(head * ALL_ROWS + row) * DT + LANE + 32 * i]) * q_signs[LANE + 32 * i];
  hadamard(x, LANE);
  UNROLL
  for (int i = 0; i < DT / 32; i++) turned[row * DT + LANE + 32 * i] = x[i] * (QUERY_NORM * scale[0]);
}
#define QUERY_AT(row, c) turned[(row) * DT + (c)]
#else
#define QUERY_AT(row, c) (float(QUERY[(head * ALL_ROWS + (row)) * DT + (c)]) * scale[0])
#endif

#define FILL(words, at, table, bits)                                                                             \
  for (int i = WARP * 32 + LANE; i < (words); i += WARPS * 32) {                                                 \
    const unsigned codes = i / COPIES >> (PAIR_CODES(bits) == 4 ? 2 * (bits) * (i % 2) : 0), last = (1 << (bits)) - 1; \
    pool[(at) + i] = pair_of(float(table[codes & last]), float(table[codes >> (bits) & last]));                  \
  }
#define OF_LANE(bits) (PAIR_CODES(bits) / 2 * (LANE % (2 * COPIES / PAIR_CODES(bits))))
#if KEYS == CODEBOOK
FILL(K_TABLE_WORDS, 0, k_table, K_BITS)
const Place k_pairs = place_of(pool + OF_LANE(K_BITS), zero);
#endif
#if VALUES == CODEBOOK
FILL(V_TABLE_WORDS, K_TABLE_WORDS, v_table, V_BITS)
const Place v_pairs = place_of(pool + (SAME_TABLE ? 0 : K_TABLE_WORDS) + OF_LANE(V_BITS), zero);
#endif
BARRIER();

unsigned query[STEPS][QUERIES][2];
UNROLL
for (int s = 0; s < STEPS; s++) {
  UNROLL
  for (int o = 0; o < QUERIES; o++) {
    const int row = r + 8 * o;
    UNROLL
    for (int x = 0; x < 2; x++) {
      float a = 0.0f, b = 0.0f;
      if (row < ALL_ROWS) {
        a = QUERY_AT(row, QUERY_CHANNEL(s, 2 * x));
        b = QUERY_AT(row, QUERY_CHANNEL(s, 2 * x + 1));
      }
      query[s][o][x] = pair_of(a, b);
    }
  }
}
#if QUERY_SIGNS
BARRIER();  // before codes are asked for
#endif

float top[QUERIES], weight[QUERIES], acc[QUERIES][BLOCKS][4];
UNROLL
for (int o = 0; o < QUERIES; o++) {
  top[o] = LOW;
  weight[o] = 0.0f;
  UNROLL
  for (int m = 0; m < BLOCKS; m++) acc[o][m][0] = acc[o][m][1] = acc[o][m][2] = acc[o][m][3] = 0.0f;
}

const uint8_t* k_bytes = reinterpret_cast<const uint8_t*>(k_words);
const uint8_t* v_bytes = reinterpret_cast<const uint8_t*>(v_words);
const int shares = counts[16], each = ((HELD + shares - 1) / shares + TILE - 1) / TILE * TILE;
const int last = HELD < (GROUP_X + 1) * each ? HELD : (GROUP_X + 1) * each;
int base = GROUP_X * each + WARP * TILE, ahead = base;

// Asks for the codes of the tile at `ahead`; past the end there is nothing to ask for, but still a group.
#define ASK(stage)                                                                                                   \
  {                                                                                                                  \
    uint8_t* to = stages + (stage) * STAGE_BYTES;                                                                    \
    if (ahead < last) {                                                                                              \
      ASK_KEYS(to)                                                                                                   \
      const size_t row = head * counts[9] + ahead;                                                                   \
      UNROLL                                                                                                         \
      for (int i = LANE * 16; i < V_BYTES; i += 512) {                                                               \
        const int line = i / V_ROW, at = i % V_ROW;                                                                  \
        const int moved = V_SPREAD ? V_PLACE(line) * V_ROW + (at ^ (V_PLACE(line) & 2) << 4) : i;                    \
        copy_later<16>(to + K_BYTES + moved, v_bytes + row * V_ROW + i);                                             \
      }                                                                                                              \
      copy_sizes<V_SIZES>(to + V_SIZES_AT, v_scales + row * (V_SIZES / (2 * TILE)), LANE);                           \
      ASK_V_BIASES(to)                                                                                               \
    }                                                                                                                \
    close_group();                                                                                                   \
    ahead += WARPS * TILE;                                                                                           \
  }
#if KEYS == CHANNEL_AFFINE
// Every channel has a few bytes of a line; the other warps ask for the rest of it at about the same time.
const size_t k_row = size_t(counts[8]) / 8 * K_BITS, groups = counts[8] / K_GROUP;
#define PIECE (K_BITS % 2 ? 8 : 16)
#define PIECES (8 * K_BITS / PIECE)
#define ABREAST (32 / PIECES)  // channels whose codes are asked for at a time
const int k_channel = LANE / PIECES, k_at = LANE % PIECES * PIECE, k_to = k_channel * (8 * K_BITS) + K_MOVED(k_channel, k_at);
const uint8_t* k_from = k_bytes + (head * DT + k_channel) * k_row + k_at;
const size_t size_from = (head * DT + LANE) * groups;
#define ASK_KEYS(to)                                                                                                 \
  UNROLL                                                                                                             \
  for (int i = 0; i < DT; i += ABREAST)                                                                              \
    if (32 % PIECES == 0 || (k_channel < ABREAST && k_channel + i < DT))                                             \
      copy_line<PIECE>(to + k_to + i * (8 * K_BITS), k_from + ahead / 8 * K_BITS + i * k_row);                       \
  if (STAGED) {                                                                                                      \
    UNROLL                                                                                                           \
    for (int c = LANE, i = 0; i < DT; c += 32, i += 32) {                                                            \
      copy_line<4>(to + K_SIZES_AT + 4 * c, k_scales + size_from + ahead / K_GROUP + i * groups);                    \
      copy_line<4>(to + K_SIZES_AT + K_SIZES + 4 * c, k_biases + size_from + ahead / K_GROUP + i * groups);          \
    }                                                                                                                \
  }
#else
#define ASK_KEYS(to)                                                                                                 \
  const size_t k_at = head * counts[8] + ahead;                                                                      \
  UNROLL                                                                                                             \
  for (int i = LANE * 16; i < K_BYTES; i += 512) copy_later<16>(to + i, k_bytes + k_at * (K_BYTES / TILE) + i);      \
  copy_sizes<K_SIZES>(to + K_SIZES_AT, k_scales + k_at * (K_SIZES / (2 * TILE)), LANE);                              \
  ASK_K_BIASES(to)
#endif
#if KEYS == TOKEN_AFFINE
#define ASK_K_BIASES(to) copy_sizes<K_SIZES>(to + K_SIZES_AT + K_SIZES, k_biases + k_at * K_GROUPS, LANE);
#else
#define ASK_K_BIASES(to)
#endif
#if VALUES == TOKEN_AFFINE
#define ASK_V_BIASES(to) copy_sizes<V_SIZES>(to + V_SIZES_AT + V_SIZES, v_biases + row * V_GROUPS, LANE);
#else
#define ASK_V_BIASES(to)
#endif

unsigned k_masks[8], other_masks[8];
#define v_masks (K_BITS == V_BITS ? k_masks : other_masks)
UNROLL
for (int i = 0; i < 8; i++) k_masks[i] = mask_of<K_BITS>(i) + zero, other_masks[i] = mask_of<V_BITS>(i) + zero;

UNROLL
for (int stage = 0; stage < STAGES - 1; stage++) ASK(stage)
int stage = 0;
for (; base < last; base += WARPS * TILE) {
  meet();  // all lanes have read what is now overwritten
  ASK(stage == 0 ? STAGES - 1 : stage - 1)
  await_groups<STAGES - 1>();
  meet();
  const uint8_t* here = stages + stage * STAGE_BYTES;
  stage = stage + 1 == STAGES ? 0 : stage + 1;
  const FLOAT16* k_size = reinterpret_cast<const FLOAT16*>(here + K_SIZES_AT);
  const FLOAT16* v_size = reinterpret_cast<const FLOAT16*>(here + V_SIZES_AT);

  float score[SUBS][4][4];
#define SCORE(h, n, s, b0, b1)                                                                    \
  ((s) == 0 ? mma_first : mma)(score[h][n], query[s][0][0], query_low(s, 0), query[s][0][1], \
                               query_low(s, 1), b0, b1)
#define query_low(s, x) (QUERIES > 1 ? query[s][QUERIES - 1][x] : 0u)

#if KEYS == CHANNEL_AFFINE && STEPS_IN_QUERY
  // Steps go into the queries, codes in as 1024 plus a power of two times the code. Rows 0 to 7 of the product are the
  // queries by the steps of the first 32 rows of the tile, rows 8 to 15 the same ones by those of the last 32 (or empty).
  UNROLL
  for (int o = 0; o < QUERIES; o++) {
    float raw[2][4][4], stepped[4], biased[4];
#if K_BITS == 2
    unsigned pairs[STEPS / 2][4];
    UNROLL
    for (int s = 0; s < STEPS; s += 2) load_turned(here + (16 * s + LANE) * (8 * K_BITS), pairs[s / 2]);
#endif
    UNROLL
    for (int s = 0; s < STEPS; s++) {
      unsigned code[4];  // pairs of channels: two of the first half of the rows, two of the second
#if K_BITS == 4
      load_turned(here + K_BYTES / STEPS * s + (LANE & 15) * 32 + K_MOVED(LANE, LANE & 16), code);
#elif K_BITS == 2
      code[0] = code[2] = pairs[s / 2][s % 2 * 2], code[1] = code[3] = pairs[s / 2][s % 2 * 2 + 1];
#else
      unsigned units[4];
      UNROLL
      for (int x = 0; x < 4; x++) units[x] = unaligned<K_BITS>(here + QUERY_CHANNEL(s, x) * (8 * K_BITS), r);
      UNROLL
      for (int x = 0; x < 4; x++) code[x] = abreast<K_BITS>(units[2 * (x % 2)], units[2 * (x % 2) + 1], x / 2);
#endif
      unsigned step[2][2], bias[2];
      UNROLL
      for (int x = 0; x < 2; x++) {
        const int c = QUERY_CHANNEL(s, 2 * x);
        if (STAGED) {
          unsigned of_channel[2];
          load<8>(k_size + 2 * c, of_channel);
          step[0][x] = bytes_of(of_channel[0], of_channel[1], 0x5410);
          step[1][x] = bytes_of(of_channel[0], of_channel[1], 0x7632);
          load<8>(k_size + K_SIZES / 2 + 2 * c, of_channel);
          bias[x] = bytes_of(of_channel[0], of_channel[1], r < 4 ? 0x5410 : 0x7632);
        } else {
          const size_t at = (head * DT + c) * groups + base / K_GROUP;
          step[0][x] = step[1][x] = halves(k_scales[at], k_scales[at + groups]);
          bias[x] = halves(k_biases[at], k_biases[at + groups]);
        }
        step[0][x] = pair_mul(query[s][o][x], step[0][x]), step[1][x] = pair_mul(query[s][o][x], step[1][x]);
      }
      UNROLL
      for (int h = 0; h < 2; h++) {
        const int first = BY_HALVES ? h : 0;
        UNROLL
        for (int n = 0; n < 4; n++)
          (s == 0 ? mma_first : mma)(raw[h][n], step[first][0], BY_HALVES ? 0u : step[1][0], step[first][1],
                                     BY_HALVES ? 0u : step[1][1], digits<K_BITS>(code[2 * h], 4 * h + n, k_masks),
                                     digits<K_BITS>(code[2 * h + 1], 4 * h + n, k_masks));
      }
      (s == 0 ? mma_first : mma)(stepped, step[0][0], step[1][0], step[0][1], step[1][1], INTEGER, INTEGER);
      (s == 0 ? mma_first : mma)(biased, query[s][o][0], 0u, query[s][o][1], 0u, bias[0], bias[1]);
    }
    const float other = shfl_xor(biased[0], 2);  // the sum for the other half of the rows
    UNROLL
    for (int h = 0; h < 2; h++) {
      const bool second = BY_HALVES ? h == 1 : j > 1;
      const float bias = second == (j > 1) ? biased[0] : other;
      UNROLL
      for (int n = 0; n < 4; n++) {
        const float part = 1.0f / float(1 << left_of<K_BITS>(4 * h + n));
        const float rest = bias - (second ? stepped[2] : stepped[0]) * part;
        UNROLL
        for (int e = 0; e < 2; e++)
          score[h][n][2 * o + e] = (second && !BY_HALVES ? raw[h][n][2 + e] : raw[h][n][e]) * part + rest;
      }
    }
  }
#elif KEYS == CHANNEL_AFFINE
  UNROLL
  for (int s = 0; s < STEPS; s++) {
    unsigned code[4], step[2], bias[2];
    UNROLL
    for (int x = 0; x < 4; x++) code[x] = unaligned<K_BITS>(here + QUERY_CHANNEL(s, x) * (8 * K_BITS), r);
    UNROLL
    for (int x = 0; x < 2; x++) {
      const size_t at = (head * DT + QUERY_CHANNEL(s, 2 * x)) * groups + (base + 8 * r) / K_GROUP;
      step[x] = halves(k_scales[at], k_scales[at + groups]);
      bias[x] = halves(k_biases[at], k_biases[at + groups]);
    }
    UNROLL
    for (int h = 0; h < SUBS; h++) {
      const unsigned a = facing<K_BITS>(code[0], code[1], h), b = facing<K_BITS>(code[2], code[3], h);
      UNROLL
      for (int n = 0; n < 4; n++)
        SCORE(h, n, s, pair_fma(whole<K_BITS>(a, n, k_masks), step[0], bias[0]), pair_fma(whole<K_BITS>(b, n, k_masks), step[1], bias[1]));
    }
  }
#else
  // The rows innermost: products that add to the same sum would wait for each other.
  unsigned code[4][(DT / 4 * K_BITS + 31) / 32];
  UNROLL
  for (int n = 0; n < 4; n++)
    load<DT / 4 * K_BITS / 8>(here + (8 * n + r) * (K_BYTES / TILE) + j * (DT / 4 * K_BITS / 8), code[n]);
  UNROLL
  for (int u = 0; u < DT / 32; u++) {
    UNROLL
    for (int s = 0; s < 2; s++) {
      UNROLL
      for (int n = 0; n < 4; n++) {
        const unsigned x = unit<K_BITS>(code[n], u);
#if KEYS == TOKEN_AFFINE
        const int group = (8 * n + r) * K_GROUPS + GROUP_OF(j, DT / 4, u, K_GROUP);
        const unsigned step = halves(k_size[group], k_size[group]);
        const unsigned bias = halves(k_size[K_SIZES / 2 + group], k_size[K_SIZES / 2 + group]);
        const unsigned y = K_BITS == 4 ? x : facing<K_BITS>(x, x >> (4 * K_BITS), 0);
        SCORE(0, n, 2 * u + s, pair_fma(whole<K_BITS>(y, 2 * s, k_masks), step, bias), pair_fma(whole<K_BITS>(y, 2 * s + 1, k_masks), step, bias));
#elif K_BITS == 2
        unsigned a, b;
        four_levels<COPIES>(k_pairs, part_of<8>(code[n][u / 2], 2 * (u % 2) + s), a, b);
        SCORE(0, n, 2 * u + s, a, b);
#else
        const unsigned a = part_of<2 * K_BITS>(x, 2 * s), b = part_of<2 * K_BITS>(x, 2 * s + 1);
        SCORE(0, n, 2 * u + s, level<COPIES>(k_pairs, a), level<COPIES>(k_pairs, b));
#endif
      }
    }
  }
#if KEYS == CODEBOOK
  UNROLL
  for (int n = 0; n < 4; n++) {
    UNROLL
    for (int e = 0; e < 2; e++) {
      const float size = float(k_size[TILE_ROW(0, n, e)]);
      score[0][n][e] *= size;
      score[0][n][2 + e] *= size;
    }
  }
#endif
#endif

  unsigned p[SUBS][4][QUERIES];
  UNROLL
  for (int o = 0; o < QUERIES; o++) {
    float high = LOW;
    UNROLL
    for (int h = 0; h < SUBS; h++) {
      UNROLL
      for (int n = 0; n < 4; n++) {
        UNROLL
        for (int e = 0; e < 2; e++) {
          if (base + TILE > last && base + TILE_ROW(h, n, e) >= last) score[h][n][2 * o + e] = LOW;
          high = fmaxf(high, score[h][n][2 * o + e]);
        }
      }
    }
    if (any_lane(high > top[o])) {  // rarely, once the first rows have been seen
      high = fmaxf(high, shfl_xor(high, 1));
      high = fmaxf(high, shfl_xor(high, 2));
      high = fmaxf(high, top[o]);
      const float shrink = EXP2(top[o] - high);
      const float even = shfl(shrink, 8 * j), odd = shfl(shrink, 8 * j + 4);
      weight[o] *= shrink;
      top[o] = high;
      UNROLL
      for (int m = 0; m < BLOCKS; m++) acc[o][m][0] *= even, acc[o][m][1] *= odd, acc[o][m][2] *= even, acc[o][m][3] *= odd;
    }
    const float zero = top[o] - SHIFT;
    UNROLL
    for (int h = 0; h < SUBS; h++) {
      UNROLL
      for (int n = 0; n < 4; n++) {
        const float a = EXP2(score[h][n][2 * o] - zero), b = EXP2(score[h][n][2 * o + 1] - zero);
        weight[o] += a + b;
        p[h][n][o] = pair_of(a, b);
      }
    }
  }

  UNROLL
  for (int h = 0; h < SUBS; h++) {
    UNROLL
    for (int n = 0; n < 4; n += 2) {
      unsigned code[2][2][(V_LANE + 3) / 4];
      UNROLL
      for (int y = 0; y < 2; y++) {
        UNROLL
        for (int e = 0; e < 2; e++) {
          const int row = TILE_ROW(h, n + y, e), place = V_SPREAD ? V_PLACE(row) : row;
          const int at = V_SPREAD ? (r * V_LANE) ^ ((place & 2) << 4) : r * V_LANE;
          load<V_LANE>(here + K_BYTES + place * V_ROW + at, code[y][e]);
        }
      }
#if VALUES == CODEBOOK
      unsigned size[2];
      UNROLL
      for (int y = 0; y < 2; y++) size[y] = halves(v_size[TILE_ROW(h, n + y, 0)], v_size[TILE_ROW(h, n + y, 1)]);
#endif
      UNROLL
      for (int u = 0; u < DV / 64; u++) {
        unsigned x[2][2][4];  // 16 rows of the product by 4 values
        UNROLL
        for (int y = 0; y < 2; y++) {
#if VALUES == CODEBOOK && V_BITS == 2
          UNROLL
          for (int z = 0; z < 2; z++) {
            const unsigned codes = laced<V_BITS>(code[y][0][u / 2], code[y][1][u / 2], z);
            UNROLL
            for (int i = 0; i < 4; i += 2) {
              four_levels<COPIES>(v_pairs, part_of<8>(codes, 2 * (u % 2) + i / 2), x[y][z][i], x[y][z][i + 1]);
              x[y][z][i] = pair_mul(x[y][z][i], size[y]), x[y][z][i + 1] = pair_mul(x[y][z][i + 1], size[y]);
            }
          }
#else
          const unsigned a = unit<V_BITS>(code[y][0], u), b = unit<V_BITS>(code[y][1], u);
#if VALUES == TOKEN_AFFINE
          const int group = GROUP_OF(r, DV / 8, u, V_GROUP);
          const int first = TILE_ROW(h, n + y, 0) * V_GROUPS + group, second = TILE_ROW(h, n + y, 1) * V_GROUPS + group;
          const unsigned step = halves(v_size[first], v_size[second]);
          const unsigned bias = halves(v_size[V_SIZES / 2 + first], v_size[V_SIZES / 2 + second]);
#endif
          UNROLL
          for (int z = 0; z < 2; z++) {
            UNROLL
            for (int i = 0; i < 4; i++) {
#if VALUES == TOKEN_AFFINE
              x[y][z][i] = pair_fma(whole<V_BITS>(abreast<V_BITS>(a, b, z), 4 * z + i, v_masks), step, bias);
#else
              const unsigned codes = LACED ? part_of<8>(laced<4>(a, b, z), i) : both<V_BITS>(facing<V_BITS>(a, b, z), i);
              x[y][z][i] = pair_mul(level<COPIES>(v_pairs, codes), size[y]);
#endif
            }
          }
#endif
        }
        UNROLL
        for (int i = 0; i < 4; i++) {
          UNROLL
          for (int o = 0; o < QUERIES; o++) mma(acc[o][4 * u + i], x[0][0][i], x[0][1][i], x[1][0][i], x[1][1][i], p[h][n][o], p[h][n + 1][o]);
        }
      }
    }
  }
}

await_groups<0>();
BARRIER();  // nobody reads tables and codes any more
float* sums = reinterpret_cast<float*>(pool);
UNROLL
for (int o = 0; o < QUERIES; o++) {
  weight[o] += shfl_xor(weight[o], 1);
  weight[o] += shfl_xor(weight[o], 2);
  if (j == 0) {
    tops[WARP * 16 + r + 8 * o] = top[o];
    weights[WARP * 16 + r + 8 * o] = weight[o];
  }
}
BARRIER();
for (int w = 0; w < WARPS; w++) {
  if (w == WARP) {
    UNROLL
    for (int o = 0; o < QUERIES; o++) {
      UNROLL
      for (int x = 0; x < 2; x++) {
        const int row = 8 * o + 2 * j + x;
        float high = LOW;
        for (int v = 0; v < WARPS; v++) high = fmaxf(high, tops[v * 16 + row]);
        const float shrink = EXP2(tops[w * 16 + row] - high - SHIFT);
        if (row < ALL_ROWS) {
          UNROLL
          for (int m = 0; m < BLOCKS; m++) {
            UNROLL
            for (int y = 0; y < 2; y++) {
              const int of = LACED ? 2 * (m % 4) + y : m % 4 + 4 * y, c = row * DV + r * (DV / 8) + 8 * (m / 4) + of;
              sums[c] = (w ? sums[c] : 0.0f) + acc[o][m][2 * y + x] * shrink;
            }
          }
        }
      }
    }
  }
  BARRIER();
}
const size_t place = (size_t(GROUP_X) * ALL_HEADS + head) * ALL_ROWS;
for (int i = WARP * 32 + LANE; i < ALL_ROWS * DV; i += WARPS * 32) part[place * DV + i] = sums[i];
for (int i = WARP * 32 + LANE; i < ALL_ROWS; i += WARPS * 32) {
  float high = LOW, total = 0.0f;
  for (int v = 0; v < WARPS; v++) high = fmaxf(high, tops[v * 16 + i]);
  for (int v = 0; v < WARPS; v++) total += weights[v * 16 + i] * EXP2(tops[v * 16 + i] - high - SHIFT);
  part_top[place + i] = high;
  part_weight[place + i] = total;
}
