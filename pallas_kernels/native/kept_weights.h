// Weights kept in 4 or 8 bits, which become bfloat16 or float32 a few rows at a time before they are multiplied.
//
// A task widens the weight rows of its next step into its own memory, which stays in the cache, and multiplies them as
// any others: results are those with weights that were widened before, to the bit, and memory is read in fewer bytes.
//
// One row of activations meets the weights where they were widened, in registers, if the processor multiplies pairs.
//
// `Kept` says what is kept:
//   Move(weights, in)               passes so many weights
//   Widen(row, rows, in, to)        the weights of rows row .. row + rows - 1
//   Load(row, in, i, count, to)     inputs i .. i + 31 of `count` rows, a register of bfloat16 of each

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "float8.h"
#include "product.h"

namespace jaxsgl {
namespace {

constexpr int kBytesAheadOfRows = 1024;

inline void PrefetchKept(const void* p) {
  _mm_prefetch(static_cast<const char*>(p) + kBytesAheadOfRows, _MM_HINT_T0);
}

#ifdef __AVX512BF16__

// The first or the second half of a register of bfloat16 numbers.
inline Floats WidenHalf(Bits x, int half) {
  return Widen(half ? _mm512_extracti64x4_epi64(x, 1) : _mm512_castsi512_si256(x));
}

// kLanes numbers of 4 bits from half as many bytes, low bits first, each to a lane.
inline Bits SpreadHalves(const uint8_t* p) {
  const Bits x = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  return _mm512_and_si512(_mm512_or_si512(x, _mm512_slli_epi64(x, 28)), _mm512_set1_epi32(15));
}

// e2m1 numbers.
inline Floats Float4(Bits x) {
  return _mm512_permutexvar_ps(x, _mm512_setr_ps(0, .5, 1, 1.5, 2, 3, 4, 6, -0.f, -.5, -1, -1.5, -2, -3, -4, -6));
}

inline void StoreAs(Floats x, uint16_t* to) { StoreRounded(x, to); }

// 32 e2m1 numbers from 16 bytes, times 2^(scale - 127): one look into a table of the products.
inline Bits BlockOf(const uint8_t* from, int scale) {
  alignas(64) static const uint16_t numbers[32] = {
      0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
      0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, 0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
  const Bits plain = _mm512_load_si512(numbers);
  const Bits table = scale > 1 ? _mm512_mask_add_epi16(plain, 0xfefefefe, plain, _mm512_set1_epi16((scale - 127) << 7))
                               : _mm512_and_si512(plain, _mm512_set1_epi16(short(0x8000)));
  const Bits x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const Bits spread = _mm512_or_si512(x, _mm512_slli_epi32(x, 12));
  return _mm512_permutexvar_epi16(_mm512_and_si512(spread, _mm512_set1_epi16(15)), table);
}

inline void WidenBlock(const uint8_t* from, int scale, uint16_t* to) { StoreBits(to, BlockOf(from, scale)); }

// 32 float8 numbers times a scale, rounded once. Their bits moved up are those of half precision but for the exponent's
// bias, 256 in all, and NaN.
inline Bits ScaledLine(const Float8* from, float scale) {
  const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __mmask32 is_nan = _mm256_cmpeq_epi8_mask(_mm256_and_si256(x, _mm256_set1_epi8(127)), _mm256_set1_epi8(127));
  const Bits moved = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(x), 7), _mm512_set1_epi16(short(0xbf80)));
  const Floats by = _mm512_set1_ps(scale * 256);
  const Floats low = Times(_mm512_cvtph_ps(_mm512_castsi512_si256(moved)), by);
  const Floats high = Times(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(moved, 1)), by);
  return _mm512_mask_mov_epi16((Bits)_mm512_cvtne2ps_pbh(high, low), is_nan, _mm512_set1_epi16(kNan));
}

#else

inline Floats WidenHalf(Bits x, int half) {
  return Widen(half ? _mm256_extracti128_si256(x, 1) : _mm256_castsi256_si128(x));
}

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

