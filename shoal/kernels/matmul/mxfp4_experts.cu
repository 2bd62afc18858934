// The two matmuls of experts with weights in MXFP4 on Hopper. mxfp4_experts.py launches them, says what they are for, and
// defines MX_STEPS steps of 64 inputs, MX_STRIPS strips of 64 weight rows of an expert, MX_OUTS outputs of a row,
// MX_NEXT_STEPS steps of the next matmul (0: this is the second one), MX_ACTIVATION, MX_ROWS rows of a tile at most, and, where a
// row is short enough for mxfp4_slots, MX_SLOT_SHARED_BYTES of its programs.
//
// Programs stay on their SMs. Each has strips that follow one another in memory, which take about as long as any other program's.
// One thread keeps a ring of shared memory filled, by copies of 6.5 KB of a strip and of all rows of a tile. Four warpgroups have
// a strip each. A thread's words become the registers that are wgmma's left operand; rows are its right one, 8 to 128 of them, as
// many as a tile has.

#include "hopper.cuh"

constexpr int STEPS = MX_STEPS, STRIPS = MX_STRIPS, OUTS = MX_OUTS, NEXT_STEPS = MX_NEXT_STEPS, ROWS = MX_ROWS;
enum { SILU, GELU_TANH, CLAMPED_SWIGLU, RELU2, NOTHING };
constexpr bool FIRST = NEXT_STEPS > 0, GATED = MX_ACTIVATION < RELU2;
constexpr int WARPGROUPS = 4;                // that multiply
constexpr int THREADS = WARPGROUPS * 128 + 128;
constexpr int ROUND = 3, ROUNDS = STEPS / ROUND;  // steps that are copied at once
constexpr int CHUNK = 2048 + 128;            // bytes of a step of a strip: words, then scales
constexpr int ROW_BYTES = STEPS * 128;
constexpr int ROWS_BYTES = ROUND * ROWS * 128;    // of a place of the ring
constexpr int PLACE = ROWS_BYTES + (WARPGROUPS * ROUND * CHUNK + 1023) / 1024 * 1024;
constexpr int PLACES = (MX_SHARED_BYTES - 2048) / PLACE;
constexpr float LARGER = 65536.0f;           // Weights in registers are too small by it (loaders.py).
static_assert(STEPS % ROUND == 0 && PLACES >= 2, "");

// What earlier kernels wrote is read past the L1 cache (__ldcg), which may hold what lay there before them.

