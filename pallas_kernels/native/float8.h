// float8_e4m3fn, read as the bits of bfloat16: an exponent and a mantissa of 4 and 3 bits fit into 8 and 7.
//
// Owns the conversion. The kernels load pages of either format by LoadBits and know nothing of the difference; with
// AVX512-VBMI those that take 64 numbers at a time look them up instead.

#pragma once

#include <cstdint>

#include "registers.h"

namespace jaxsgl {

enum class Float8 : uint8_t {};

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

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define JAXSGL_FLOAT8_TABLES

// The low and the high bytes of all 128 magnitudes as bfloat16: two looks for 64 numbers.
struct Float8Tables {
  struct Bytes {
    Bits low, high;

    // Of each 16 bytes the first 8, and the last 8, as numbers of 16 bits.
    Bits First() const { return _mm512_unpacklo_epi8(low, high); }
    Bits Last() const { return _mm512_unpackhi_epi8(low, high); }
  };

  Bits low[2], high[2];

  // `widened` makes bfloat16's bits of 32 codes.
  template <typename Widened>
  void Fill(const Widened& widened) {
    alignas(32) uint8_t codes[32];
    for (int half = 0; half < 2; ++half) {
      __m256i of_low[2], of_high[2];
      for (int quarter = 0; quarter < 2; ++quarter) {
        for (int i = 0; i < 32; ++i) codes[i] = uint8_t(64 * half + 32 * quarter + i);
        const Bits numbers = widened(codes);
        of_low[quarter] = _mm512_cvtepi16_epi8(numbers);
        of_high[quarter] = _mm512_cvtepi16_epi8(_mm512_srli_epi16(numbers, 8));
      }
      low[half] = _mm512_inserti64x4(_mm512_castsi256_si512(of_low[0]), of_low[1], 1);
      high[half] = _mm512_inserti64x4(_mm512_castsi256_si512(of_high[0]), of_high[1], 1);
    }
  }

  Bytes Open(Bits codes) const {
    const Bits size = _mm512_permutex2var_epi8(high[0], codes, high[1]);  // the look leaves the sign out
    return {_mm512_permutex2var_epi8(low[0], codes, low[1]),
            _mm512_ternarylogic_epi64(size, codes, _mm512_set1_epi8(char(0x80)), 0x78)};
  }
};

#endif

#undef JAXSGL_512THS

}  // namespace jaxsgl
