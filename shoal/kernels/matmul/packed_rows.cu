// Matmuls of many rows with weights of 4 or 8 bits on Hopper. packed_rows.py launches them, says what they are for, and
// defines PR_ROWS rows of a tile, PR_BITS of a weight, PR_GROUP inputs that share a scale, PR_E2M1 (1: weights are such
// numbers) and PR_SHARED_BYTES.
//
// Programs stay on their SMs. A unit is a strip of 64 weight rows (4 tiles of gpu_weight.py) with a tile of rows, or one of
// the parts into which its inputs are split; each program has units that follow one another. One thread keeps a ring of
// shared memory filled by TMA, 128 inputs at a time: words, scales and minima of one or two strips, and the rows. Two
// warpgroups make a thread's words the registers that are wgmma's left operand, while the words before are multiplied;
// rows are the right operand. The warpgroups have a strip each, or share the last one: each multiplies half of its inputs,
// and finishes half of the rows. The last program of a split tile to arrive adds the parts in order.

#include "hopper.cuh"

constexpr int ROWS = PR_ROWS, NT = ROWS / 8;
constexpr int WARPGROUPS = 2;  // that multiply
constexpr int THREADS = WARPGROUPS * 128 + 128;
constexpr int STEPS = 2;  // of 64 inputs, that are copied at once
constexpr int GROUPS = STEPS * 64 / PR_GROUP;
constexpr int WORDS = PR_BITS / 4;  // times 16 bytes, which a thread has of a step
constexpr int TILE_BYTES = STEPS * WORDS * 512, SCALE_BYTES = GROUPS * 32;  // of a tile in a place of the ring
constexpr int ROWS_BYTES = STEPS * ROWS * 128;                              // of a place
constexpr int SCALES_AT = 2 * 4 * TILE_BYTES, MINIMA_AT = SCALES_AT + 2 * 4 * SCALE_BYTES;
constexpr int WEIGHT_BYTES = MINIMA_AT + 2 * 4 * SCALE_BYTES;
constexpr int EXCHANGED = 2;  // tiles of 8 rows that a warpgroup gives to the other at once
constexpr int EXCHANGE_BYTES = 2 * EXCHANGED * 4 * 128 * 4;
constexpr int PLACES = (PR_SHARED_BYTES - 1024 - 256 - EXCHANGE_BYTES) / (ROWS_BYTES + WEIGHT_BYTES);
constexpr float LARGER = 65536.0f;  // Weights in registers are too small by it (loaders.py).
static_assert(128 % PR_GROUP == 0 && ROWS % 32 == 0 && PLACES >= 2 && PLACES <= 16, "");