__device__ __forceinline__ void copy(u32 to, const u8* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}
// The same for what is read once: it leaves the L2 cache to rows.
__device__ __forceinline__ void copy_once(u32 to, const u8* from, int bytes, u32 barrier) {
  asm volatile(
      "{\n.reg .b64 first;\ncreatepolicy.fractional.L2::evict_first.b64 first, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], first;\n}" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ u32 times(u32 a, u32 b) {
  u32 v;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
// Both numbers of `a` times the first or the second one of `b`: one instruction, too.
template <int WHICH>
__device__ __forceinline__ u32 times_one(u32 a, u32 b) {
  u32 v;
  asm("{\n.reg .b16 of<2>;\n.reg .b32 both;\nmov.b32 {of0, of1}, %2;\nmov.b32 both, {of%3, of%3};\nmul.rn.bf16x2 %0, %1, both;\n}"
      : "=r"(v)
      : "r"(a), "r"(b), "n"(WHICH));
  return v;
}

// The weights of two words, sign, exponent and mantissa put where bf16 has them (gpu_weight.py): three pairs of a word by a shift
// and a mask each, and a fourth one of each by what is left of both.
__device__ __forceinline__ void place_pairs(u32 (&first)[4], u32 (&second)[4], u32 a, u32 b) {
  constexpr u32 PAIR = 0x81C081C0u;
  u32 left = a << 1 & 0x90009000u | b >> 6 & 0x01B001B0u | a >> 7 & 0x00480048u;
  first[0] = a & PAIR, first[1] = a << 3 & PAIR, first[2] = a << 6 & PAIR, first[3] = left & PAIR;
  second[0] = b & PAIR, second[1] = b << 3 & PAIR, second[2] = b << 6 & PAIR, second[3] = left << 3 & PAIR;
}
// The weights of 32 inputs, as operands of two matmuls of 16. `scales`: those of weight rows g and g + 8.
__device__ __forceinline__ void widen_group(u32 (&first)[4], u32 (&second)[4], u32 a, u32 b, u32 scales) {
  place_pairs(first, second, a, b);
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    first[i] = times_one<0>(first[i], scales), first[i + 1] = times_one<1>(first[i + 1], scales);
    second[i] = times_one<0>(second[i], scales), second[i + 1] = times_one<1>(second[i + 1], scales);
  }
}
// The weights of a step. `exponents`: a byte for each scale, of weight rows g and g + 8 for 32 inputs, then for the others.
__device__ __forceinline__ void widen_step(u32 (&weights)[4][4], const uint4& words, u32 exponents) {
  widen_group(weights[0], weights[1], words.x, words.y, __byte_perm(exponents, 0, 0x4140) << 7);
  widen_group(weights[2], weights[3], words.z, words.w, __byte_perm(exponents, 0, 0x4342) << 7);
}

struct Arguments {
  const u8* x;        // rows of tiles (`arrange`)
  const u8* weights;  // [experts, STRIPS, STEPS, CHUNK]
  const u16* bias;    // [experts, weight rows], gate before up, or null
  u8* out;            // FIRST: the next matmul's rows of tiles; otherwise [slots, OUTS]
  const int4* tiles;  // expert, first row, rows
  const int* used;    // number of tiles
  const int* slots;   // of each row of tiles
  float alpha, limit;
};

// Tiles of 8 rows that are multiplied for so many rows.
__device__ __forceinline__ int eights(int rows) { return rows <= 64 ? (rows + 7) / 8 : (rows + 15) / 16 * 2; }

// Where input `at` of a row of a tile of `nt` x 8 rows lies, in bytes.
__device__ __forceinline__ int place_of(int row, int at, int nt) {
  return at / 64 * (nt * 1024) + row * 128 + ((at / 8 ^ row) % 8) * 16 + at % 8 * 2;
}

__device__ __forceinline__ float activated(float gate, float up, float alpha, float limit) {
  gate = rounded(gate), up = rounded(up);
  float z = gate;
  if (MX_ACTIVATION == GELU_TANH) z = gate * (1.5957691216f + 0.0713548163f * gate * gate);
  if (MX_ACTIVATION == CLAMPED_SWIGLU) {
    gate = fminf(gate, limit), up = fminf(fmaxf(up, -limit), limit) + 1.0f;
    z = gate * alpha;
  }
  return __fdividef(gate, 1.0f + __expf(-z)) * up;
}
__device__ __forceinline__ float squared_relu(float x) {
  x = fmaxf(rounded(x), 0.0f);
  return x * x;
}

struct Ring {
  u32 memory, parity;
  int place;
  __device__ __forceinline__ u32 full() const { return memory + PLACES * PLACE + place * 8; }
  __device__ __forceinline__ u32 free() const { return full() + PLACES * 8; }
  __device__ __forceinline__ void advance() {
    if (++place == PLACES) place = 0, parity ^= 1;
  }
};

// Multiplies the rows of a tile by a strip, and stores them. `tile`: expert, first row, rows.
template <int NT>
__device__ __forceinline__ void multiply_strip(const Arguments& a, int4 tile, int strip, int warpgroup, Ring& ring) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  // Weight rows g and g + 8 of a warp are gate and up of an output, or two outputs.
  int out = GATED ? strip * 32 + warp * 8 + g : strip * 64 + warp * 16 + g * 2;
  u16 bias[2] = {};  // They are there long before the sums are.
  if (a.bias) {
    const u16* from = a.bias + (i64)tile.x * (GATED ? 2 * OUTS : OUTS) + out;
    bias[0] = from[0], bias[1] = from[GATED ? OUTS : 1];
  }
  float sums[4 * NT];
#pragma unroll
  for (int j = 0; j < 4 * NT; ++j) sums[j] = 0.0f;
#pragma unroll 1
  for (int round = 0; round < ROUNDS; ++round) {
    wait(ring.full(), ring.parity);
    u32 rows = ring.memory + ring.place * PLACE, strip_at = rows + ROWS_BYTES + warpgroup * (ROUND * CHUNK);
    u32 words_at = strip_at + warp * 512 + lane * 16, scales_at = strip_at + 2048 + warp * 32 + g * 4;
    u64 rows_at = (u64)0x40000040u << 32 | 1u << 16 | rows >> 4;
    // Sums of more rows leave no registers for words of other steps.
    constexpr int AHEAD = NT <= 8 ? ROUND : 1;
    uint4 words[AHEAD];
    u32 scales[AHEAD];
#pragma unroll
    for (int i = 0; i < ROUND; ++i) {
#pragma unroll
      for (int j = 0; j < AHEAD; ++j)
        if (i % AHEAD == 0) words[j] = load_words(words_at + (i + j) * CHUNK), scales[j] = load_scales(scales_at + (i + j) * CHUNK);
      u32 weights[4][4];
      widen_step(weights, words[i % AHEAD], scales[i % AHEAD]);
      keep(sums);
      begin_matmuls();
#pragma unroll
      for (int k = 0; k < 4; ++k) multiply<NT>(sums, weights[k], rows_at + (i * (NT * 64) + k * 2));
      end_matmuls();
      // A step is widened while the one before is multiplied, where there are registers for both.
      if (AHEAD > 1 && i + 1 < ROUND) wait_for_matmuls<1>();
      if (AHEAD == 1 || i + 1 == ROUND) wait_for_matmuls<0>();
      if (AHEAD == 1 || i + 1 == ROUND) keep(sums);
    }
    if (lane == 0) arrive(ring.free());
    ring.advance();
  }
  constexpr int HELD = 8;
  int slots[HELD];  // of the next rows, or -1
  float low = widen(bias[0]), high = widen(bias[1]);
#pragma unroll
  for (int j = 0; j < NT; ++j) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      int row = (j + i / 2) * 8 + c * 2 + i % 2;
      if (!FIRST && j % (HELD / 2) == 0) slots[i] = row < tile.z ? __ldcg(a.slots + tile.y + row) : -1;
    }
    float top[2] = {sums[4 * j] * LARGER + low, sums[4 * j + 1] * LARGER + low};
    float bottom[2] = {sums[4 * j + 2] * LARGER + high, sums[4 * j + 3] * LARGER + high};
    if constexpr (GATED) {
      u32 pair = transposed(pair_of(activated(top[0], bottom[0], a.alpha, a.limit), activated(top[1], bottom[1], a.alpha, a.limit)));
      *(u32*)(a.out + (i64)tile.y * (NEXT_STEPS * 128) + place_of(j * 8 + g, strip * 32 + warp * 8 + c * 2, NT)) = pair;
    } else {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (FIRST) {
          int row = j * 8 + c * 2 + e;
          u32 pair = pair_of(squared_relu(top[e]), squared_relu(bottom[e]));
          *(u32*)(a.out + (i64)tile.y * (NEXT_STEPS * 128) + place_of(row, out, NT)) = pair;
        } else if (slots[2 * j % HELD + e] >= 0) {
          *(u32*)(a.out + ((i64)slots[2 * j % HELD + e] * OUTS + out) * 2) = pair_of(top[e], bottom[e]);
        }
      }
    }
  }
}

