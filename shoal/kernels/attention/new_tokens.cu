// Norms, rotation, cache write and attention of one new token of each of a few sequences, in one launch.
// new_tokens.py launches it, says what it is for, and defines NEW_H query heads, NEW_G kv heads, NEW_N numbers of a head,
// NEW_SLOTS blocks of a warp on their way. The grid is (programs of a cluster, kv heads, tokens).
//
// A cluster of programs has one kv head of a sequence and shares its keys. Each warp has blocks of 16 keys and values
// on their way to shared memory before the matmul for q, k and v has ended, since all but the newest token's lie in the
// cache. Results meet in the programs' shared memory, so there is no second launch, no counter and no workspace.

typedef unsigned int u32;
typedef unsigned short u16;
typedef long long i64;
typedef unsigned long long Barrier;  // counts bytes that arrive in a program's shared memory

constexpr int H = NEW_H, G = NEW_G, N = NEW_N, SLOTS = NEW_SLOTS;
constexpr int GROUP = H / G, HALF = N / 2, PAIRS = HALF / 32;
constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int KEYS = 16;         // of a block of the cache
constexpr int CHUNKS = N / 8;    // of a key, 16 bytes each
constexpr int MOST_PROGRAMS = 16;  // of a cluster
constexpr int OUTS = GROUP * N;  // of a kv head
constexpr bool IN_TURN = SLOTS == 1;  // Keys make place for the next block's before the values are multiplied.
constexpr int JOBS = (GROUP + 2 + WARPS - 1) / WARPS;  // heads of q, k or v that a warp norms and rotates
constexpr float LOWEST = -1e30f, LOG2_E = 1.4426950408889634f;

#ifndef EMULATED  // A test runs this file on a CPU, with functions of its own in place of these.
__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ u16 narrow(float x) {
  u16 v;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(x));
  return v;
}

