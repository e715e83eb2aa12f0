// Result number `row` from its shares, by `TEAM` warps of which this is number `MEMBER`. Shares before `coded_shares` have
// packed values and add up in the basis of the codes, those after it have float values. With `SPLIT` the two sums stay
// apart; with `OUT_SIGNS` the first goes through a Hadamard transform and signs, out of the basis of the codes.

const int coded_shares = counts[16] + counts[14], count = coded_shares + counts[15];
const size_t all = size_t(ALL_HEADS) * ALL_ROWS;
#define TOP_OF(s) part_top[(s) * all + row]
#define WEIGHT_OF(s) part_weight[(s) * all + row]
#define SUM_OF(s, c) part[((s) * all + row) * DV + (c)]

float high = LOW;
for (int s = LANE; s < count; s += 32) high = TOP_OF(s) > high ? TOP_OF(s) : high;
high = highest_of_lanes(high);
#if SINKS
const float sink = float(sinks[row / LENGTH % QUERY_HEADS]) * LOG2E;
high = sink > high ? sink : high;
#endif
float total = 0.0f;
for (int s = LANE; s < count; s += 32) total += WEIGHT_OF(s) * EXP2(TOP_OF(s) - high);
total = sum_of_lanes(total);
#if SINKS
total += EXP2(sink - high);
#endif

// Each member sums every TEAM-th share, its lanes are channels.
float coded[SLOTS], plain[SLOTS];
UNROLL
for (int i = 0; i < SLOTS; i++) coded[i] = plain[i] = 0.0f;
#define ADD_SHARES(first, stop, sum)                                    \
  SOME_UNROLL                                                           \
  for (int s = (first); s < (stop); s += TEAM) {                        \
    const float shrink = EXP2(TOP_OF(s) - high);                        \
    UNROLL                                                              \
    for (int i = 0; i < SLOTS; i++)                                     \
      if (LANE + 32 * i < DV) sum[i] += SUM_OF(s, LANE + 32 * i) * shrink; \
  }
ADD_SHARES(MEMBER, coded_shares, coded)
ADD_SHARES(coded_shares + MEMBER, count, plain)
#if TEAM > 1
SHARED float others[TEAM * 64 * SLOTS];
UNROLL
for (int i = 0; i < SLOTS; i++) {
  others[(MEMBER * 2 * SLOTS + i) * 32 + LANE] = coded[i];
  others[(MEMBER * 2 * SLOTS + SLOTS + i) * 32 + LANE] = plain[i];
}
BARRIER();
if (MEMBER > 0) return;
for (int w = 1; w < TEAM; w++) {
  UNROLL
  for (int i = 0; i < SLOTS; i++) {
    coded[i] += others[(w * 2 * SLOTS + i) * 32 + LANE];
    plain[i] += others[(w * 2 * SLOTS + SLOTS + i) * 32 + LANE];
  }
}
#endif

#if OUT_SIGNS
hadamard(coded, LANE);
UNROLL
for (int i = 0; i < SLOTS; i++) coded[i] *= OUT_NORM * out_signs[LANE + 32 * i];
#endif
UNROLL
for (int i = 0; i < SLOTS; i++) {
  const int c = LANE + 32 * i;
  if (c >= DV) continue;
#if SPLIT
  of_codes[row * DV + c] = coded[i] / total;
  of_floats[row * DV + c] = plain[i] / total;
#else
  out[row * DV + c] = OUT((coded[i] + plain[i]) / total);
#endif
}