// Time of a strip of a tile: that of widening, and that of a matmul, which grows with the rows.
__device__ __forceinline__ int strip_time(int rows) { return 10 + eights(rows); }

// Returns where the strips of program `which` and of the next one begin, by a warp. They are numbered tile after tile, and each
// program has as much of the time of all.
__device__ __forceinline__ int2 share_of(const Arguments& a, int which, int programs) {
  int used = __ldcg(a.used), lane = threadIdx.x % 32, total = 0, before = 0;
  for (int tile = lane; tile < used; tile += 32) total += strip_time(__ldcg(&a.tiles[tile].z));
  i64 all = (i64)__reduce_add_sync(~0u, total) * STRIPS, low = all * which / programs, high = all * (which + 1) / programs;
  int2 share = make_int2(0, 0);  // A lane has the ends that lie in its tiles, and zeros for others.
  for (int begin = 0; begin < used; begin += 32) {
    int tile = begin + lane, time = tile < used ? strip_time(__ldcg(&a.tiles[tile].z)) : 0, end = time;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += other;
    }
    i64 first = (i64)(before + end - time) * STRIPS, last = (i64)(before + end) * STRIPS;
    if (low >= first && low < last) share.x = tile * STRIPS + (int)((low - first + time - 1) / time);
    if (high > first && high <= last) share.y = tile * STRIPS + (int)((high - first + time - 1) / time);
    before += __shfl_sync(~0u, end, 31);
  }
  return make_int2(__reduce_add_sync(~0u, share.x), __reduce_add_sync(~0u, share.y));
}

