// Loops of one multiplying instruction each, compiled by bench/figures/instructions.py as the kernels are.

#include <immintrin.h>
#include <time.h>

extern "C" {

#ifdef __AVX512F__
typedef __m512i Register;
#else
typedef __m256i Register;
#endif

enum { kChains = 12 };  // more than an instruction's time over its rate; with both factors they fit 16 registers

static double cpu_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

// NAME(rounds): seconds of `rounds` times kChains instructions. NAME_in_a_row: the same number, each waits for the last.
#define MEASURED(NAME, TEXT)                                                                       \
  double NAME(long rounds) {                                                                       \
    Register sum[kChains] = {{0}}, left = {0}, right = {0};                                        \
    const double begin_s = cpu_s();                                                                \
    for (long i = 0; i < rounds; ++i) {                                                            \
      _Pragma("GCC unroll 12") for (int k = 0; k < kChains; ++k)                                   \
          __asm__ volatile(TEXT " %1, %2, %0" : "+v"(sum[k]) : "v"(left), "v"(right));             \
    }                                                                                              \
    return cpu_s() - begin_s;                                                                      \
  }                                                                                                \
  double NAME##_in_a_row(long rounds) {                                                            \
    Register sum = {0}, left = {0}, right = {0};                                                   \
    const double begin_s = cpu_s();                                                                \
    for (long i = 0; i < rounds; ++i) {                                                            \
      _Pragma("GCC unroll 12") for (int k = 0; k < kChains; ++k)                                   \
          __asm__ volatile(TEXT " %1, %2, %0" : "+v"(sum) : "v"(left), "v"(right));                \
    }                                                                                              \
    return cpu_s() - begin_s;                                                                      \
  }

int register_bytes(void) { return sizeof(Register); }
MEASURED(vfmadd231ps, "vfmadd231ps")
#ifdef __AVX512BF16__
MEASURED(vdpbf16ps, "vdpbf16ps")
#endif
#ifdef __AVX512VNNI__
MEASURED(vpdpbusd, "vpdpbusd")
MEASURED(vpdpwssd, "vpdpwssd")
#elif defined(__AVXVNNI__)
MEASURED(vpdpbusd, "{vex} vpdpbusd")
MEASURED(vpdpwssd, "{vex} vpdpwssd")
#endif
}
