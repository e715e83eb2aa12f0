// After the shares: the last group of lanes of a kv head to come here goes on, the others are done. Only where what one
// group wrote can be made visible to another of the same launch: CUDA.
//
// `tickets` has one number per kv head, zero before the launch and, as `ticket` starts again behind the last, zero after
// it. No other launch has the same: each makes `next_tickets` for the one that follows, which thereby waits for it.

{
  SHARED int is_last;
  FENCE();  // what this lane wrote, before the ticket
  BARRIER();
  if (WARP == 0 && LANE == 0) {
    const unsigned groups_of_head = unsigned(counts[14] + counts[15] + counts[16]) * OTHERS;
    is_last = ticket(const_cast<unsigned*>(tickets) + GROUP_Y, groups_of_head - 1) == groups_of_head - 1;
    if (is_last) next_tickets[GROUP_Y] = 0;
  }
  BARRIER();
  if (!is_last) return;
  FENCE();  // before this lane reads what others wrote
}