// Strips that a program multiplies at once: of one tile, beside one another.
struct Group {
  int4 tile;
  int strip, count;
  __device__ __forceinline__ Group(const Arguments& a, int at, int end) {
    if (at < end) tile = __ldcg(a.tiles + at / STRIPS);
    strip = at % STRIPS, count = min(min(WARPGROUPS, STRIPS - strip), end - at);
  }
  __device__ __forceinline__ int nt() const { return eights(tile.z); }
};

__device__ __forceinline__ void copy_weights(const Arguments& a, const Group& group, int round, const Ring& ring) {
  u32 full = ring.full(), to = ring.memory + ring.place * PLACE + ROWS_BYTES;
  const u8* from = a.weights + (((i64)group.tile.x * STRIPS + group.strip) * STEPS + round * ROUND) * CHUNK;
  expect(full, group.count * (ROUND * CHUNK) + group.nt() * (ROUND * 1024));
#pragma unroll 1
  for (int i = 0; i < group.count; ++i) copy_once(to + i * (ROUND * CHUNK), from + i * (STEPS * CHUNK), ROUND * CHUNK, full);
}
__device__ __forceinline__ void copy_rows(const Arguments& a, const Group& group, int round, const Ring& ring) {
  int bytes = group.nt() * (ROUND * 1024);
  copy(ring.memory + ring.place * PLACE, a.x + (i64)group.tile.y * ROW_BYTES + round * bytes, bytes, ring.full());
}

