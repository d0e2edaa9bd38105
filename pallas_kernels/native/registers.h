// A processor's registers in the terms that the kernels use: kLanes numbers of 32 bits, or as many pairs of bfloat16.
//
// With AVX512_BF16 they have 512 bits; otherwise AVX2's have 256, and rounding to bfloat16 takes several instructions.
// Owns all that differs between the two, except for the instruction that multiplies pairs.

#pragma once

#include <immintrin.h>

#include <cstdint>

namespace jaxsgl {

constexpr int kLine = 32;  // numbers of 16 bits in a line of the cache

// Always inlined: GCC may take a call that only prefetches for one without effect, and drop it.
[[gnu::always_inline]] inline void Prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

#ifdef __AVX512BF16__

constexpr int kLanes = 16;
using Floats = __m512;
using Bits = __m512i;

inline Bits LoadBits(const void* p) { return _mm512_loadu_si512(p); }
inline void StoreBits(void* p, Bits x) { _mm512_store_si512(p, x); }  // at a multiple of a register
inline Floats AsFloats(Bits x) { return _mm512_castsi512_ps(x); }
inline Floats Load(const float* p) { return _mm512_loadu_ps(p); }
inline void Store(float* p, Floats x) { _mm512_storeu_ps(p, x); }
inline Floats All(float x) { return _mm512_set1_ps(x); }
inline Floats Zero() { return _mm512_setzero_ps(); }
inline Floats Add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats Subtract(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats Times(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats Over(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats Max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats TimesPlus(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }        // a * b + c
inline Floats MinusProduct(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }    // c - a * b
inline Floats Round(Floats x) { return _mm512_roundscale_ps(x, 0); }                              // to integers
inline Floats Absolute(Floats x) { return _mm512_abs_ps(x); }
inline float Largest(Floats x) { return _mm512_reduce_max_ps(x); }
inline float Sum(Floats x) { return _mm512_reduce_add_ps(x); }
inline float FirstLane(Floats x) { return _mm512_cvtss_f32(x); }

// x * 2^n where `by` is at least `least` or NaN, else 0.
inline Floats ScaledUnlessLess(Floats x, Floats n, Floats by, float least) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(by, _mm512_set1_ps(least), _CMP_NLT_UQ), x, n);
}

// a where a bit of `which` is set, lane 0 having the lowest, else b.
inline Floats Select(uint64_t which, Floats a, Floats b) { return _mm512_mask_mov_ps(b, __mmask16(which), a); }

// `size` with the sign of x.
inline Floats WithSign(Floats x, float size) {
  return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(x)), _mm512_set1_ps(size), _mm512_set1_ps(-size));
}

// a where x has the sign of negative numbers, else b.
inline Floats WhereNegative(Floats x, Floats a, Floats b) {
  return _mm512_mask_blend_ps(_mm512_movepi32_mask(_mm512_castps_si512(x)), b, a);
}

// kLanes bfloat16 numbers as float32.
inline Floats Widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

// One of each pair of bfloat16 numbers as float32.
inline Floats FirstOfPairs(Bits x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
inline Floats SecondOfPairs(Bits x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(0xffff0000))); }

// Rounds to bfloat16; the result stays float32, or becomes its bits.
inline void StoreRounded(Floats x, float* to) { _mm512_storeu_ps(to, Widen((__m256i)_mm512_cvtneps_pbh(x))); }
inline void StoreRounded(Floats x, uint16_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
}

// Two rows of 2 * kLanes numbers of 16 bits, as pairs of one number from each.
inline void StoreInterleaved(Bits a, Bits b, uint16_t* to) {
  const Bits low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
  const Bits even = _mm512_unpacklo_epi16(a, b), odd = _mm512_unpackhi_epi16(a, b);
  _mm512_store_si512(to, _mm512_permutex2var_epi64(even, low, odd));
  _mm512_store_si512(to + 32, _mm512_permutex2var_epi64(even, high, odd));
}

