// Decode attention over packed rows: every group of lanes takes a share of the rows of one kv head, keeps a running
// maximum, and leaves its weighted sum to `combine.h`. Lanes are rows while scores are made, channels while values
// are summed. Rows whose values are packed and rows whose values are floats never meet in one share.

const int N = counts[0], PAST = counts[1], KS = counts[2], KE = counts[3], VS = counts[4], VE = counts[5];
const int LO = counts[6], HI = counts[7];  // rows that another kernel takes
const int PACKED_SHARES = counts[14], FLOAT_SHARES = counts[15], OWN = GROUP_X - counts[16];
const size_t head = GROUP_Y;
const int first_row = GROUP_Z * ROWS;

// Queries make way for the sums at the end.
#define QUERY_NUMBERS (D + TURNED * DT + SKETCH)
SHARED float pool[ROWS * (QUERY_NUMBERS > DV ? QUERY_NUMBERS : DV)];
#define query pool
#define turned (pool + TURNED * ROWS * D)
#define sketched (pool + ROWS * (D + TURNED * DT))
#define sums pool
for (int i = WARP * 32 + LANE; i < ROWS * D; i += WARPS * 32)
  query[i] = first_row + i / D < ALL_ROWS ? float(q[(head * ALL_ROWS + first_row) * D + i]) * scale[0] : 0.0f;
#if QUERY_SIGNS
for (int r = WARP; r < ROWS; r += WARPS) {
  float x[DT / 32];
  UNROLL
  for (int i = 0; i < DT / 32; i++) {
    const int c = LANE + 32 * i;
    x[i] = first_row + r < ALL_ROWS ? float(q[(head * ALL_ROWS + first_row + r) * D + c]) * q_signs[c] : 0.0f;
  }
  hadamard(x, LANE);
  UNROLL
  for (int i = 0; i < DT / 32; i++) turned[r * DT + LANE + 32 * i] = x[i] * (QUERY_NORM * scale[0]);
}
#elif TURNED
for (int i = WARP * 32 + LANE; i < ROWS * DT; i += WARPS * 32)
  turned[i] = first_row + i / DT < ALL_ROWS ? float(qt[(head * ALL_ROWS + first_row) * DT + i]) * scale[0] : 0.0f;
#endif
#if SKETCH
for (int i = WARP * 32 + LANE; i < ROWS * SKETCH; i += WARPS * 32)
  sketched[i] = first_row + i / SKETCH < ALL_ROWS ? float(qs[(head * ALL_ROWS + first_row) * SKETCH + i]) * scale[0] : 0.0f;
#endif
#if KEYS == CODEBOOK
SHARED float k_levels[1 << K_BITS];
for (int i = WARP * 32 + LANE; i < 1 << K_BITS; i += WARPS * 32) k_levels[i] = float(k_table[i]);
#endif
#if VALUES == CODEBOOK
SHARED float v_levels[1 << V_BITS];
for (int i = WARP * 32 + LANE; i < 1 << V_BITS; i += WARPS * 32) v_levels[i] = float(v_table[i]);
#endif
BARRIER();

float top[ROWS], weight[ROWS], acc[ROWS][SLOTS];
UNROLL
for (int r = 0; r < ROWS; r++) {
  top[r] = LOW;
  weight[r] = 0.0f;
  UNROLL
  for (int i = 0; i < SLOTS; i++) acc[r][i] = 0.0f;
}

const bool packed_values = OWN < PACKED_SHARES;
const int count = packed_values ? LO - VS + VE - HI : VS + N - VE;
const int shares = packed_values ? PACKED_SHARES : FLOAT_SHARES;
const int share = packed_values ? OWN : OWN - PACKED_SHARES;
const int each = ((count + shares - 1) / shares + 31) / 32 * 32;
const int last = count < (share + 1) * each ? count : (share + 1) * each;

