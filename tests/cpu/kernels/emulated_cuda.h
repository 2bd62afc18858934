// Runs the threads of a CUDA kernel in turn on a CPU, each until it waits for others: a test of a kernel's arithmetic,
// indexes and meetings. A kernel's file takes the functions at the end from here in place of a GPU's. The includer
// defines PROGRAMS_Y and PROGRAMS_Z of the grid, THREADS_X, SHARED_BYTES, and CLUSTER_SIZE, which is the grid's x.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#define EMULATED
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct dims { int x, y, z; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline float __uint_as_float(unsigned v) { float x; memcpy(&x, &v, 4); return x; }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }

static const int PROGRAMS = CLUSTER_SIZE * PROGRAMS_Y * PROGRAMS_Z, WARP = 32, WARP_COUNT = THREADS_X / WARP;
static dims threadIdx, blockIdx, gridDim = {CLUSTER_SIZE, PROGRAMS_Y, PROGRAMS_Z};
static ucontext_t scheduler, contexts[PROGRAMS][THREADS_X];
static bool has_ended[PROGRAMS][THREADS_X];
static unsigned char shared_memory[PROGRAMS][SHARED_BYTES] __attribute__((aligned(128)));
static long of_program[PROGRAMS], of_warp[PROGRAMS][WARP_COUNT], of_cluster[PROGRAMS];
static long awaited[PROGRAMS][THREADS_X];  // arrivals at the cluster's barrier that a thread waits for

static int program() { return (blockIdx.z * PROGRAMS_Y + blockIdx.y) * CLUSTER_SIZE + blockIdx.x; }
#define memory shared_memory[program()]

static void yield() {
  int thread = threadIdx.x;
  swapcontext(&contexts[program()][thread], &scheduler);
}
// Waits until `size` threads have come. Returns when the others may not have left yet.
static void meet(long* arrived, int size) {
  long target = (*arrived / size + 1) * size;
  ++*arrived;
  while (*arrived < target) yield();
}
static void __syncthreads() { meet(&of_program[program()], THREADS_X); }
static void __syncwarp() { meet(&of_warp[program()][threadIdx.x / WARP], WARP); }

// What each lane of a warp shows the others.
template <typename Value>
struct Shown {
  Value of[PROGRAMS][WARP_COUNT][WARP];
  Value* all() { return of[program()][threadIdx.x / WARP]; }
  Value* show(Value value) {
    all()[threadIdx.x % WARP] = value;
    __syncwarp();
    return all();
  }
};

static float __shfl_xor_sync(unsigned, float value, int lanes) {
  static Shown<float> shown;
  float other = shown.show(value)[threadIdx.x % WARP ^ lanes];
  __syncwarp();
  return other;
}

static int __shfl_sync(unsigned, int value, int lane) {
  static Shown<int> shown;
  int other = shown.show(value)[lane];
  __syncwarp();
  return other;
}

static void run_all(void (*thread_main)()) {
  const size_t stack = 64 << 10;
  char* stacks = (char*)malloc(stack * PROGRAMS * THREADS_X);
  memset(has_ended, 0, sizeof has_ended);
  memset(of_program, 0, sizeof of_program), memset(of_warp, 0, sizeof of_warp), memset(of_cluster, 0, sizeof of_cluster);
  memset(awaited, 0, sizeof awaited);
  memset(shared_memory, 0xff, sizeof shared_memory);  // NaN
  for (int p = 0; p < PROGRAMS; ++p)
    for (int t = 0; t < THREADS_X; ++t) {
      getcontext(&contexts[p][t]);
      contexts[p][t].uc_stack.ss_sp = stacks + stack * (p * THREADS_X + t);
      contexts[p][t].uc_stack.ss_size = stack;
      makecontext(&contexts[p][t], thread_main, 0);
    }
  for (bool some = true; some;) {
    some = false;
    for (int p = 0; p < PROGRAMS; ++p)
      for (int t = 0; t < THREADS_X; ++t)
        if (!has_ended[p][t]) {
          some = true, threadIdx = {t, 0, 0};
          blockIdx = {p % CLUSTER_SIZE, p / CLUSTER_SIZE % PROGRAMS_Y, p / CLUSTER_SIZE / PROGRAMS_Y};
          swapcontext(&scheduler, &contexts[p][t]);
        }
  }
  free(stacks);
}
static void end_thread() {
  has_ended[program()][threadIdx.x] = true;
  yield();
}