// A box of what `map` describes, in three and in four dimensions.
__device__ __forceinline__ void copy_box(u32 to, const void* map, int x, int y, int z, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
               "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void copy_box(u32 to, const void* map, int x, int y, int z, int w, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
                   to),
               "l"(map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void prefetch_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

__device__ __forceinline__ float load_float(u32 address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
  return v;
}
__device__ __forceinline__ void store_float(u32 address, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
}
__device__ __forceinline__ u32 fma(u32 a, u32 b, u32 c) {
  u32 v;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}
__device__ __forceinline__ float low_of(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

struct alignas(64) Map {
  u8 bytes[128];
};
struct Arguments {
  Map x, words, scales, minima;  // as packed_rows.py describes them
  const u16* bias;               // or null
  const u8* residual;            // or null; may be `out`
  u8* out;
  float4* parts;  // [row tiles, strips, splits, NT, 128], with splits
  int* arrived;   // [row tiles, strips], zeros before and after
  int has_minima, rows, outs, rounds, splits;  // rounds of 128 inputs, split over programs
};

// Strips that a program multiplies at once, beside one another: one or two. They have `rounds` places of the ring.
template <bool GATED>
struct Group {
  int row_tile, strip, count, split, round, rounds;
  static __device__ __forceinline__ int strips(const Arguments& a) { return a.outs / (GATED ? 32 : 64); }
  static __device__ __forceinline__ int units(const Arguments& a) { return (a.rows + ROWS - 1) / ROWS * strips(a) * a.splits; }
  __device__ __forceinline__ Group(const Arguments& a, int at, int end) {
    int all = strips(a);
    row_tile = at / (all * a.splits), split = at / all % a.splits, strip = at % all;
    count = a.splits > 1 ? 1 : min(min(2, all - strip), end - at);
    round = split * a.rounds / a.splits, rounds = (split + 1) * a.rounds / a.splits - round;
  }
  __device__ __forceinline__ int tile(const Arguments& a) const { return row_tile * strips(a) + strip; }
};

// Addresses in shared memory, and the place whose turn it is.
struct Ring {
  u32 memory, place, parity;
  __device__ __forceinline__ u32 rows_at() const { return memory + place * ROWS_BYTES; }
  __device__ __forceinline__ u32 weights_at() const { return memory + PLACES * ROWS_BYTES + place * WEIGHT_BYTES; }
  __device__ __forceinline__ u32 exchange() const { return memory + PLACES * (ROWS_BYTES + WEIGHT_BYTES); }
  __device__ __forceinline__ u32 full() const { return exchange() + EXCHANGE_BYTES + place * 8; }
  __device__ __forceinline__ u32 free() const { return full() + PLACES * 8; }
  __device__ __forceinline__ void next() {
    if (++place == PLACES) place = 0, parity ^= 1;
  }
};

// Goes through the places of the ring that a program fills.
template <bool GATED>
struct Cursor {
  int at, end;
  Group<GATED> group;
  Ring ring;
  __device__ __forceinline__ Cursor(const Arguments& a, int at, int end, const Ring& ring)
      : at(at), end(end), group(a, at, end), ring(ring) {}
  __device__ __forceinline__ bool more() const { return at < end; }
  __device__ __forceinline__ void next(const Arguments& a) {
    ring.next();
    ++group.round;
    if (--group.rounds == 0) {
      at += group.count;
      if (at < end) group = Group<GATED>(a, at, end);
    }
  }
  __device__ __forceinline__ void copy_weights(const Arguments& a) const {
    u32 full = ring.full(), to = ring.weights_at();
    expect(full, group.count * 4 * (TILE_BYTES + SCALE_BYTES * (a.has_minima ? 2 : 1)) + ROWS_BYTES);
#pragma unroll 1
    for (int i = 0; i < group.count; ++i) {
      int tile = (group.strip + i) * (GATED ? 2 : 4);
      copy_box(to + i * (4 * TILE_BYTES), &a.words, 0, group.round * (STEPS * WORDS), tile, 0, full);
      copy_box(to + SCALES_AT + i * (4 * SCALE_BYTES), &a.scales, 0, group.round * GROUPS, tile, 0, full);
      if (a.has_minima) copy_box(to + MINIMA_AT + i * (4 * SCALE_BYTES), &a.minima, 0, group.round * GROUPS, tile, 0, full);
    }
  }
  __device__ __forceinline__ void copy_rows(const Arguments& a) const {
    copy_box(ring.rows_at(), &a.x, 0, group.row_tile * ROWS, group.round * STEPS, ring.full());
  }
};

// The work of one thread. Weights are asked for before the rows are there.
template <bool GATED>
__device__ __forceinline__ void fill(const Arguments& a, int at, int end, Ring ring) {
  prefetch_map(&a.words), prefetch_map(&a.scales), prefetch_map(&a.x);
  Cursor<GATED> next(a, at, end, ring), behind(a, at, end, ring);
  int early = 0;
#pragma unroll 1
  for (; early < PLACES && next.more(); ++early, next.next(a)) next.copy_weights(a);
  wait_for_previous();
#pragma unroll 1
  for (; early; --early, behind.next(a)) behind.copy_rows(a);
#pragma unroll 1
  for (; next.more(); next.next(a)) {
    wait(next.ring.free(), next.ring.parity ^ 1);
    next.copy_weights(a);
    next.copy_rows(a);
  }
}

// A group's scales and minima, of the weight rows g and g + 8 of a warp.
struct Scales {
  u32 low, high, lowest, highest;
};
constexpr u32 NOTHING = 0x80008000u;  // -0.0
template <bool GATED>
__device__ __forceinline__ Scales scales_of(const Arguments& a, u32 weights_at, int warp, int g) {
  Scales s;
  u32 at = weights_at + SCALES_AT + g * 4;
  if (GATED) {
    u32 half = warp % 2 ? 0x3232 : 0x1010;
    u32 gate = at + warp / 2 * SCALE_BYTES, up = gate + 2 * SCALE_BYTES;
    s.low = __byte_perm(load_scales(gate), 0, half), s.high = __byte_perm(load_scales(up), 0, half);
    if (PR_E2M1) {
      s.lowest = s.highest = NOTHING;
    } else if (a.has_minima) {
      constexpr int TO_MINIMA = MINIMA_AT - SCALES_AT;
      s.lowest = __byte_perm(load_scales(gate + TO_MINIMA), 0, half), s.highest = __byte_perm(load_scales(up + TO_MINIMA), 0, half);
    } else {
      u32 zeros = PR_BITS == 8 || warp % 2 ? 0x80808080u : 0x80088008u;
      s.lowest = fma(s.low, zeros, NOTHING), s.highest = fma(s.high, zeros, NOTHING);
    }
  } else {
    u32 both = load_scales(at + warp * SCALE_BYTES);
    s.low = __byte_perm(both, 0, 0x1010), s.high = __byte_perm(both, 0, 0x3232);
    if (PR_E2M1) {
      s.lowest = s.highest = NOTHING;
    } else if (a.has_minima) {
      both = load_scales(at + warp * SCALE_BYTES + MINIMA_AT - SCALES_AT);
      s.lowest = __byte_perm(both, 0, 0x1010), s.highest = __byte_perm(both, 0, 0x3232);
    } else {  // less the quant that stands for 0
      s.lowest = fma(s.low, PR_BITS == 8 ? 0x80808080u : 0x80088008u, NOTHING), s.highest = fma(s.high, 0x80808080u, NOTHING);
    }
  }
  return s;
}

// The numbers of e2m1 that lie `SHIFT` above the lowest bits of each half, put where bf16 has sign, exponent and mantissa.
template <int SHIFT>
__device__ __forceinline__ u32 placed(u32 word) {
  u32 sign = word << (12 - SHIFT), rest = SHIFT < 6 ? word << (6 - SHIFT & 7) : word >> (SHIFT - 6 & 7);
  return (sign & 0x80008000u) | (rest & 0x01C001C0u);
}
// The weights of 16 inputs, from the words of weight rows g and of g + 8. Quants become numbers that are too small
// (loaders.py). Gated: both are of the upper or the lower rows of a tile, as `shift` and `mask` say.
template <bool GATED>
__device__ __forceinline__ void operand(u32 (&w)[4], const u32* lows, const u32* highs, int shift, u32 mask, const Scales& s) {
  u32 low = lows[0], high = highs[0];
  if (PR_BITS == 8) {
    constexpr u32 BYTES = 0x00FF00FFu;
    int above = GATED ? shift : 8;
    w[0] = (GATED ? low >> shift : low) & BYTES, w[1] = high >> above & BYTES;
    w[2] = (GATED ? lows[1] >> shift : lows[1]) & BYTES, w[3] = highs[1] >> above & BYTES;
  } else if (PR_E2M1) {
    if (GATED) low >>= shift, high >>= shift;
    w[0] = placed<0>(low), w[1] = placed<GATED ? 0 : 4>(high), w[2] = placed<8>(low), w[3] = placed<GATED ? 8 : 12>(high);
  } else {
    u32 low_mask = GATED ? mask : 0x000F000Fu, high_mask = GATED ? mask : 0x00F000F0u;
    w[0] = low & low_mask, w[1] = high & high_mask, w[2] = low >> 8 & low_mask, w[3] = high >> 8 & high_mask;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) w[i] = fma(w[i], i % 2 ? s.high : s.low, i % 2 ? s.highest : s.lowest);
}

// What a thread reads of a step.
template <bool GATED>
struct Step {
  static constexpr int SCALES = PR_GROUP < 64 ? 64 / PR_GROUP : 1;
  u32 low[4 * WORDS], high[4 * WORDS];
  Scales scales[SCALES];
  u64 rows;

  // `which`: the strip's number in the ring.
  __device__ __forceinline__ void load(const Arguments& a, const Ring& ring, int which, int step) {
    int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    u32 words_at = ring.weights_at() + (which * 4 + (GATED ? warp / 2 : warp)) * TILE_BYTES + step * (WORDS * 512) + lane * 16;
    u32 scales_at = ring.weights_at() + which * (4 * SCALE_BYTES) + step * 64 / PR_GROUP * 32;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      uint4 own = load_words(words_at + i * 512), other = GATED ? load_words(words_at + 2 * TILE_BYTES + i * 512) : own;
      low[4 * i] = own.x, low[4 * i + 1] = own.y, low[4 * i + 2] = own.z, low[4 * i + 3] = own.w;
      high[4 * i] = other.x, high[4 * i + 1] = other.y, high[4 * i + 2] = other.z, high[4 * i + 3] = other.w;
    }
#pragma unroll
    for (int i = 0; i < SCALES; ++i) scales[i] = scales_of<GATED>(a, scales_at + i * 32, warp, lane / 4);
    rows = (u64)0x40000040u << 32 | 1u << 16 | (ring.rows_at() + step * (ROWS * 128)) >> 4;
  }
  __device__ __forceinline__ void widen(u32 (&weights)[4][4]) const {
    int shift = threadIdx.x / 32 % 2 * PR_BITS;
    u32 mask = 0x000F000Fu << shift;
#pragma unroll
    for (int k = 0; k < 4; ++k) operand<GATED>(weights[k], low + k * WORDS, high + k * WORDS, shift, mask, scales[SCALES * k / 4]);
  }
};

// Multiplies by steps `first` to `first` + COUNT - 1 of each of DEPTH places of the ring.
template <bool GATED, int COUNT, int DEPTH>
__device__ __forceinline__ void multiply_places(const Arguments& a, float (&sums)[4 * NT], Ring& ring, int which, int first) {
  constexpr int TOTAL = COUNT * DEPTH;
  Ring behind = ring;
  Step<GATED> step;
  u32 weights[2][4][4];
  wait(ring.full(), ring.parity);
  step.load(a, ring, which, first);
  step.widen(weights[0]);
#pragma unroll
  for (int i = 0; i < TOTAL; ++i) {
    u64 rows = step.rows;
    keep(sums);
    begin_matmuls();
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply<NT>(sums, weights[i % 2][k], rows + k * 2);
    end_matmuls();
    if ((i + 1) % COUNT == 0) {
      ring.next();
      if (i + 1 < TOTAL) wait(ring.full(), ring.parity);
    }
    if (i + 1 < TOTAL) step.load(a, ring, which, first + (i + 1) % COUNT);
    if (i) wait_for_matmuls<1>();
    if (i && i % COUNT == 0) {
      if (threadIdx.x % 32 == 0) arrive(behind.free());
      behind.next();
    }
    if (i + 1 < TOTAL) step.widen(weights[(i + 1) % 2]);
  }
  wait_for_matmuls<0>();
  keep(sums);
  if (threadIdx.x % 32 == 0) arrive(behind.free());
}
template <bool GATED, int COUNT>
__device__ __forceinline__ void multiply_strip(const Arguments& a, float (&sums)[4 * NT], Ring& ring, int rounds, int which, int first) {
#pragma unroll
  for (int j = 0; j < 4 * NT; ++j) sums[j] = 0.0f;
  constexpr int DEPTH = ROWS > 128 ? 1 : 4;  // With the few places of more rows, none may be freed late.
  int round = 0;
#pragma unroll 1
  for (; round + DEPTH <= rounds; round += DEPTH) multiply_places<GATED, COUNT, DEPTH>(a, sums, ring, which, first);
#pragma unroll 1
  for (; round < rounds; ++round) multiply_places<GATED, COUNT, 1>(a, sums, ring, which, first);
}

__device__ __forceinline__ float silu_times(float gate, float up) {
  gate = rounded(gate), up = rounded(up);
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// Stores tiles of 8 rows, from `BEGIN` on.
template <bool GATED, int BEGIN, int END>
__device__ __forceinline__ void store(const Arguments& a, const float (&sums)[4 * NT], int row_tile, int strip) {
  int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  int out = GATED ? strip * 32 + warp * 8 : strip * 64 + warp * 16;  // the warp's first
  float low = 0.0f, high = 0.0f;
  if (a.bias) low = widen(a.bias[out + g]), high = widen(a.bias[out + g + (GATED ? a.outs : 8)]);
  constexpr int HELD = NT % 8 ? 2 : 4, PAIRS = GATED ? 1 : 2;
#pragma unroll
  for (int first = BEGIN; first < END; first += HELD) {
    u32 before[HELD][PAIRS];
    i64 at[HELD];
    bool inside[HELD];
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      int row = row_tile * ROWS + (first + i) * 8 + g;
      inside[i] = row < a.rows, at[i] = ((i64)row * a.outs + out + c * 2) * 2;
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) before[i][p] = a.residual && inside[i] ? __ldcg((const u32*)(a.residual + at[i] + p * 16)) : 0;
    }
#pragma unroll
    for (int i = 0; i < HELD; ++i) {
      const float* s = sums + 4 * (first + i);
      float top[2] = {s[0] * LARGER + low, s[1] * LARGER + low}, bottom[2] = {s[2] * LARGER + high, s[3] * LARGER + high};
      u32 found[PAIRS];
      if constexpr (GATED) {
        found[0] = transposed(pair_of(silu_times(top[0], bottom[0]), silu_times(top[1], bottom[1])));
      } else {
        found[0] = transposed(pair_of(top[0], top[1])), found[1] = transposed(pair_of(bottom[0], bottom[1]));
      }
#pragma unroll
      for (int p = 0; p < PAIRS; ++p) {
        if (a.residual) found[p] = pair_of(low_of(before[i][p]) + low_of(found[p]), high_of(before[i][p]) + high_of(found[p]));
        if (inside[i]) *(u32*)(a.out + at[i] + p * 16) = found[p];
      }
    }
  }
}

