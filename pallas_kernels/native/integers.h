// Dot products of 8 and 16 bit integers in registers, exact whatever the processor and the order.
//
// A register holds kPairs numbers of 16 bits, kFours of 8. Owns what differs between registers of 512 and of 256 bits
// here. JAXSGL_BYTES is defined where the processor multiplies numbers of 8 bits (AVX512-VNNI, AVX-VNNI): without those
// instructions sums of pairs of bytes are cut to 16 bits.

#pragma once

#include <cstdint>

#include "registers.h"

#ifdef __AVX512BF16__
#ifdef __AVX512VNNI__
#define JAXSGL_BYTES
#endif
#elif defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define JAXSGL_BYTES
#endif

namespace jaxsgl {

constexpr int kPairs = 2 * kLanes, kFours = 4 * kLanes;
using Sums = int __attribute__((vector_size(4 * kLanes)));  // of this type GCC doesn't copy them in loops

#ifdef __AVX512BF16__

// kPairs numbers of 8 bits.
inline Bits WidenBytes(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// sum + the products of pairs, two added up in each lane.
inline Sums PlusPairs(Sums sum, Bits a, Bits b) {
#ifdef __AVX512VNNI__
  return Sums(_mm512_dpwssd_epi32(Bits(sum), a, b));
#else
  return Sums(_mm512_add_epi32(Bits(sum), _mm512_madd_epi16(a, b)));
#endif
}

#ifdef JAXSGL_BYTES
// sum + the products of fours, four added up in each lane.
inline Sums PlusFours(Sums sum, Bits without_sign, Bits with_sign) {
  return Sums(_mm512_dpbusd_epi32(Bits(sum), without_sign, with_sign));
}
#endif

inline Bits AllBytes(int x) { return _mm512_set1_epi8(char(x)); }
inline Bits AllIntegers(int x) { return _mm512_set1_epi32(x); }
inline Bits DividedByPowerOfTwo(Bits x, int power) { return _mm512_srai_epi32(x, power); }
inline Bits AddIntegers(Bits a, Bits b) { return _mm512_add_epi32(a, b); }
inline Bits TimesIntegers(Bits a, Bits b) { return _mm512_mullo_epi32(a, b); }

// kLanes integers and as many numbers of 8 bits.
inline Bits PlusBytes(Bits x, const int8_t* p) {
  return AddIntegers(x, _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}

// The low and the high 4 bits of each byte, and every other byte as a number of 16 bits.
inline Bits LowHalves(Bits x) { return _mm512_and_si512(x, AllBytes(15)); }
inline Bits HighHalves(Bits x) { return LowHalves(_mm512_srli_epi16(x, 4)); }
inline Bits EvenBytes(Bits x) { return _mm512_and_si512(x, _mm512_set1_epi16(255)); }
inline Bits OddBytes(Bits x) { return _mm512_srli_epi16(x, 8); }

// Floats, rounded to integers, as numbers of 8 bits.
inline void StoreBytes(Floats x, int8_t* to) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}

inline Floats ToFloats(Bits x) { return _mm512_cvtepi32_ps(x); }
inline Floats Permuted(Floats x, Bits lanes) { return _mm512_permutexvar_ps(lanes, x); }

// Two registers of floats, rounded to integers, as numbers of 16 bits in their order.
inline void StoreIntegers(Floats low, Floats high, int16_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(low)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kLanes), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(high)));
}

// Lane i: the sum of all lanes of x[i].
[[gnu::always_inline]] inline Bits SumsOfLanes(const Bits x[kLanes]) {
  Bits two[8], four[4], eight[2];
  for (int i = 0; i < 8; ++i)
    two[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]),
                              _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
  for (int i = 0; i < 4; ++i)
    four[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(two[2 * i], two[2 * i + 1]),
                               _mm512_unpackhi_epi64(two[2 * i], two[2 * i + 1]));
  for (int i = 0; i < 2; ++i)
    eight[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(four[2 * i], four[2 * i + 1], 0x44),
                                _mm512_shuffle_i32x4(four[2 * i], four[2 * i + 1], 0xee));
  return _mm512_add_epi32(_mm512_shuffle_i32x4(eight[0], eight[1], 0x88),
                          _mm512_shuffle_i32x4(eight[0], eight[1], 0xdd));
}

#else

inline Bits WidenBytes(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline Sums PlusPairs(Sums sum, Bits a, Bits b) {
  return Sums(_mm256_add_epi32(Bits(sum), _mm256_madd_epi16(a, b)));
}

#ifdef JAXSGL_BYTES
inline Sums PlusFours(Sums sum, Bits without_sign, Bits with_sign) {
#ifdef __AVXVNNI__
  return Sums(_mm256_dpbusd_avx_epi32(Bits(sum), without_sign, with_sign));
#else
  return Sums(_mm256_dpbusd_epi32(Bits(sum), without_sign, with_sign));
#endif
}
#endif

inline Bits AllBytes(int x) { return _mm256_set1_epi8(char(x)); }
inline Bits AllIntegers(int x) { return _mm256_set1_epi32(x); }
inline Bits DividedByPowerOfTwo(Bits x, int power) { return _mm256_srai_epi32(x, power); }
inline Bits AddIntegers(Bits a, Bits b) { return _mm256_add_epi32(a, b); }
inline Bits TimesIntegers(Bits a, Bits b) { return _mm256_mullo_epi32(a, b); }
inline Bits PlusBytes(Bits x, const int8_t* p) {
  return AddIntegers(x, _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline Bits LowHalves(Bits x) { return _mm256_and_si256(x, AllBytes(15)); }
inline Bits HighHalves(Bits x) { return LowHalves(_mm256_srli_epi16(x, 4)); }
inline Bits EvenBytes(Bits x) { return _mm256_and_si256(x, _mm256_set1_epi16(255)); }
inline Bits OddBytes(Bits x) { return _mm256_srli_epi16(x, 8); }

inline void StoreBytes(Floats x, int8_t* to) {
  const Bits words = _mm256_permute4x64_epi64(_mm256_packs_epi32(_mm256_cvtps_epi32(x), Bits{}), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), __m128i{});
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), bytes);
}

inline Floats ToFloats(Bits x) { return _mm256_cvtepi32_ps(x); }
inline Floats Permuted(Floats x, Bits lanes) { return _mm256_permutevar8x32_ps(x, lanes); }

inline void StoreIntegers(Floats low, Floats high, int16_t* to) {
  const Bits packed = _mm256_packs_epi32(_mm256_cvtps_epi32(low), _mm256_cvtps_epi32(high));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(packed, 0xd8));
}

[[gnu::always_inline]] inline Bits SumsOfLanes(const Bits x[kLanes]) {
  Bits two[4], four[2];
  for (int i = 0; i < 4; ++i)
    two[i] = _mm256_add_epi32(_mm256_unpacklo_epi32(x[2 * i], x[2 * i + 1]),
                              _mm256_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
  for (int i = 0; i < 2; ++i)
    four[i] = _mm256_add_epi32(_mm256_unpacklo_epi64(two[2 * i], two[2 * i + 1]),
                               _mm256_unpackhi_epi64(two[2 * i], two[2 * i + 1]));
  return _mm256_add_epi32(_mm256_permute2x128_si256(four[0], four[1], 0x20),
                          _mm256_permute2x128_si256(four[0], four[1], 0x31));
}

#endif

}  // namespace jaxsgl