__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// What earlier kernels wrote is read past the L1 cache.
__device__ __forceinline__ u16 load_one(const u16* p) {
  u16 v;
  asm volatile("ld.relaxed.gpu.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ int load_int(const int* p) {
  int v;
  asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Copies 16 bytes into shared memory, or zeros.
__device__ __forceinline__ void copy_async(void* to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until this thread has at most `LEFT` groups of copies on their way.
template <int LEFT>
__device__ __forceinline__ void wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Four matrices of 8 x 8: lane l brings the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void load_transposed(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// c += a b by tensor cores: 16 rows of a, 8 columns of b.
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A matrix of 8 x 8, of which a lane has two numbers of row lane / 4, with rows and columns exchanged.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 v;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(v) : "r"(pair));
  return v;
}

// Writes to the shared memory of another program of the cluster, and counts the bytes at its barrier. Neither needs a
// fence, which takes 1 us where the cache was written before.
__device__ __forceinline__ void send(float4* to, int rank, float4 v, Barrier* barrier) {
  asm volatile(
      "{\n.reg .u32 there, counter;\nmapa.shared::cluster.u32 there, %0, %2;\nmapa.shared::cluster.u32 counter, %1, %2;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%3, %4, %5, %6}, [counter];\n}" ::"r"(
          shared_address(to)),
      "r"(shared_address(barrier)), "r"(rank), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
      : "memory");
}
// One thread makes the barrier before its program says that it has begun.
__device__ __forceinline__ void expect(Barrier* barrier, int bytes) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;\n"
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void wait_for_bytes(Barrier* barrier) {
  asm volatile(
      "{\n.reg .pred complete;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 complete, [%0], 0;\n@!complete bra again;\n}" ::"r"(
          shared_address(barrier))
      : "memory");
}
__device__ __forceinline__ void cluster_begun() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#endif

__device__ __forceinline__ float widen(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ float rounded(float x) { return widen(narrow(x)); }
__device__ __forceinline__ u32 pair_of(float low, float high) { return narrow(low) | (u32)narrow(high) << 16; }

struct Arguments {
  const u16* qkv;        // [T, (H + 2G) * N]
  const u16* q_norm;     // [N] or null
  const u16* k_norm;
  const float* cos_sin;  // [positions, N] or null
  const float* sinks;    // [H] or null: logits of keys without values
  const int* positions;  // [T]
  const int* rows;       // [T]
  const int* lens;       // [T], with the new token
  const int* tables;
  u16* cache;
  u16* out;              // [T, H * N]
  i64 table_stride, block_stride, kv_stride, head_stride;
  float eps, scale_log2;
  int window;            // 0: none
};

struct Shared {
  u16 keys[WARPS][SLOTS][KEYS * N];
  u16 values[WARPS][SLOTS][KEYS * N];
  u16 q[8 * N];
  u16 new_key[N], new_value[N];
  float highest[WARPS][GROUP], totals[WARPS][GROUP];
  float4 received[OUTS + MOST_PROGRAMS];  // of each program: sums, its highest score and the total of its weights
  Barrier arrived;

  // The sums of a warp, [GROUP, N], take the place of its first keys.
  __device__ __forceinline__ float* sums_of(int warp) { return (float*)keys[warp][0]; }
};

// Where chunk c of row r lies, so that eight rows' chunks lie in different banks.
__device__ __forceinline__ int place_of(int r, int c) { return r * N + ((c ^ (r & 7)) * 8); }

// The same for number n of a head's sums, so that the heads of four lanes do.
__device__ __forceinline__ int place_of_sum(int head, int n) { return head * N + (n ^ (head / 2 * 8)); }

struct Blocks {
  const int* table;
  const u16* cache;  // of this kv head
  i64 block_stride, kv_stride;
  int first, begin, end, newest;  // the position where blocks begin; keys [begin, end), of which the newest is not stored
  u32 stored;                     // keys from `begin` on that are in the cache
  int ids;                        // entries of the table for 32 turns of this warp, one a lane

  __device__ __forceinline__ void look_up(int turn, int warp, int lane) {
    int at = first + (warp + (turn + lane) * WARPS) * KEYS;
    ids = at < end ? load_int(table + at / KEYS) : 0;
  }

  // Starts copies of the keys (`from` 0), or the values (`from` kv_stride), of the warp's block of this turn. Turns come
  // in order, keys before values.
  __device__ __forceinline__ void load(int turn, u16* to, i64 from, int warp, int lane) {
    if (from == 0 && turn && turn % 32 == 0) look_up(turn, warp, lane);
    int at = first + (warp + turn * WARPS) * KEYS;
    if (at < end) {
      const u16* block = cache + __shfl_sync(~0u, ids, turn % 32) * block_stride + from;
#pragma unroll
      for (int i = 0; i < KEYS * CHUNKS / 32; ++i) {
        int key = (i * 32 + lane) / CHUNKS, chunk = (i * 32 + lane) % CHUNKS;
        copy_async(to + place_of(key, chunk), block + key * N + chunk * 8, (u32)(at + key - begin) < stored);
      }
    }
    end_group();
  }

  // Puts the newest token's key or value into its place, if the block of this turn has it.
  __device__ __forceinline__ void put_newest(int turn, u16* to, const u16* from, int warp, int lane) const {
    int key = newest - first - (warp + turn * WARPS) * KEYS;
    if (key >= 0 && key < KEYS) {
#pragma unroll 1
      for (int n = lane; n < N; n += 32) to[place_of(key, n / 8) + n % 8] = from[n];
      __syncwarp();
    }
  }
};

// The norm of a head of q or k, and its rotation, rounded as rope.py does. A lane has the pairs of its PAIRS places.
__device__ __forceinline__ void norm_and_rotate(u16 (&raw)[2][PAIRS], const float (&weight)[2][PAIRS], const float (&cosine)[PAIRS],
                                                const float (&sine)[PAIRS], bool norms, float eps) {
  float x[2][PAIRS], squares = 0.0f;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    x[0][i] = widen(raw[0][i]), x[1][i] = widen(raw[1][i]);
    squares += x[0][i] * x[0][i] + x[1][i] * x[1][i];
  }
  if (norms) {
#pragma unroll
    for (int step = 16; step; step >>= 1) squares += __shfl_xor_sync(~0u, squares, step);
    float scale = rsqrtf(squares / N + eps);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) x[half][i] = rounded(rounded(x[half][i] * scale) * weight[half][i]);
  }
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    raw[0][i] = narrow(x[0][i] * cosine[i] - x[1][i] * sine[i]);
    raw[1][i] = narrow(x[1][i] * cosine[i] + x[0][i] * sine[i]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) attend_new_tokens(const Arguments a) {
#ifndef EMULATED
  extern __shared__ __align__(128) unsigned char memory[];
#endif
  Shared& s = *(Shared*)memory;
  start_next();
  int cluster = gridDim.x, rank = blockIdx.x, head = blockIdx.y, token = blockIdx.z;
  int part = (OUTS + cluster - 1) / cluster;  // outputs of a program; the last has what is left
  int own_part = OUTS - rank * part < part ? OUTS - rank * part : part;
  if (threadIdx.x == 0) expect(&s.arrived, own_part > 0 ? cluster * own_part * sizeof(float4) : 0);
  __syncwarp();
  cluster_begun();
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int len = load_int(a.lens + token), row = load_int(a.rows + token), position = load_int(a.positions + token);
  bool empty = len <= 0 || row < 0;
  u16* out = a.out + (i64)token * H * N + head * OUTS + rank * part;
  // The keys of the sequence are cut into whole blocks.
  int start = a.window > 0 && len > a.window ? len - a.window : 0;
  int first_block = start / KEYS, blocks = empty ? 0 : (len + KEYS - 1) / KEYS - first_block;
  int each = (blocks + cluster - 1) / cluster;
  Blocks of;
  of.table = a.tables + (empty ? 0 : row * a.table_stride);
  of.cache = a.cache + head * a.head_stride;
  of.block_stride = a.block_stride, of.kv_stride = a.kv_stride;
  of.first = (first_block + rank * each) * KEYS;
  of.begin = start > of.first ? start : of.first;
  of.end = of.first + each * KEYS < len ? of.first + each * KEYS : len;
  of.newest = len - 1;
  of.stored = of.end > of.begin ? (of.end < len ? of.end : len - 1) - of.begin : 0;
  int count = of.end > of.first ? (of.end - of.first + KEYS - 1) / KEYS : 0;
  of.look_up(0, warp, lane);

  // Warps take the group's heads of q, then k and v. What does not come from the matmul is read before the wait.
  bool has_newest = count > 0 && of.end == len;
  float cosine[PAIRS], sine[PAIRS], weight[JOBS][2][PAIRS];
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    int at = lane * PAIRS + i;
    cosine[i] = 1.0f, sine[i] = 0.0f;
    if (a.cos_sin && !empty) cosine[i] = a.cos_sin[(i64)position * N + at], sine[i] = a.cos_sin[(i64)position * N + HALF + at];
#pragma unroll
    for (int j = 0; j < JOBS; ++j) {
      const u16* norm = warp + j * WARPS < GROUP ? a.q_norm : a.k_norm;
      weight[j][0][i] = norm ? widen(norm[at]) : 1.0f, weight[j][1][i] = norm ? widen(norm[HALF + at]) : 1.0f;
    }
  }
#pragma unroll
  for (int slot = 0; slot < SLOTS; ++slot) {
    of.load(slot, s.keys[warp][slot], 0, warp, lane);
    of.load(slot, s.values[warp][slot], of.kv_stride, warp, lane);
  }
  for (int i = threadIdx.x; i < 8 * N; i += THREADS) s.q[i] = 0;
  u16* slot = 0;  // the newest key's place in the cache
  if (has_newest)
    slot = a.cache + load_int(of.table + (len - 1) / KEYS) * a.block_stride + head * a.head_stride + (len - 1) % KEYS * N;
  __syncthreads();
  wait_for_previous();
  if (empty) {
    cluster_wait();
    if ((int)threadIdx.x < own_part) out[threadIdx.x] = 0;
    return;
  }
  u16 raw[JOBS][2][PAIRS];
#pragma unroll
  for (int j = 0; j < JOBS; ++j) {
    int job = warp + j * WARPS;
    if (job < GROUP || (job < GROUP + 2 && has_newest)) {
      int of_qkv = job < GROUP ? head * GROUP + job : job == GROUP ? H + head : H + G + head;
      const u16* from = a.qkv + ((i64)token * (H + 2 * G) + of_qkv) * N + lane * PAIRS;
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) raw[j][0][i] = load_one(from + i), raw[j][1][i] = load_one(from + HALF + i);
    }
  }
#pragma unroll
  for (int j = 0; j < JOBS; ++j) {
    int job = warp + j * WARPS;
    if (job >= GROUP && !(job < GROUP + 2 && has_newest)) continue;
    if (job < GROUP + 1) norm_and_rotate(raw[j], weight[j], cosine, sine, a.q_norm != 0, a.eps);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < PAIRS; ++i) {
        int at = half * HALF + lane * PAIRS + i;
        if (job < GROUP) {
          s.q[place_of(job, at / 8) + at % 8] = raw[j][half][i];
        } else {
          (job == GROUP ? s.new_key : s.new_value)[at] = raw[j][half][i];
          slot[(job == GROUP ? 0 : a.kv_stride) + at] = raw[j][half][i];
        }
      }
  }
  __syncthreads();

  u32 q[CHUNKS / 2][2];