// The work of one thread.
__device__ __forceinline__ void fill(const Arguments& a, int at, int end, Ring ring) {
  Group next(a, at, end);
#pragma unroll 1
  while (at < end) {
    Group group = next;
    at += group.count;
    next = Group(a, at, end);  // It is on its way while this one is copied.
#pragma unroll 1
    for (int round = 0; round < ROUNDS; ++round, ring.advance()) {
      wait(ring.free(), ring.parity ^ 1);
      copy_weights(a, group, round, ring);
      copy_rows(a, group, round, ring);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) mxfp4_experts(const __grid_constant__ Arguments a) {
  extern __shared__ unsigned char dynamic[];
  Ring ring;
  ring.memory = (shared_address(dynamic) + 1023) / 1024 * 1024;  // as tensor cores' swizzled rows want it
  ring.parity = 0, ring.place = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < PLACES; ++i) make_barrier(ring.full() + i * 8, 1), make_barrier(ring.free() + i * 8, WARPGROUPS * 4);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  int2& share = *(int2*)(dynamic + (ring.memory - shared_address(dynamic)) + PLACES * (PLACE + 16));  // behind the barriers
  wait_for_previous();
  start_next();
  if (threadIdx.x < 32) {
    int2 found = share_of(a, blockIdx.y, gridDim.y);
    if (threadIdx.x == 0) share = found;
  }
  __syncthreads();
  int at = share.x, end = share.y;
  if (warpgroup == WARPGROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (threadIdx.x % 128 == 0) fill(a, at, end, ring);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 112;");
  Group next(a, at, end);
#pragma unroll 1
  while (at < end) {
    Group group = next;
    at += group.count;
    next = Group(a, at, end);  // It is on its way while this one is multiplied.
    if (warpgroup < group.count) {
      int strip = group.strip + warpgroup;
      switch (group.nt()) {
#define CASE(NT) \
  case NT: multiply_strip<NT>(a, group.tile, strip, warpgroup, ring); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
#if MX_ROWS > 64
        CASE(10) CASE(12) CASE(14) CASE(16)
#endif
      }
    } else {
#pragma unroll 1
      for (int round = 0; round < ROUNDS; ++round, ring.advance()) {
        wait(ring.full(), ring.parity);
        if (threadIdx.x % 32 == 0) arrive(ring.free());
      }
    }
  }
}

struct Arrangement {
  const u8* x;
  u8 *rows, *next_rows;  // of tiles, for the first matmul and for the second one
  const int *experts, *ranks, *counts;
  int *slots, *used;
  int4* tiles;
  int num_slots, top_k, num_experts;
  int row_bytes, next_bytes;  // of a slot's row, without what fills its last steps
};

__device__ __forceinline__ int filled_rows(int rows) { return rows / ROWS * ROWS + eights(rows % ROWS) * 8; }

__device__ __forceinline__ void list_tiles(const Arrangement& a, int lane) {
  int first_row = 0, first_tile = 0;
#pragma unroll 1
  for (int begin = 0; begin < a.num_experts; begin += 32) {
    int expert = begin + lane, rows = expert < a.num_experts ? __ldcg(a.counts + expert) : 0, tiles = (rows + ROWS - 1) / ROWS;
    int end_row = filled_rows(rows), end_tile = tiles;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      int other_rows = __shfl_up_sync(~0u, end_row, step), other_tiles = __shfl_up_sync(~0u, end_tile, step);
      if (lane >= step) end_row += other_rows, end_tile += other_tiles;
    }
    int row = first_row + end_row - filled_rows(rows), tile = first_tile + end_tile - tiles;
    for (int i = 0; i < tiles; ++i) a.tiles[tile + i] = make_int4(expert, row + i * ROWS, min(ROWS, rows - i * ROWS), 0);
    first_row += __shfl_sync(~0u, end_row, 31), first_tile += __shfl_sync(~0u, end_tile, 31);
  }
  if (lane == 0) *a.used = first_tile;
}

// Puts the row of each slot's token among the rows of its tile: a step's 64 inputs of all rows lie beside each other, as
// tensor cores read them. A warp has a slot, and the last program lists the tiles, expert by expert. Rows that fill a tile are
// never stored, so they may hold anything; inputs that fill a step meet weights of 0, so they are 0.
extern "C" __global__ void __launch_bounds__(256) arrange(const __grid_constant__ Arrangement a) {
  wait_for_previous();
  start_next();
  int lane = threadIdx.x % 32, slot = blockIdx.y * 8 + threadIdx.x / 32;
  if (blockIdx.y == gridDim.y - 1) {
    if (threadIdx.x < 32) list_tiles(a, lane);
    return;
  }
  if (slot >= a.num_slots) return;
  const uint4* from = (const uint4*)(a.x + (i64)(slot / a.top_k) * a.row_bytes);
  constexpr int HELD = 12, SIXTEENS = STEPS * 8;
  uint4 held[HELD];
  auto load = [&](int first) {
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      int at = first + i * 32 + lane;
      held[i] = at * 16 < a.row_bytes ? __ldcg(from + at) : make_uint4(0, 0, 0, 0);
    }
  };
  load(0);
  int expert = __ldcg(a.experts + slot), rank = __ldcg(a.ranks + slot), before = 0, rows = 0;
  for (int begin = 0; begin < a.num_experts; begin += 32) {
    int count = begin + lane < a.num_experts ? __ldcg(a.counts + begin + lane) : 0;
    if (begin + lane < expert) before += filled_rows(count);
    if (begin + lane == expert) rows = count;
  }
  int first = __reduce_add_sync(~0u, before) + rank / ROWS * ROWS, row = rank % ROWS;
  int nt = eights(min(ROWS, __reduce_add_sync(~0u, rows) - rank / ROWS * ROWS));
  if (lane == 0) a.slots[first + row] = slot;
  u8* to = a.rows + (i64)first * ROW_BYTES;
#pragma unroll 1
  for (int begin = 0; begin < SIXTEENS; begin += HELD * 32) {
    if (begin) load(begin);
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      int at = begin + i * 32 + lane;
      if (at < SIXTEENS) *(uint4*)(to + place_of(row, at * 8, nt)) = held[i];
    }
  }
  to = a.next_rows + (i64)first * (NEXT_STEPS * 128);
  for (int i = a.next_bytes / 16 + lane; i < NEXT_STEPS * 8; i += 32) *(uint4*)(to + place_of(row, i * 8, nt)) = make_uint4(0, 0, 0, 0);
}