// The transpose of kLanes rows of kLanes numbers of 32 bits.
[[gnu::always_inline]] inline void Transpose(Bits x[kLanes]) {
  Bits y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    for (int half = 0; half < 2; ++half) {
      y[8 * half + i] = _mm512_shuffle_i32x4(x[8 * half + i], x[8 * half + i + 4], 0x88);
      y[8 * half + i + 4] = _mm512_shuffle_i32x4(x[8 * half + i], x[8 * half + i + 4], 0xdd);
    }
  }
  for (int i = 0; i < 8; ++i) {
    x[i] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0x88);
    x[i + 8] = _mm512_shuffle_i32x4(y[i], y[i + 8], 0xdd);
  }
}

#else

constexpr int kLanes = 8;
using Floats = __m256;
using Bits = __m256i;

inline Bits LoadBits(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline void StoreBits(void* p, Bits x) { _mm256_store_si256(static_cast<__m256i*>(p), x); }
inline Floats AsFloats(Bits x) { return _mm256_castsi256_ps(x); }
inline Floats Load(const float* p) { return _mm256_loadu_ps(p); }
inline void Store(float* p, Floats x) { _mm256_storeu_ps(p, x); }
inline Floats All(float x) { return _mm256_set1_ps(x); }
inline Floats Zero() { return _mm256_setzero_ps(); }
inline Floats Add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats Subtract(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats Times(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats Over(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats Max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
inline Floats TimesPlus(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats MinusProduct(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
inline Floats Round(Floats x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline Floats Absolute(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
inline float FirstLane(Floats x) { return _mm256_cvtss_f32(x); }

inline float Largest(Floats x) {
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
inline float Sum(Floats x) {
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}

inline Floats ScaledUnlessLess(Floats x, Floats n, Floats by, float least) {
  const Bits power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  const Floats scaled = _mm256_mul_ps(x, _mm256_castsi256_ps(power));
  return _mm256_and_ps(scaled, _mm256_cmp_ps(by, _mm256_set1_ps(least), _CMP_NLT_UQ));
}

inline Floats Select(uint64_t which, Floats a, Floats b) {
  const Bits bit_of_lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const Bits bits = _mm256_and_si256(_mm256_set1_epi32(int(which)), bit_of_lane);
  return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(bits, bit_of_lane)));
}

inline Floats WithSign(Floats x, float size) {
  return _mm256_or_ps(_mm256_and_ps(x, _mm256_set1_ps(-0.0f)), _mm256_set1_ps(size));
}

inline Floats WhereNegative(Floats x, Floats a, Floats b) { return _mm256_blendv_ps(b, a, x); }

inline Floats Widen(__m128i x) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16)); }
inline Bits AllBits(const void* p) { return _mm256_castps_si256(_mm256_broadcast_ss(static_cast<const float*>(p))); }
inline Floats FirstOfPairs(Bits x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
inline Floats SecondOfPairs(Bits x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff0000))); }

// Rounds to nearest, ties to even; NaN stays NaN.
inline Floats Rounded(Floats x) {
  const Bits bits = _mm256_castps_si256(x), lowest = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const Bits up = _mm256_add_epi32(bits, _mm256_add_epi32(lowest, _mm256_set1_epi32(0x7fff)));
  const Floats rounded = SecondOfPairs(up);
  return _mm256_blendv_ps(rounded, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
inline void StoreRounded(Floats x, float* to) { _mm256_storeu_ps(to, Rounded(x)); }

inline void StoreInterleaved(Bits a, Bits b, uint16_t* to) {
  const Bits even = _mm256_unpacklo_epi16(a, b), odd = _mm256_unpackhi_epi16(a, b);
  StoreBits(to, _mm256_permute2x128_si256(even, odd, 0x20));
  StoreBits(to + 16, _mm256_permute2x128_si256(even, odd, 0x31));
}

[[gnu::always_inline]] inline void Transpose(Bits x[kLanes]) {
  Bits y[8];
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    x[i] = _mm256_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm256_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm256_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm256_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    y[i] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x20);
    y[i + 4] = _mm256_permute2x128_si256(x[i], x[i + 4], 0x31);
  }
  for (int i = 0; i < 8; ++i) x[i] = y[i];
}

#endif

}  // namespace jaxsgl
