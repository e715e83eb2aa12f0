// A group of lanes on one CPU thread: every lane is a coroutine that runs until the others must catch up.
#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#define FN static inline
#define SHARED static
#define THREAD
#define EXP2(x) exp2f(x)
#define UNROLL
#define SOME_UNROLL

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
  ucontext_t context;  // to begin with; jumps from then on, which ask the system for nothing
  jmp_buf place;
  int index, warp;
  bool begun, done;
  long rounds = 0, barriers = 0;
  uint64_t slot[2][4];  // two rounds: a lane may read the last one while another has begun the next
};
static std::vector<Lane> lanes;
static Lane* self;
static ucontext_t scheduler;
static int group_x, group_y, group_z, order;  // of lanes: 1 or -1

#define LANE (self->index & 31)
#define WARP (self->warp)
#define GROUP_X group_x
#define GROUP_Y group_y
#define GROUP_Z group_z

static void next_lane() {
  Lane* from = self;
  int count = lanes.size();
  for (int i = 1; i <= count; i++) {
    Lane* to = &lanes[(from->index + order * i + count) % count];
    if (!to->done && to != from) {
      self = to;
      if (_setjmp(from->place)) return;
      if (to->begun) _longjmp(to->place, 1);
      to->begun = true;
      setcontext(&to->context);
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

static void FENCE() {}
static unsigned ticket(unsigned* at, unsigned last) {
  const unsigned mine = *at;
  *at = mine == last ? 0 : mine + 1;
  return mine;
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
  std::unique_ptr<char[]> stacks(new char[size_t(threads) * stack]);
  for (int z = 0; z < gz; z++)
    for (int y = 0; y < gy; y++)
      for (int x = 0; x < gx; x++) {
        group_x = order > 0 ? x : gx - 1 - x;
        group_y = order > 0 ? y : gy - 1 - y;
        group_z = order > 0 ? z : gz - 1 - z;
        lanes.assign(threads, Lane());
        for (int i = 0; i < threads; i++) {
          Lane& lane = lanes[i];
          lane.index = i, lane.warp = i / 32, lane.begun = false, lane.done = false;
          getcontext(&lane.context);
          lane.context.uc_stack.ss_sp = stacks.get() + size_t(i) * stack;
          lane.context.uc_stack.ss_size = stack;
          lane.context.uc_link = &scheduler;
          makecontext(&lane.context, entry, 0);
        }
        self = &lanes[order > 0 ? 0 : threads - 1];
        self->begun = true;
        swapcontext(&scheduler, &self->context);
      }
}

// Whether a launch stayed within its arrays, which end where memory does.
static sigjmp_buf outside;
static int guarded(void (*kernel)(void**), void** args, int gx, int gy, int gz, int threads, int direction) {
  struct sigaction jump = {}, before, bus;
  jump.sa_handler = [](int) { siglongjmp(outside, 1); };
  sigaction(SIGSEGV, &jump, &before);
  sigaction(SIGBUS, &jump, &bus);
  order = direction;
  const bool inside = sigsetjmp(outside, 1) == 0;
  if (inside) launch(kernel, args, gx, gy, gz, threads);
  sigaction(SIGSEGV, &before, nullptr);
  sigaction(SIGBUS, &bus, nullptr);
  return inside;
}

// What `pairs.h` says for CUDA.
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct Pair { half low, high; };
static Pair pair(unsigned x) { Pair p; memcpy(&p, &x, 4); return p; }
static unsigned bits_of(half a, half b) { Pair p{a, b}; unsigned x; memcpy(&x, &p, 4); return x; }
static unsigned pair_of(float a, float b) { return bits_of(half(a), half(b)); }
static unsigned halves(half a, half b) { return bits_of(a, b); }
typedef const char* Place;
static Place place_of(const unsigned* p, unsigned) { return reinterpret_cast<Place>(p); }
static unsigned word_at(Place place, unsigned distance) { return *reinterpret_cast<const unsigned*>(place + distance); }
static void words_at(Place place, unsigned distance, unsigned& a, unsigned& b) {
  a = word_at(place, distance), b = word_at(place + 4, distance);
}
static unsigned bytes_of(unsigned a, unsigned b, unsigned which) {
  uint64_t both = uint64_t(b) << 32 | a;
  unsigned out = 0;
  for (int i = 0; i < 4; i++) out |= unsigned(both >> (8 * (which >> (4 * i) & 7)) & 255) << (8 * i);
  return out;
}
static unsigned pair_sub(unsigned a, unsigned b) {
  return bits_of(pair(a).low - pair(b).low, pair(a).high - pair(b).high);
}
static unsigned pair_mul(unsigned a, unsigned b) {
  return bits_of(pair(a).low * pair(b).low, pair(a).high * pair(b).high);
}
static unsigned pair_fma(unsigned a, unsigned b, unsigned c) {
  return bits_of(
      half(double(pair(a).low) * double(pair(b).low) + double(pair(c).low)),
      half(double(pair(a).high) * double(pair(b).high) + double(pair(c).high)));
}
static void load_turned(const void* at, unsigned (&out)[4]) {
  const uint16_t** first = exchange(static_cast<const uint16_t*>(at));
  for (int i = 0; i < 4; i++) {
    const uint16_t *even = given(first, 8 * i + 2 * (LANE & 3)), *odd = given(first, 8 * i + 2 * (LANE & 3) + 1);
    if (uintptr_t(even) % 16 || uintptr_t(odd) % 16) abort();
    out[i] = even[LANE >> 2] | unsigned(odd[LANE >> 2]) << 16;
  }
}
struct Operands { unsigned a[4]; };
static void mma(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  Operands mine = {{a0, a1, a2, a3}};
  float a[2][16];  // rows r and r + 8
  int r = LANE >> 2, j = LANE & 3;
  Operands* first = exchange(mine);
  for (int i = 0; i < 4; i++) {
    Operands x = given(first, 4 * r + i);
    for (int part = 0; part < 4; part++) {
      a[part & 1][8 * (part >> 1) + 2 * i] = pair(x.a[part]).low;
      a[part & 1][8 * (part >> 1) + 2 * i + 1] = pair(x.a[part]).high;
    }
  }
  Operands right = {{b0, b1}};
  first = exchange(right);
  for (int e = 0; e < 2; e++) {
    int column = 2 * j + e;
    float b[16];
    for (int i = 0; i < 4; i++) {
      Operands x = given(first, 4 * column + i);
      for (int part = 0; part < 2; part++) {
        b[8 * part + 2 * i] = pair(x.a[part]).low;
        b[8 * part + 2 * i + 1] = pair(x.a[part]).high;
      }
    }
    for (int row = 0; row < 2; row++) {
      double sum = c[2 * row + e];
      for (int k = 0; k < 16; k++) sum += double(a[row][k]) * double(b[k]);
      c[2 * row + e] = float(sum);
    }
  }
}
static void mma_first(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  c[0] = c[1] = c[2] = c[3] = 0.0f;
  mma(c, a0, a1, a2, a3, b0, b1);
}

template <int BYTES> static void copy_later(void* to, const void* from) {
  if (uintptr_t(to) % BYTES || uintptr_t(from) % BYTES) abort();  // the device takes aligned addresses only
  memcpy(to, from, BYTES);
}
template <int BYTES> static void copy_line(void* to, const void* from) { copy_later<BYTES>(to, from); }
static void close_group() {}
template <int LEFT> static void await_groups() {}
static void meet() { warp_sync(); }
alignas(16) static unsigned shared_pool[(256 << 10) / 4];
#define POOL(name) unsigned* name = shared_pool