#ifdef MX_SLOT_SHARED_BYTES
struct SlotArguments {
  const u8* x;        // FIRST: rows of tokens; otherwise rows of slots
  const u8* weights;  // as in Arguments
  const u16* bias;
  u8* out;              // FIRST: rows of slots; otherwise rows of tokens
  const int* experts;   // of each slot
  const float* shares;  // of each slot, for the second matmul
  float alpha, limit;
  int top_k, row_bytes, add;
};

// A few slots: each is a row of its own, multiplied by mma.sync. A warp has a round of a strip, whose six groups of inputs are
// six of the eight columns of the right operand: a column has the row's inputs in its group and zeros elsewhere. So each sum is
// of one group, and its scale multiplies the sum and not the weights. A warp has places of its own for steps, so it sees every
// round of its barriers, and asks for another step once one is in registers. An SM has one program of each matmul: the second
// one's fills its places while the first one's multiplies. A cluster has the slots of a token; its first program adds them.
constexpr int SLOT_WARPS = 12, SLOT_THREADS = SLOT_WARPS * 32;
constexpr int SLOT_STRIPS = 3;                                // of a program at most
constexpr int SLOT_PARTS = SLOT_STRIPS * SLOT_WARPS * 256;    // bytes: sums of 64 weight rows of each warp and strip
constexpr int SLOT_SUMS = FIRST ? 0 : 8 * SLOT_STRIPS * 256;  // bytes: those of up to 8 slots
constexpr int SLOT_PLACES = (MX_SLOT_SHARED_BYTES - 1024 - ROW_BYTES - SLOT_PARTS - SLOT_SUMS) / (CHUNK * SLOT_WARPS);
static_assert(SLOT_PLACES >= 2 && SLOT_WARPS >= SLOT_STRIPS, "");
constexpr u32 ROW_SCALE = 0x67806780u;                 // 2^80: products with unscaled weights stay normal numbers
constexpr float SLOT_LARGER = 5.421010862427522e-20f;  // LARGER / 2^80

__device__ __forceinline__ void multiply_row(float (&s)[4], const u32 (&a)[4], u32 low, u32 high) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {" R(0, 1, 2, 3) "}, {" R(4, 5, 6, 7) "}, {%8, %9}, {" R(0, 1, 2, 3) "};"
      : S(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(low), "r"(high));
}
template <int I>
__device__ __forceinline__ float power_of(u32 bytes) {
  return __uint_as_float(__byte_perm(bytes, 0, 0x444 | I << 12) >> 1);
}