inline void StoreAs(Floats x, uint16_t* to) {
  const Bits words = _mm256_srli_epi32(_mm256_castps_si256(Rounded(x)), 16);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                   _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

#endif

inline void StoreAs(Floats x, float* to) { Store(to, x); }

template <typename Number>
inline void WidenBlock(const uint8_t* from, int scale, Number* to) {
  const uint32_t bits = scale > 1 ? uint32_t(scale) << 23 : 0;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  for (int i = 0; i < 32; i += kLanes) StoreAs(Times(Float4(SpreadHalves(from + i / 2)), All(power)), to + i);
}

// float8 [out, in] with scales [out, groups]; one group's scale is left to the caller.
struct KeptFloat8 {
  const Float8* numbers;
  const float* scales;
  int64_t group, groups;

  void Move(int64_t weights, int64_t in) { numbers += weights, scales += weights / in * groups; }

#ifdef __AVX512BF16__
  // Inputs i .. i + 31 of `count` rows, as bfloat16.
  void Load(int64_t row, int64_t in, int64_t i, int count, Bits* to) const {
    const int64_t g = groups == 1 ? 0 : i / group;
    for (int r = 0; r < count; ++r) {
      const Float8* const from = numbers + (row + r) * in + i;
      if (i % 64 == 0) PrefetchKept(from + (count - 1) * in);
      to[r] = ScaledLine(from, groups == 1 ? 1.0f : scales[(row + r) * groups + g]);
    }
  }
#endif

  template <typename Number>
  void Widen(int64_t row, int64_t rows, int64_t in, Number* to) const {
    for (int64_t r = row; r < row + rows; ++r, to += in) {
      for (int64_t g = 0; g < groups; ++g) {
        const Floats scale = All(groups == 1 ? 1.0f : scales[r * groups + g]);
        const int64_t end = groups == 1 ? in : std::min(in, (g + 1) * group);
        for (int64_t i = g * group; i < end; i += 2 * kLanes) {
          const Float8* const from = numbers + r * in + i;
          PrefetchKept(from);
          const Bits bits = LoadBits(from);
          for (int half = 0; half < 2; ++half)
            StoreAs(Times(WidenHalf(bits, half), scale), to + i + half * kLanes);
        }
      }
    }
  }
};

// MXFP4 [out, in / 2], two numbers in a byte, with scales [out, in / 32]: s stands for 2^(s - 127), and for 0 if that or
// half of it were no normal number.
struct KeptMxfp4 {
  static constexpr int kBlock4 = 32;
  const uint8_t *numbers, *scales;

  void Move(int64_t weights, int64_t) { numbers += weights / 2, scales += weights / kBlock4; }

#ifdef __AVX512BF16__
  void Load(int64_t row, int64_t in, int64_t i, int count, Bits* to) const {
    for (int r = 0; r < count; ++r) {
      const uint8_t* const from = numbers + ((row + r) * in + i) / 2;
      if (i % 128 == 0) PrefetchKept(from + (count - 1) * in / 2);
      to[r] = BlockOf(from, scales[((row + r) * in + i) / kBlock4]);
    }
  }
#endif

  template <typename Number>
  void Widen(int64_t row, int64_t rows, int64_t in, Number* to) const {
    const uint8_t* from = numbers + row * in / 2;
    const uint8_t* scale = scales + row * in / kBlock4;
    for (const Number* const end = to + rows * in; to < end; to += kBlock4, from += kBlock4 / 2, ++scale) {
      PrefetchKept(from);
      WidenBlock(from, *scale, to);
    }
  }
};

#ifdef __AVX512BF16__

// Lines of kept weight rows, for MultiplyFewPairs.
template <typename Kept>
struct LinesOfKept {
  const Kept& kept;
  int64_t row, in;

  void Load(int64_t i, Bits block[kBlock]) const { kept.Load(row, in, i, kBlock, block); }
};

#endif

// Pieces of a grouped product (grouped_product.h) whose weights are kept.
template <typename Pieces, typename Kept>
struct OfKept {
  struct Product : Pieces::Product {
    Kept kept;
    void MoveToExpert(int64_t expert) { kept.Move(expert * this->out * this->in, this->in); }
  };
  struct Widened {  // a type of its own, for memory of its own
    std::remove_const_t<std::remove_pointer_t<decltype(Pieces::Product::weights)>> number;
  };
  static constexpr int64_t kRows = Pieces::kRows;

  static int64_t Most(const Product& p) { return Pieces::Most(p); }
  static int64_t PackedBytes(const Product& p, int64_t first) { return Pieces::PackedBytes(p, first); }
  static void PackRows(const Product& p, int64_t first, char* packed) {
    Pieces::PackRows(p, first, packed);
  }
  static void Multiply(const Product& p, int64_t first, int64_t begin, int64_t rows, char* packed) {
#ifdef __AVX512BF16__
    if constexpr (std::is_same_v<Pieces, jaxsgl::Pieces<uint16_t>>) {
      if (p.tokens == 1) {
        for (int64_t b = begin; b < begin + rows; b += kBlock)
          MultiplyFewPairs<1>(p, b, reinterpret_cast<const uint16_t*>(packed), LinesOfKept<Kept>{p.kept, b, p.in});
        return;
      }
    }
#endif
    auto* const widened = &Packed<Widened>(std::min(kRows, rows) * p.in)->number;
    for (const int64_t end = begin + rows; begin < end; begin += kRows) {
      const int64_t count = std::min(kRows, end - begin);
      p.kept.Widen(begin, count, p.in, widened);
      typename Pieces::Product plain = p;
      plain.weights = widened - begin * p.in;
      Pieces::Multiply(plain, first, begin, count, packed);
    }
  }
};

}  // namespace
}  // namespace jaxsgl