for (int base = share * each + WARP * 32; base < last; base += WARPS * 32) {
  const int j = base + LANE;
  const bool valid = j < last;
  const int at = valid ? j : base;
  const int t = packed_values ? (at < LO - VS ? VS + at : at - (LO - VS) + HI) : (at < VS ? at : at - VS + VE);

  float s[ROWS];
  UNROLL
  for (int r = 0; r < ROWS; r++) s[r] = 0.0f;
  if (t < KS || t >= KE) {
    const size_t row = t < KS ? head * counts[10] + t : head * counts[12] + t - KE;
    for (int c = 0; c < D; c++) {
      const float x = t < KS ? float(k_sinks[row * D + c]) : float(k_tail[row * D + c]);
      UNROLL
      for (int r = 0; r < ROWS; r++) s[r] += query[r * D + c] * x;
    }
  }
#if KEYS != FLOATS
  else {
    const size_t row = head * counts[8] + t - KS;
    for (int c = 0; c < DT; c += 8) {
      float x[8];
#if KEYS == CHANNEL_AFFINE
      const size_t words = size_t(counts[8]) / 32 * K_BITS, groups = counts[8] / K_GROUP;
      UNROLL
      for (int i = 0; i < 8; i++) {
        const size_t channel = head * DT + c + i, group = channel * groups + (t - KS) / K_GROUP;
        x[i] = float(code_at<K_BITS>(k_words + channel * words, t - KS)) * float(k_scales[group]) + float(k_biases[group]);
      }
#elif KEYS == PRODUCT
      UNROLL
      for (int i = 0; i < 8; i++) {
        const int place = (c + i) / K_SUB;
        const unsigned entry = index_at<K_BITS, DT / K_SUB>(k_words + row * K_WORDS, place);
        x[i] = float(k_table[(K_BOOK(head, place) + entry) * K_SUB + (c + i) % K_SUB]);
      }
#else
      unsigned code[8];
      eight_codes<K_BITS>(k_words + row * K_WORDS, c, code);
#if KEYS == TOKEN_AFFINE
      const size_t group = row * K_GROUPS + c / K_GROUP;
      const float step = float(k_scales[group]), bias = float(k_biases[group]);
      UNROLL
      for (int i = 0; i < 8; i++) x[i] = float(code[i]) * step + bias;
#else
      UNROLL
      for (int i = 0; i < 8; i++) x[i] = k_levels[code[i]];
#endif
#endif
      UNROLL
      for (int r = 0; r < ROWS; r++) {
        UNROLL
        for (int i = 0; i < 8; i++) s[r] += turned[r * DT + c + i] * x[i];
      }
    }
#if KEYS == CODEBOOK
    const float size = float(k_scales[row]);
    UNROLL
    for (int r = 0; r < ROWS; r++) s[r] *= size;
#endif
#if SKETCH
    float missed[ROWS];
    UNROLL
    for (int r = 0; r < ROWS; r++) missed[r] = 0.0f;
    for (int c = 0; c < SKETCH; c += 32) {
      const unsigned signs = k_signs[row * (SKETCH / 32) + c / 32];
      for (int i = 0; i < 32; i++) {
        const float sign = (signs >> i) & 1 ? 1.0f : -1.0f;
        UNROLL
        for (int r = 0; r < ROWS; r++) missed[r] += sketched[r * SKETCH + c + i] * sign;
      }
    }
    const float missing = float(k_sizes[row]);
    UNROLL
    for (int r = 0; r < ROWS; r++) s[r] += missed[r] * missing;
#endif
  }
#endif

  float p[ROWS];
  UNROLL
  for (int r = 0; r < ROWS; r++) {
    const int l = (first_row + r) % LENGTH;
#if MASK == CAUSAL
    if (t > PAST + l) s[r] = LOW;
#elif MASK != OPEN
    if (first_row + r < ALL_ROWS) {
      const int b = GROUP_Y / HEADS, h = GROUP_Y % HEADS * (ALL_ROWS / LENGTH) + (first_row + r) / LENGTH;
      const size_t place = size_t(b) * counts[17] + size_t(h) * counts[18] + size_t(l) * counts[19] + t;
#if MASK == BOOLEAN
      if (!mask[place]) s[r] = LOW;
#else
      s[r] += float(mask[place]) * LOG2E;
      if (s[r] < LOW) s[r] = LOW;  // a row that sees nothing takes the mean of all, as where masks are boolean
#endif
    }
#endif
    const float high = highest_of_lanes(valid ? s[r] : LOW);
    if (high > top[r]) {
      const float shrink = EXP2(top[r] - high);
      weight[r] *= shrink;
      UNROLL
      for (int i = 0; i < SLOTS; i++) acc[r][i] *= shrink;
      top[r] = high;
    }
    p[r] = valid ? EXP2(s[r] - top[r]) : 0.0f;
    weight[r] += p[r];
  }

  const int rows = last - base < 32 ? last - base : 32;
  for (int e = 0; e < rows; e++) {
    const int row_at = shfl(t, e);
    float share_of[ROWS];
    UNROLL
    for (int r = 0; r < ROWS; r++) share_of[r] = shfl(p[r], e);
    float x[SLOTS];
    if (!packed_values) {
      const size_t row = row_at < VS ? head * counts[11] + row_at : head * counts[13] + row_at - VE;
      UNROLL
      for (int i = 0; i < SLOTS; i++) {
        const int c = LANE + 32 * i;
        x[i] = c >= DV ? 0.0f : row_at < VS ? float(v_sinks[row * DV + c]) : float(v_tail[row * DV + c]);
      }
    }
#if VALUES != FLOATS
    else {
      const size_t row = head * counts[9] + row_at - VS;
      UNROLL
      for (int i = 0; i < SLOTS; i++) {
        const int c = LANE + 32 * i;
        if (c >= DV) x[i] = 0.0f;
        else {
#if VALUES == PRODUCT
          const unsigned entry = index_at<V_BITS, DV / V_SUB>(v_words + row * V_WORDS, c / V_SUB);
          x[i] = float(v_table[(V_BOOK(head, c / V_SUB) + entry) * V_SUB + c % V_SUB]);
#elif VALUES == TOKEN_AFFINE
          const size_t group = row * V_GROUPS + c / V_GROUP;
          x[i] = float(code_at<V_BITS>(v_words + row * V_WORDS, c)) * float(v_scales[group]) + float(v_biases[group]);
#else
          x[i] = v_levels[code_at<V_BITS>(v_words + row * V_WORDS, c)];
#endif
        }
      }
#if VALUES == CODEBOOK
      const float size = float(v_scales[row]);
      UNROLL
      for (int r = 0; r < ROWS; r++) share_of[r] *= size;
#endif
    }
#endif
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      UNROLL
      for (int i = 0; i < SLOTS; i++) acc[r][i] += share_of[r] * x[i];
    }
  }
}

