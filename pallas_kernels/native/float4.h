// Numbers of 4 bits (e2m1) in registers.

#pragma once

#include <cstdint>
#include <cstring>

#include "registers.h"

namespace jaxsgl {

#ifdef __AVX512BF16__

// kLanes numbers of 4 bits from half as many bytes, low bits first, each to a lane.
inline Bits SpreadHalves(const uint8_t* p) {
  const Bits x = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi64(x, 28)), _mm512_set1_epi32(15));
}

// e2m1 numbers.
inline Floats Float4(Bits x) {
  return _mm512_permutexvar_ps(x, _mm512_setr_ps(0, .5, 1, 1.5, 2, 3, 4, 6, -0.f, -.5, -1, -1.5, -2, -3, -4, -6));
}

// Their bits as bfloat16, twice.
inline Bits Float4Table() {
  alignas(64) static const uint16_t numbers[32] = {
      0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
      0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
  return _mm512_load_si512(numbers);
}

#else

inline Bits SpreadHalves(const uint8_t* p) {
  int four;
  std::memcpy(&four, p, sizeof(four));
  const Bits x = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
  return _mm256_and_si256(_mm256_or_si256(x, _mm256_slli_epi64(x, 28)), _mm256_set1_epi32(15));
}

inline Floats Float4(Bits x) {
  const Floats size = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, .5, 1, 1.5, 2, 3, 4, 6), x);
  return _mm256_or_ps(size, _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x, 28)), _mm256_set1_ps(-0.0f)));
}

#endif

}  // namespace jaxsgl
