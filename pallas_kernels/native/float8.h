// float8_e4m3fn, read as the bits of bfloat16: an exponent and a mantissa of 4 and 3 bits fit into 8 and 7.
//
// Owns the conversion. The kernels load pages of either format by LoadBits and know nothing of the difference.

#pragma once

#include <cstdint>

#include "registers.h"

namespace jaxsgl {

enum class Float8 : uint8_t {};

inline void Prefetch(const Float8* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1); }

// A number's bits move up by 4, and the difference of the exponents' biases, 127 - 7, is added. That is wrong for the
// magnitudes 0 .. 7, which have no exponent (they count 512ths), and for 127, which is NaN.
constexpr short kMoved = short(0x87f0), kBias = 120 << 7, kNan = 0x7fc0;
#define JAXSGL_512THS 0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60

#ifdef __AVX512BF16__

inline Bits LoadBits(const Float8* p) {
  alignas(64) static const uint16_t special[32] = {JAXSGL_512THS, 0, 0, 0, 0, 0, 0, 0, 0,  // by the low 5 bits of x
                                                   0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, kNan};
  const Bits x = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const Bits moved = _mm512_and_si512(_mm512_slli_epi16(x, 4), _mm512_set1_epi16(kMoved));
  const Bits usual = _mm512_add_epi16(moved, _mm512_set1_epi16(kBias));
  // Magnitudes less 8, modulo 128: those of the table are the largest.
  const Bits order = _mm512_and_si512(_mm512_sub_epi16(x, _mm512_set1_epi16(8)), _mm512_set1_epi16(127));
  const __mmask32 is_special = _mm512_cmpge_epi16_mask(order, _mm512_set1_epi16(127 - 8));
  const Bits size = _mm512_mask_permutexvar_epi16(usual, is_special, x, _mm512_load_si512(special));
  return _mm512_ternarylogic_epi64(size, x, _mm512_set1_epi16(short(0x8000)), 0xf8);  // with the sign of x
}

#else

inline Bits LoadBits(const Float8* p) {
  const Bits x = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const Bits moved = _mm256_and_si256(_mm256_slli_epi16(x, 4), _mm256_set1_epi16(kMoved));
  const Bits usual = _mm256_add_epi16(moved, _mm256_set1_epi16(kBias));
  const Bits magnitude = _mm256_and_si256(x, _mm256_set1_epi16(127));
  const Bits table = _mm256_setr_epi16(JAXSGL_512THS, JAXSGL_512THS);
  const Bits bytes = _mm256_add_epi16(_mm256_mullo_epi16(magnitude, _mm256_set1_epi16(0x202)), _mm256_set1_epi16(0x100));
  const Bits sign = _mm256_and_si256(x, _mm256_set1_epi16(short(0x8000)));
  const Bits few = _mm256_or_si256(_mm256_shuffle_epi8(table, bytes), sign);
  const Bits number = _mm256_blendv_epi8(usual, few, _mm256_cmpgt_epi16(_mm256_set1_epi16(8), magnitude));
  const Bits is_nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(127));
  return _mm256_or_si256(number, _mm256_and_si256(is_nan, _mm256_set1_epi16(kNan)));
}

#endif

#undef JAXSGL_512THS

}  // namespace jaxsgl