#pragma unroll
  for (int step = 0; step < CHUNKS / 2; step += 2) {
    u32 r[4];
    load_matrices(r, s.q + place_of(lane % 8, step * 2 + lane / 8));
    q[step][0] = r[0], q[step][1] = r[1], q[step + 1][0] = r[2], q[step + 1][1] = r[3];
  }
  // Keys are rows and queries are columns of scores, of which a lane has keys lane / 4 + {0, 8} and queries
  // lane % 4 * 2 + {0, 1}; numbers of a value are the rows of sums.
  float acc[N / 16][4], highest[2] = {LOWEST, LOWEST}, total[2] = {};
#pragma unroll
  for (int i = 0; i < N / 16; ++i) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
  if (a.sinks && rank == 0 && warp == 0) {  // One warp of a cluster begins with them.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int of_group = lane % 4 * 2 + i;
      if (of_group < GROUP) highest[i] = a.sinks[head * GROUP + of_group] * LOG2_E, total[i] = lane < 4 ? 1.0f : 0.0f;
    }
  }
#pragma unroll 1
  for (int turn = 0; warp + turn * WARPS < count; ++turn) {
    u16 *keys = s.keys[warp][turn % SLOTS], *values = s.values[warp][turn % SLOTS];
    int at = of.first + (warp + turn * WARPS) * KEYS;
    wait_group<2 * SLOTS - (IN_TURN ? 1 : 2)>();
    __syncwarp();
    of.put_newest(turn, keys, s.new_key, warp, lane);
    float scores[4] = {}, others[4] = {};  // sums in two parts, as each waits for its last step
#pragma unroll
    for (int step = 0; step < CHUNKS / 2; step += 2) {
      u32 r[4];
      load_matrices(r, keys + place_of(lane % 16, step * 2 + lane / 16));
      multiply(scores, r, q[step][0], q[step][1]);
      load_matrices(r, keys + place_of(lane % 16, step * 2 + 2 + lane / 16));
      multiply(others, r, q[step + 1][0], q[step + 1][1]);
    }
    if (IN_TURN) {
      __syncwarp();
      of.load(turn + SLOTS, keys, 0, warp, lane);
    }
    float most[2] = {highest[0], highest[1]}, shrink[2];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      int key = at + lane / 4 + k / 2 * 8;
      scores[k] = key >= of.begin && key < of.end ? (scores[k] + others[k]) * a.scale_log2 : -1.0f / 0.0f;
      most[k % 2] = fmaxf(most[k % 2], scores[k]);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) most[i] = fmaxf(most[i], __shfl_xor_sync(~0u, most[i], step));
      shrink[i] = power_of_2(highest[i] - most[i]);
      highest[i] = most[i];
      scores[i] = power_of_2(scores[i] - most[i]), scores[2 + i] = power_of_2(scores[2 + i] - most[i]);
      total[i] = total[i] * shrink[i] + scores[i] + scores[2 + i];
    }
    if (IN_TURN) {
      wait_group<1>();
      __syncwarp();
    }
    of.put_newest(turn, values, s.new_value, warp, lane);
    u32 low = transposed(pair_of(scores[0], scores[1])), high = transposed(pair_of(scores[2], scores[3]));
