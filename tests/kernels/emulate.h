// A group of lanes on one CPU thread: every lane is a coroutine that runs until the others must catch up.
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#define FN static inline
#define SHARED static
#define THREAD
#define EXP2(x) exp2f(x)
#define UNROLL

typedef _Float16 half;
struct bfloat {
  uint16_t bits;
  operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &wide, 4);
    return x;
  }
  bfloat() = default;
  explicit bfloat(float x) {
    uint32_t wide;
    memcpy(&wide, &x, 4);
    bits = uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);  // to nearest, ties to even
  }
};

typedef float FLOAT32;
typedef half FLOAT16;
typedef bfloat BFLOAT16;

struct Lane {
  ucontext_t context;
  int index, warp;
  bool done;
  long rounds = 0, barriers = 0;
  uint64_t slot[2][4];  // two rounds: a lane may read the last one while another has begun the next
};
static std::vector<Lane> lanes;
static Lane* self;
static ucontext_t scheduler;
static int group_x, group_y, group_z;

#define LANE (self->index & 31)
#define WARP (self->warp)
#define GROUP_X group_x
#define GROUP_Y group_y
#define GROUP_Z group_z

static void next_lane() {
  Lane* from = self;
  int count = lanes.size();
  for (int i = 1; i <= count; i++) {
    Lane* to = &lanes[(from->index + i) % count];
    if (!to->done && to != from) {
      self = to;
      swapcontext(&from->context, &to->context);
      return;
    }
  }
}
static Lane* warp_begin() { return &lanes[self->warp * 32]; }
static void warp_sync() {
  long mine = ++self->rounds;
  for (int i = 0; i < 32; i++)
    while (warp_begin()[i].rounds < mine) next_lane();
}
static void BARRIER() {
  long mine = ++self->barriers;
  for (auto& lane : lanes)
    while (lane.barriers < mine) next_lane();
}
template <typename T> static T* exchange(T x) {  // what the lanes of a warp gave, 4 words apart
  int round = (self->rounds + 1) & 1;
  memcpy(self->slot[round], &x, sizeof(T));
  warp_sync();
  return reinterpret_cast<T*>(warp_begin()[0].slot[round]);
}
template <typename T> static T given(T* first, int lane) {
  return *reinterpret_cast<T*>(reinterpret_cast<char*>(first) + lane * sizeof(Lane));
}
template <typename T> static T shfl(T x, int lane) { return given(exchange(x), lane & 31); }
template <typename T> static T shfl_xor(T x, int mask) {
  int lane = LANE ^ mask;
  return given(exchange(x), lane);
}
static bool any_lane(bool x) {
  bool* first = exchange(x);
  bool out = false;
  for (int i = 0; i < 32; i++) out |= given(first, i);
  return out;
}

static void (*body)(void**);
static void** arguments;
static void entry() {
  body(arguments);
  self->done = true;
  for (auto& lane : lanes)
    if (!lane.done) next_lane();
  setcontext(&scheduler);
}
static void launch(void (*kernel)(void**), void** args, int gx, int gy, int gz, int threads) {
  body = kernel;
  arguments = args;
  const int stack = 256 << 10;
  std::vector<char> stacks(size_t(threads) * stack);
  for (group_z = 0; group_z < gz; group_z++)
    for (group_y = 0; group_y < gy; group_y++)
      for (group_x = 0; group_x < gx; group_x++) {
        lanes.assign(threads, Lane());
        for (int i = 0; i < threads; i++) {
          Lane& lane = lanes[i];
          lane.index = i, lane.warp = i / 32, lane.done = false;
          getcontext(&lane.context);
          lane.context.uc_stack.ss_sp = stacks.data() + size_t(i) * stack;
          lane.context.uc_stack.ss_size = stack;
          lane.context.uc_link = &scheduler;
          makecontext(&lane.context, entry, 0);
        }
        self = &lanes[0];
        swapcontext(&scheduler, &lanes[0].context);
      }
}