extern "C" __global__ void __launch_bounds__(SLOT_THREADS, 2) mxfp4_slots(const __grid_constant__ SlotArguments a) {
  extern __shared__ __align__(128) unsigned char dynamic[];
  unsigned char* after = dynamic + SLOT_WARPS * SLOT_PLACES * CHUNK;
  u32* row = (u32*)after;
  float* parts = (float*)(after + ROW_BYTES);
  float* sums_of_slots = parts + SLOT_PARTS / 4;
  int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  u32 places = shared_address(dynamic) + warp * (SLOT_PLACES * CHUNK);
  u32 full = shared_address(sums_of_slots) + SLOT_SUMS + warp * (SLOT_PLACES * 8);
  if (lane == 0) {
    for (int i = 0; i < SLOT_PLACES; ++i) make_barrier(full + i * 8, 1);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
  if (!FIRST) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  for (int i = threadIdx.x; i < SLOT_PARTS / 4; i += SLOT_THREADS) parts[i] = 0.0f;
  // blockIdx.z: a slot, or a token whose slots are a cluster.
  int slot = FIRST ? blockIdx.z : blockIdx.z * a.top_k + blockIdx.x, token = FIRST ? slot / a.top_k : blockIdx.z;
  int part = blockIdx.y, at = STRIPS * part / gridDim.y, strips = STRIPS * (part + 1) / gridDim.y - at, rounds = strips * ROUNDS;
  constexpr int HELD = (STEPS * 8 + SLOT_THREADS - 1) / SLOT_THREADS;
  uint4 held[HELD];  // of the row
  auto load_row = [&]() {
    const uint4* from = (const uint4*)(a.x + (i64)(FIRST ? token : slot) * a.row_bytes);
#pragma unroll
    for (int j = 0; j < HELD; ++j) {
      int i = threadIdx.x + j * SLOT_THREADS;
      held[j] = i * 16 < a.row_bytes ? __ldcg(from + i) : make_uint4(0, 0, 0, 0);
    }
  };
  if (FIRST) wait_for_previous();  // for the choice of experts, which the second matmul may read at once
  start_next();
  int expert = __ldcg(a.experts + slot);
  if (FIRST) load_row();
  const u8* weights = a.weights + ((i64)expert * STRIPS + at) * (STEPS * CHUNK);
  int next_round = warp, next_step = 0;  // to be asked for
  auto ask = [&](int place) {
    if (lane == 0 && next_round < rounds) {
      expect(full + place * 8, CHUNK);
      copy_once(places + place * CHUNK, weights + (next_round * ROUND + next_step) * CHUNK, CHUNK, full + place * 8);
    }
    if (++next_step == ROUND) next_step = 0, next_round += SLOT_WARPS;
  };
#pragma unroll
  for (int i = 0; i < SLOT_PLACES; ++i) ask(i);
  // At the end a warp has the outputs of a strip.
  int out = (at + warp) * (GATED ? 32 : 64) + lane * (GATED ? 1 : 2);
  float bias[2] = {};
  if (a.bias && warp < strips) {
    const u16* of = a.bias + (i64)expert * (GATED ? 2 * OUTS : OUTS) + out;
    bias[0] = widen(of[0]), bias[1] = widen(of[GATED ? OUTS : 1]);
  }
  float share = FIRST ? 1.0f : __ldcg(a.shares + slot);
  if (!FIRST) wait_for_previous(), load_row();
#pragma unroll
  for (int j = 0; j < HELD; ++j) {
    int i = threadIdx.x + j * SLOT_THREADS;
    if (i >= STEPS * 8) break;
    uint4 v = held[j];
    u32* to = row + i / 8 * 32 + i % 8;  // pairs of inputs: step, then lane % 4, word, half of it
    to[0] = times(v.x, ROW_SCALE), to[8] = times(v.y, ROW_SCALE), to[16] = times(v.z, ROW_SCALE), to[24] = times(v.w, ROW_SCALE);
  }
  __syncthreads();
  u32 own_row = shared_address(row) + g / 2 * 128 + c * 32 + g % 2 * 16;
  float sums[4][2] = {};
  auto store = [&](int strip) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& sum = sums[i / 2][i % 2];
      sum += __shfl_xor_sync(~0u, sum, 1), sum += __shfl_xor_sync(~0u, sum, 2);
      if (c == 0) parts[(strip * SLOT_WARPS + warp) * 64 + i * 8 + g] = sum;
      sum = 0.0f;
    }
  };
  int stored = 0, place = 0;
  u32 parity = 0;
#pragma unroll 1
  for (int i = warp; i < rounds; i += SLOT_WARPS) {
    int strip = i / ROUNDS;
    if (strip != stored) store(stored), stored = strip;
    uint4 inputs = make_uint4(0, 0, 0, 0);
    if (g < 6) inputs = load_words(own_row + i % ROUNDS * (ROUND * 128));
    float found[4][4] = {};
    u32 scales[4] = {};
#pragma unroll
    for (int step = 0; step < ROUND; ++step) {
      uint4 words[4];
      u32 place_at = places + place * CHUNK;
      wait(full + place * 8, parity);
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) words[tile] = load_words(place_at + tile * 512 + lane * 16);
      if (c == step) {  // whose two columns are the step's groups
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) scales[tile] = load_scales(place_at + 2048 + tile * 32 + g * 4);
      }
      __syncwarp();
      ask(place);
      if (++place == SLOT_PLACES) place = 0, parity ^= 1;