SHARED float tops[WARPS * ROWS], weights[WARPS * ROWS];
UNROLL
for (int r = 0; r < ROWS; r++) {
  weight[r] = sum_of_lanes(weight[r]);
  if (LANE == 0) {
    tops[WARP * ROWS + r] = top[r];
    weights[WARP * ROWS + r] = weight[r];
  }
}
BARRIER();
for (int w = 0; w < WARPS; w++) {  // one after another: sums of all at once would not fit
  if (w == WARP) {
    UNROLL
    for (int r = 0; r < ROWS; r++) {
      float high = LOW;
      for (int v = 0; v < WARPS; v++) high = tops[v * ROWS + r] > high ? tops[v * ROWS + r] : high;
      const float shrink = EXP2(top[r] - high);
      UNROLL
      for (int i = 0; i < SLOTS; i++) {
        const int c = LANE + 32 * i;
        if (c < DV) sums[r * DV + c] = (w ? sums[r * DV + c] : 0.0f) + acc[r][i] * shrink;
      }
    }
  }
  BARRIER();
}
const size_t place = (size_t(GROUP_X) * ALL_HEADS + head) * ALL_ROWS + first_row;
for (int i = WARP * 32 + LANE; i < ROWS * DV; i += WARPS * 32)
  if (first_row + i / DV < ALL_ROWS) part[place * DV + i] = sums[i];
for (int r = WARP * 32 + LANE; r < ROWS; r += WARPS * 32)
  if (first_row + r < ALL_ROWS) {
    float high = LOW, total = 0.0f;
    for (int v = 0; v < WARPS; v++) high = tops[v * ROWS + r] > high ? tops[v * ROWS + r] : high;
    for (int v = 0; v < WARPS; v++) total += weights[v * ROWS + r] * EXP2(tops[v * ROWS + r] - high);
    part_top[place + r] = high;
    part_weight[place + r] = total;
  }