#pragma unroll
    for (int i = 0; i < N / 16; ++i) {
      u32 r[4];
      load_transposed(r, values + place_of(lane % 8 + lane / 16 * 8, i * 2 + lane / 8 % 2));
#pragma unroll
      for (int k = 0; k < 4; ++k) acc[i][k] *= shrink[k % 2];
      multiply(acc[i], r, low, high);
    }
    __syncwarp();
    if (!IN_TURN) of.load(turn + SLOTS, keys, 0, warp, lane);
    of.load(turn + SLOTS, values, of.kv_stride, warp, lane);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    int of_group = lane % 4 * 2 + i;
#pragma unroll
    for (int step = 4; step < 32; step *= 2) total[i] += __shfl_xor_sync(~0u, total[i], step);
    if (of_group < GROUP) {
#pragma unroll
      for (int k = 0; k < N / 8; ++k) s.sums_of(warp)[place_of_sum(of_group, k * 8 + lane / 4)] = acc[k / 2][k % 2 * 2 + i];
      if (lane < 4) s.highest[warp][of_group] = highest[i], s.totals[warp][of_group] = total[i];
    }
  }
  __syncthreads();
  cluster_wait();  // All programs have begun.
#pragma unroll
  for (int i = threadIdx.x; i < OUTS; i += THREADS) {
    int of_group = i / N, n = i % N;
    float most = s.highest[0][of_group], sum = 0.0f, weights = 0.0f;
#pragma unroll
    for (int w = 1; w < WARPS; ++w) most = fmaxf(most, s.highest[w][of_group]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      float shrink = power_of_2(s.highest[w][of_group] - most);
      sum += s.sums_of(w)[place_of_sum(of_group, n)] * shrink, weights += s.totals[w][of_group] * shrink;
    }
    send(&s.received[rank * part + i % part], i / part, make_float4(sum, most, weights, 0.0f), &s.arrived);
  }
  if ((int)threadIdx.x < own_part) {
    wait_for_bytes(&s.arrived);
    float4 parts[MOST_PROGRAMS];
    float most = LOWEST, sum = 0.0f, weights = 0.0f;
#pragma unroll
    for (int r = 0; r < MOST_PROGRAMS; ++r) {
      parts[r] = r < cluster ? s.received[r * part + threadIdx.x] : make_float4(0.0f, LOWEST, 0.0f, 0.0f);
      most = fmaxf(most, parts[r].y);
    }
#pragma unroll
    for (int r = 0; r < MOST_PROGRAMS; ++r) {
      float shrink = power_of_2(parts[r].y - most);
      sum += parts[r].x * shrink, weights += parts[r].z * shrink;
    }
    out[threadIdx.x] = narrow(sum / weights);
  }
}