// Each warpgroup gives half of its sums to the other, which adds them to its own.
__device__ __forceinline__ void add_halves(float (&sums)[4 * NT], u32 exchange, int warpgroup) {
  constexpr int NUMBERS = 4 * EXCHANGED, HALF = 2 * NT;
  u32 mine = exchange + warpgroup * (NUMBERS * 512) + threadIdx.x % 128 * 4;
  u32 others = exchange + (1 - warpgroup) * (NUMBERS * 512) + threadIdx.x % 128 * 4;
#pragma unroll
  for (int first = 0; first < HALF; first += NUMBERS) {
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) store_float(mine + i * 512, warpgroup ? sums[first + i] : sums[HALF + first + i]);
    asm volatile("bar.sync 1, 256;" ::: "memory");
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
      float other = load_float(others + i * 512);
      if (warpgroup) sums[HALF + first + i] += other;
      else sums[first + i] += other;
    }
    asm volatile("bar.sync 1, 256;" ::: "memory");
  }
}

// Adds the parts of a tile whose inputs are split, and says if this program arrived last and so has the sums. A warpgroup
// has half of the rows.
template <bool GATED>
__device__ __forceinline__ bool add_parts(const Arguments& a, float (&sums)[4 * NT], const Group<GATED>& group, u32 exchange,
                                          int warpgroup) {
  constexpr int HALF = NT / 2;
  float4* parts = a.parts + (i64)group.tile(a) * a.splits * (NT * 128) + threadIdx.x;
  parts += warpgroup * (HALF * 128 - 128);  // A thread's parts lie 128 apart.
#pragma unroll
  for (int j = 0; j < HALF; ++j) {
    const float *low = sums + 4 * j, *high = low + 4 * HALF;
    float4 part;
    if (warpgroup) part = make_float4(high[0], high[1], high[2], high[3]);
    else part = make_float4(low[0], low[1], low[2], low[3]);
    parts[(i64)group.split * (NT * 128) + j * 128] = part;
  }
  asm volatile("bar.sync 1, 256;" ::: "memory");
  if (threadIdx.x == 0) {
    int *arrived = a.arrived + group.tile(a), before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
    bool last = before == a.splits - 1;
    if (last) *arrived = 0;
    store_float(exchange, last);
  }
  asm volatile("bar.sync 1, 256;" ::: "memory");
  bool last = load_float(exchange) != 0.0f;
  asm volatile("bar.sync 1, 256;" ::: "memory");  // before the exchange has other numbers
  if (!last) return false;
#pragma unroll
  for (int j = 0; j < HALF; ++j) {
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 2
    for (int split = 0; split < a.splits; ++split) {
      float4 part = __ldcg(parts + (i64)split * (NT * 128) + j * 128);
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    float *low = sums + 4 * j, *high = low + 4 * HALF;
    if (warpgroup) high[0] = sum.x, high[1] = sum.y, high[2] = sum.z, high[3] = sum.w;
    else low[0] = sum.x, low[1] = sum.y, low[2] = sum.z, low[3] = sum.w;
  }
  return true;
}

template <bool GATED>
__device__ __forceinline__ void matmul(const Arguments& a) {
  extern __shared__ unsigned char dynamic[];
  Ring ring = {(shared_address(dynamic) + 1023) / 1024 * 1024, 0, 0};  // as tensor cores' swizzled rows want it
  if (threadIdx.x == 0) {
    for (int i = 0; i < PLACES; ++i) make_barrier(ring.full() + i * 8, 1), make_barrier(ring.free() + i * 8, WARPGROUPS * 4);
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncthreads();
  start_next();
  int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  i64 units = Group<GATED>::units(a);
  int at = units * blockIdx.y / gridDim.y, end = units * (blockIdx.y + 1) / gridDim.y;
  if (warpgroup == WARPGROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x % 128 == 0 && at < end) fill<GATED>(a, at, end, ring);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  wait_for_previous();  // before the residual is read
#pragma unroll 1
  while (at < end) {
    Group<GATED> group(a, at, end);
    at += group.count;
    float sums[4 * NT];
    if (group.count == 2) {
      multiply_strip<GATED, 2>(a, sums, ring, group.rounds, warpgroup, 0);
      store<GATED, 0, NT>(a, sums, group.row_tile, group.strip + warpgroup);
    } else {
      multiply_strip<GATED, 1>(a, sums, ring, group.rounds, 0, warpgroup);
      add_halves(sums, ring.exchange(), warpgroup);
      if (ROWS <= 128 && a.splits > 1 && !add_parts(a, sums, group, ring.exchange(), warpgroup)) continue;
      if (warpgroup) store<GATED, NT / 2, NT>(a, sums, group.row_tile, group.strip);
      else store<GATED, 0, NT / 2>(a, sums, group.row_tile, group.strip);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) plain(const __grid_constant__ Arguments a) { matmul<false>(a); }
extern "C" __global__ void __launch_bounds__(THREADS, 1) gated(const __grid_constant__ Arguments a) { matmul<true>(a); }