#pragma unroll
      for (int group = 0; group < 2; ++group) {
        bool mine = g == step * 2 + group;
        uint4 x = mine ? inputs : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
          u32 first[4], second[4];
          place_pairs(first, second, group ? words[tile].z : words[tile].x, group ? words[tile].w : words[tile].y);
          multiply_row(found[tile], first, x.x, x.y);
          multiply_row(found[tile], second, x.z, x.w);
        }
      }
    }
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {  // Bytes 0 and 1 are weight row g's and g + 8's of the first group.
      sums[tile][0] += found[tile][0] * power_of<0>(scales[tile]) + found[tile][1] * power_of<2>(scales[tile]);
      sums[tile][1] += found[tile][2] * power_of<1>(scales[tile]) + found[tile][3] * power_of<3>(scales[tile]);
    }
  }
  if (stored < strips) store(stored);
  __syncthreads();
  float top = 0.0f, bottom = 0.0f;
  if (warp < strips) {
    const float* of = parts + warp * (SLOT_WARPS * 64) + lane / 8 * 16 + lane % 8;
#pragma unroll
    for (int i = 0; i < SLOT_WARPS; ++i) top += of[i * 64], bottom += of[i * 64 + 8];
    top = top * SLOT_LARGER + bias[0], bottom = bottom * SLOT_LARGER + bias[1];
  }
  if constexpr (FIRST) {
    if (warp >= strips) return;
    u8* to = a.out + ((i64)slot * OUTS + out) * 2;
    if (GATED) *(u16*)to = pair_of(activated(top, bottom, a.alpha, a.limit), 0.0f);
    else *(u32*)to = pair_of(squared_relu(top), squared_relu(bottom));
  } else {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // All programs of the cluster have begun.
    if (warp < strips) {
      const float* own = sums_of_slots + (blockIdx.x * SLOT_STRIPS + warp) * 64 + lane * 2;
      u32 to;
      asm volatile("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(to) : "r"(shared_address(own)));
      asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(top * share), "f"(bottom * share) : "memory");
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (blockIdx.x != 0 || warp >= strips) return;
    top = bottom = 0.0f;
#pragma unroll 1
    for (int i = 0; i < a.top_k; ++i) {
      float2 of = *(const float2*)(sums_of_slots + (i * SLOT_STRIPS + warp) * 64 + lane * 2);
      top += of.x, bottom += of.y;
    }
    u32* to = (u32*)(a.out + ((i64)token * OUTS + out) * 2);
    u32 sum = pair_of(top, bottom);
    if (a.add) {
      u32 old = __ldcg(to);
      sum = pair_of(widen(old & 0xffff) + widen(sum & 0xffff), widen(old >> 16) + widen(sum >> 16));
    }
    *to = sum;
  }
}
#endif

struct Unpacking {
  const u8* weights;
  u8* out;  // [experts, weight rows, inputs], gate before up
  int row_bytes;
};

// Widens all weights in memory. A program has a strip; a warp has every other step of a tile.
extern "C" __global__ void __launch_bounds__(256) unpack(const __grid_constant__ Unpacking a) {
  constexpr int PITCH = 36;  // words of a row, which begins in other banks than those beside it
  __shared__ __align__(16) u32 turned[8][16 * PITCH];
  wait_for_previous();
  start_next();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4, tile = warp % 4;
  int expert = blockIdx.y / STRIPS, strip = blockIdx.y % STRIPS;
  u8* out = a.out + (i64)expert * ((1 + GATED) * OUTS) * a.row_bytes;
  const u8* from = a.weights + (i64)blockIdx.y * (STEPS * CHUNK);
#pragma unroll 2
  for (int step = warp / 4; step < STEPS; step += 2) {
    uint4 w = *(const uint4*)(from + step * CHUNK + tile * 512 + lane * 16);
    u32 weights[4][4];
    widen_step(weights, w, *(const u32*)(from + step * CHUNK + 2048 + tile * 32 + g * 4));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16; ++i)  // of word i / 4, weight row g + 8 (i % 2)
      turned[warp][(i % 2 * 8 + g) * PITCH + i / 4 * 8 + i / 2 % 2 * 4 + c] = times(weights[i / 4][i % 4], 0x47804780u);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int row = i * 4 + lane / 8, byte = step * 128 + lane % 8 * 16;
      i64 target = GATED ? row / 8 * OUTS + strip * 32 + tile * 8 + row % 8 : strip * 64 + tile * 16 + row % 8 * 2 + row / 8;
      if (byte < a.row_bytes) *(uint4*)(out + target * a.row_bytes + byte) = *(const uint4*)&turned[warp][row * PITCH + lane % 8 * 4];
    }
  }
}
