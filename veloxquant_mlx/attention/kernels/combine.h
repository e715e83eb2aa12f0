// One result from the shares. Those before `coded_shares` have packed values and add up in the basis of the codes, those
// after it have float values. With `SPLIT` the two sums stay apart.

const int row = GROUP_Y, coded_shares = counts[16] + counts[14], count = coded_shares + counts[15];
const size_t all = size_t(ALL_HEADS) * ALL_ROWS;
#define TOP_OF(s) part_top[(s) * all + row]
#define WEIGHT_OF(s) part_weight[(s) * all + row]
#define SUM_OF(s, c) part[((s) * all + row) * DV + (c)]
SHARED float highs[WARPS], totals[WARPS], coded[WARPS * DV], plain[WARPS * DV];

float high = LOW;
for (int s = WARP * 32 + LANE; s < count; s += WARPS * 32) high = TOP_OF(s) > high ? TOP_OF(s) : high;
high = highest_of_lanes(high);
if (LANE == 0) highs[WARP] = high;
BARRIER();
for (int w = 0; w < WARPS; w++) high = highs[w] > high ? highs[w] : high;
#if SINKS
const float sink = float(sinks[row / LENGTH % QUERY_HEADS]) * LOG2E;
high = sink > high ? sink : high;
#endif

float total = 0.0f;
for (int s = WARP * 32 + LANE; s < count; s += WARPS * 32) total += WEIGHT_OF(s) * EXP2(TOP_OF(s) - high);
total = sum_of_lanes(total);
if (LANE == 0) totals[WARP] = total;

// Each warp sums every WARPS-th share, its lanes are channels.
for (int c = LANE; c < DV; c += 32) {
  float of_coded = 0.0f, of_plain = 0.0f;
  for (int s = WARP; s < coded_shares; s += WARPS) of_coded += SUM_OF(s, c) * EXP2(TOP_OF(s) - high);
  for (int s = coded_shares + WARP; s < count; s += WARPS) of_plain += SUM_OF(s, c) * EXP2(TOP_OF(s) - high);
  coded[WARP * DV + c] = of_coded;
  plain[WARP * DV + c] = of_plain;
}
BARRIER();
total = 0.0f;
for (int w = 0; w < WARPS; w++) total += totals[w];
#if SINKS
total += EXP2(sink - high);
#endif
#if BY_SIGNS
if (WARP == 0) {  // which has the whole row: out of the basis of the codes by the Hadamard transform, then the signs
  float x[DV / 32];
  UNROLL
  for (int i = 0; i < DV / 32; i++) {
    x[i] = 0.0f;
    for (int w = 0; w < WARPS; w++) x[i] += coded[w * DV + LANE + 32 * i];
  }
  hadamard(x, LANE);
  UNROLL
  for (int i = 0; i < DV / 32; i++) {
    const int c = LANE + 32 * i;
    float sum = x[i] * (NORM * signs[c]);
    for (int w = 0; w < WARPS; w++) sum += plain[w * DV + c];
    out[row * DV + c] = OUT(sum / total);
  }
}
#else
for (int c = WARP * 32 + LANE; c < DV; c += WARPS * 32) {
  float of_coded = 0.0f, of_plain = 0.0f;
  for (int w = 0; w < WARPS; w++) of_coded += coded[w * DV + c], of_plain += plain[w * DV + c];
#if SPLIT
  of_codes[row * DV + c] = of_coded / total;
  of_floats[row * DV + c] = of_plain / total;
#else
  out[row * DV + c] = OUT((of_coded + of_plain) / total);
#endif
}
#endif