// From here on: in place of a GPU's instructions.

static unsigned short narrow(float x) {
  unsigned v;
  memcpy(&v, &x, 4);
  return (unsigned short)((v + 0x7fff + (v >> 16 & 1)) >> 16);
}
static float power_of_2(float x) { return exp2f(x); }
static float wide(unsigned short v) { return __uint_as_float((unsigned)v << 16); }
static unsigned short load_one(const unsigned short* p) { return *p; }
static int load_int(const int* p) { return *p; }

static void copy_async(void* to, const void* from, bool there) {
  if ((size_t)to % 16 || (there && (size_t)from % 16)) fprintf(stderr, "a copy is not aligned\n"), exit(3);
  there ? memcpy(to, from, 16) : memset(to, 0, 16);
}
static void end_group() {}
template <int LEFT>
static void wait_group() {}

static Shown<const unsigned short*> matrix_rows;
static void load_matrices(unsigned (&r)[4], const void* row) {
  int lane = threadIdx.x % WARP;
  const unsigned short** rows = matrix_rows.show((const unsigned short*)row);
  for (int i = 0; i < 4; ++i) memcpy(&r[i], rows[i * 8 + lane / 4] + lane % 4 * 2, 4);
  __syncwarp();
}
static void load_transposed(unsigned (&r)[4], const void* row) {
  int lane = threadIdx.x % WARP;
  const unsigned short** rows = matrix_rows.show((const unsigned short*)row);
  for (int i = 0; i < 4; ++i) {
    const unsigned short** pair = rows + i * 8 + lane % 4 * 2;
    r[i] = pair[0][lane / 4] | (unsigned)pair[1][lane / 4] << 16;
  }
  __syncwarp();
}
// The layouts of m16n8k16: a lane has rows lane / 4 + {0, 8} of a and c, and column lane / 4 of b.
static void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  struct Operands { unsigned a[4], b[2]; };
  static Shown<Operands> shown;
  int lane = threadIdx.x % WARP;
  Operands* all = shown.show({{a[0], a[1], a[2], a[3]}, {b0, b1}});
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 16; ++k) {
      unsigned left = all[lane / 4 * 4 + k % 8 / 2].a[k / 8 * 2 + i / 2];
      unsigned right = all[(lane % 4 * 2 + i % 2) * 4 + k % 8 / 2].b[k / 8];
      c[i] += wide((unsigned short)(left >> k % 2 * 16)) * wide((unsigned short)(right >> k % 2 * 16));
    }
  __syncwarp();
}
static unsigned transposed(unsigned pair) {
  static Shown<unsigned> shown;
  int lane = threadIdx.x % WARP, column = lane / 4;
  unsigned* all = shown.show(pair);
  unsigned low = all[lane % 4 * 8 + column / 2], high = all[lane % 4 * 8 + 4 + column / 2];
  __syncwarp();
  return (low >> column % 2 * 16 & 0xffff) | high >> column % 2 * 16 << 16;
}

// A barrier counts down to 0.
static void* remote(void* p, int rank) {
  int there = program() / CLUSTER_SIZE * CLUSTER_SIZE + rank;
  return shared_memory[there] + ((unsigned char*)p - memory);
}
static void send(float4* to, int rank, float4 v, unsigned long long* barrier) {
  *(float4*)remote(to, rank) = v;
  *(unsigned long long*)remote(barrier, rank) -= sizeof v;
}
static void expect(unsigned long long* barrier, int bytes) { *barrier = bytes; }
static void wait_for_bytes(volatile unsigned long long* barrier) {
  while (*barrier) yield();
}
static void cluster_begun() {
  long& arrived = of_cluster[program() / CLUSTER_SIZE];
  const long size = CLUSTER_SIZE * THREADS_X;
  awaited[program()][threadIdx.x] = (arrived / size + 1) * size;
  ++arrived;
}
static void cluster_wait() {
  while (of_cluster[program() / CLUSTER_SIZE] < awaited[program()][threadIdx.x]) yield();
}
static void start_next() {}
static void wait_for_previous() {}
