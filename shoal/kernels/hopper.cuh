// What kernels for Hopper in CUDA C++ share: types, barriers in shared memory, and matmuls of tensor cores with a left operand in
// registers. cuda_library.py gives it to the compiler.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void start_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void make_barrier(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred complete;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 complete, [%0], %1;\n@!complete bra again;\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ uint4 load_words(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ u32 load_scales(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ u32 pair_of(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ float widen(u16 v) { return __uint_as_float((u32)v << 16); }
__device__ __forceinline__ float rounded(float x) { return __uint_as_float(pair_of(0.0f, x)); }
// A matrix of 8 x 8, of which a lane has two numbers of row lane / 4, with rows and columns exchanged.
__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 v;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(v) : "r"(pair));
  return v;
}

// sums += a b by tensor cores: 64 weight rows, 16 inputs, 8 NT rows. b: where they lie in shared memory.
#define R(a, b, c, d) "%" #a ", %" #b ", %" #c ", %" #d
#define S(i) "+f"(s[i]), "+f"(s[i + 1]), "+f"(s[i + 2]), "+f"(s[i + 3])
#define R1 R(0, 1, 2, 3)
#define R2 R1 ", " R(4, 5, 6, 7)
#define R3 R2 ", " R(8, 9, 10, 11)
#define R4 R3 ", " R(12, 13, 14, 15)
#define R5 R4 ", " R(16, 17, 18, 19)
#define R6 R5 ", " R(20, 21, 22, 23)
#define R7 R6 ", " R(24, 25, 26, 27)
#define R8 R7 ", " R(28, 29, 30, 31)
#define R10 R8 ", " R(32, 33, 34, 35) ", " R(36, 37, 38, 39)
#define R12 R10 ", " R(40, 41, 42, 43) ", " R(44, 45, 46, 47)
#define R14 R12 ", " R(48, 49, 50, 51) ", " R(52, 53, 54, 55)
#define R16 R14 ", " R(56, 57, 58, 59) ", " R(60, 61, 62, 63)
#define R20 R16 ", " R(64, 65, 66, 67) ", " R(68, 69, 70, 71) ", " R(72, 73, 74, 75) ", " R(76, 77, 78, 79)
#define R24 R20 ", " R(80, 81, 82, 83) ", " R(84, 85, 86, 87) ", " R(88, 89, 90, 91) ", " R(92, 93, 94, 95)
#define R28 R24 ", " R(96, 97, 98, 99) ", " R(100, 101, 102, 103) ", " R(104, 105, 106, 107) ", " R(108, 109, 110, 111)
#define R32 R28 ", " R(112, 113, 114, 115) ", " R(116, 117, 118, 119) ", " R(120, 121, 122, 123) ", " R(124, 125, 126, 127)
#define S1 S(0)
#define S2 S1, S(4)
#define S3 S2, S(8)
#define S4 S3, S(12)
#define S5 S4, S(16)
#define S6 S5, S(20)
#define S7 S6, S(24)
#define S8 S7, S(28)
#define S10 S8, S(32), S(36)
#define S12 S10, S(40), S(44)
#define S14 S12, S(48), S(52)
#define S16 S14, S(56), S(60)
#define S20 S16, S(64), S(68), S(72), S(76)
#define S24 S20, S(80), S(84), S(88), S(92)
#define S28 S24, S(96), S(100), S(104), S(108)
#define S32 S28, S(112), S(116), S(120), S(124)
#define MULTIPLY(T, N, A, B)                                                                                       \
  if constexpr (NT == T)                                                                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" R##T "}, {" A "}, %" #B ", 1, 1, 1, 0;" \
                 : S##T                                                                                            \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
template <int NT>
__device__ __forceinline__ void multiply(float (&s)[4 * NT], const u32 (&a)[4], u64 b) {
  MULTIPLY(1, 8, R(4, 5, 6, 7), 8)
  MULTIPLY(2, 16, R(8, 9, 10, 11), 12)
  MULTIPLY(3, 24, R(12, 13, 14, 15), 16)
  MULTIPLY(4, 32, R(16, 17, 18, 19), 20)
  MULTIPLY(5, 40, R(20, 21, 22, 23), 24)
  MULTIPLY(6, 48, R(24, 25, 26, 27), 28)
  MULTIPLY(7, 56, R(28, 29, 30, 31), 32)
  MULTIPLY(8, 64, R(32, 33, 34, 35), 36)
  MULTIPLY(10, 80, R(40, 41, 42, 43), 44)
  MULTIPLY(12, 96, R(48, 49, 50, 51), 52)
  MULTIPLY(14, 112, R(56, 57, 58, 59), 60)
  MULTIPLY(16, 128, R(64, 65, 66, 67), 68)
  MULTIPLY(20, 160, R(80, 81, 82, 83), 84)
  MULTIPLY(24, 192, R(96, 97, 98, 99), 100)
  MULTIPLY(28, 224, R(112, 113, 114, 115), 116)
  MULTIPLY(32, 256, R(128, 129, 130, 131), 132)
}
// Matmuls before this are not moved behind it, nor others' numbers before it.
template <int N>
__device__ __forceinline__ void keep(float (&s)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(s[i])::"memory");
}
__device__ __forceinline__ void begin_matmuls() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_matmuls() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most `LEFT` groups of matmuls are under way.
template <int LEFT>
__device__ __forceinline__ void wait_for_matmuls() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}
