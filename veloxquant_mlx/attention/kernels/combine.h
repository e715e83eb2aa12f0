// One result from the shares. Those before `PACKED` have packed values and add up in the basis of the codes, those after
// it have float values; with `SPLIT` the two sums stay apart.

const int row = GROUP_Y, shares = counts[14] + counts[15];
const size_t all = size_t(ALL_HEADS) * ALL_ROWS;
float high = LOW;
#if SINKS
high = float(sinks[row / LENGTH % QUERY_HEADS]) * 1.4426950408889634f;
#endif
for (int s = 0; s < shares; s++) high = part_top[s * all + row] > high ? part_top[s * all + row] : high;
#if FAST
for (int s = 0; s < counts[19]; s++) high = fast_top[s * all + row] > high ? fast_top[s * all + row] : high;
#endif
float total = 0.0f;
#if SINKS
total = EXP2(float(sinks[row / LENGTH % QUERY_HEADS]) * 1.4426950408889634f - high);
#endif
for (int s = 0; s < shares; s++) total += part_weight[s * all + row] * EXP2(part_top[s * all + row] - high);
#if FAST
for (int s = 0; s < counts[19]; s++) total += fast_weight[s * all + row] * EXP2(fast_top[s * all + row] - high);
#endif
for (int c = WARP * 32 + LANE; c < DV; c += WARPS * 32) {
  float coded = 0.0f, plain = 0.0f;
  for (int s = 0; s < counts[14]; s++) coded += part[(s * all + row) * DV + c] * EXP2(part_top[s * all + row] - high);
#if FAST
  for (int s = 0; s < counts[19]; s++)
    coded += fast[(s * all + row) * DV + c] * EXP2(fast_top[s * all + row] - high);
#endif
  for (int s = counts[14]; s < shares; s++)
    plain += part[(s * all + row) * DV + c] * EXP2(part_top[s * all + row] - high);
#if SPLIT
  of_codes[row * DV + c] = coded / total;
  of_floats[row * DV + c] = plain / total;
#else
  out[row * DV + c] = OUT((coded + plain) / total);
#endif
}
