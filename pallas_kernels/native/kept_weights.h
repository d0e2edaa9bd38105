// Weights kept in 4 or 8 bits, which become bfloat16 or float32 a few rows at a time before they are multiplied.
//
// A task widens the weight rows of its next step into its own memory, which stays in the cache, and multiplies them as
// any others: results are those with weights that were widened before, to the bit, and memory is read in fewer bytes.
//
// Few rows of activations meet the weights where they were widened, in registers (few_kept.h), if the processor can.
//
// `Kept` says what is kept:
//   Move(weights, in)               passes so many weights
//   Widen(row, rows, in, to)        the weights of rows row .. row + rows - 1
//   HasFew(row, rows)               whether `FewFrom` brings the weights of these rows
//   FewFrom(blocks, in)             brings those of blocks of rows (few_kept.h)

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "few_kept.h"
#include "float4.h"
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

inline void StoreAs(Floats x, uint16_t* to) { StoreRounded(x, to); }

// 32 e2m1 numbers from 16 bytes, times 2^(scale - 127): one look into a table of the products.
inline void WidenBlock(const uint8_t* from, int scale, uint16_t* to) {
  const Bits plain = Float4Table();
  const Bits table = scale > 1 ? _mm512_mask_add_epi16(plain, 0xfefefefe, plain, _mm512_set1_epi16((scale - 127) * 128))
                               : _mm512_and_si512(plain, _mm512_set1_epi16(short(0x8000)));
  const Bits x = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  const Bits spread = _mm512_or_si512(x, _mm512_slli_epi32(x, 12));
  StoreBits(to, _mm512_permutexvar_epi16(_mm512_and_si512(spread, _mm512_set1_epi16(15)), table));
}

#else

inline Floats WidenHalf(Bits x, int half) {
  return Widen(half ? _mm256_extracti128_si256(x, 1) : _mm256_castsi256_si128(x));
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

#ifdef JAXSGL_FEW_KEPT
  // If they have the same scales, as those of a block that is published.
  bool HasFew(int64_t row, int64_t rows) const {
    const float* const first = scales + row * groups;
    for (int64_t r = 1; groups > 1 && r < rows; ++r)
      if (std::memcmp(first, first + r * groups, groups * sizeof(float))) return false;
    return true;
  }
  template <int N>
  FewFloat8<N> FewFrom(BlocksOfRows<N> blocks, int64_t in) const {
    const float* const of_rows = groups == 1 ? nullptr : scales + blocks.row[0] * groups;
    return {blocks, reinterpret_cast<const char*>(numbers), in, of_rows, group};
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

#ifdef JAXSGL_FEW_KEPT
  bool HasFew(int64_t, int64_t) const { return true; }
  template <int N>
  FewMxfp4<N> FewFrom(BlocksOfRows<N> blocks, int64_t in) const {
    const auto text = [](const uint8_t* bytes) { return reinterpret_cast<const char*>(bytes); };
    return {blocks, text(numbers), text(scales), in / 2, in / kBlock4};
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

// Either of them: what surrounds their products is compiled once.
struct KeptWeights {
  bool is_float8;
  KeptFloat8 float8;
  KeptMxfp4 mxfp4;

  void Move(int64_t weights, int64_t in) { is_float8 ? float8.Move(weights, in) : mxfp4.Move(weights, in); }

  template <typename Work>
  void With(const Work& work) const {
    is_float8 ? work(float8) : work(mxfp4);
  }
};

// Pieces of a grouped product (grouped_product.h) whose weights are kept.
template <typename Pieces>
struct OfKept {
  struct Product : Pieces::Product {
    KeptWeights kept;
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
#ifdef JAXSGL_FEW_KEPT
    if constexpr (std::is_same_v<Pieces, jaxsgl::Pieces<uint16_t>>)
      if (p.tokens <= kFewPairs)
        return p.kept.With([&](const auto& kept) { MultiplyFew(p, begin, rows, packed, kept); });
#endif
    p.kept.With([&](const auto& kept) { MultiplyWidened(p, first, begin, rows, packed, kept); });
  }

 private:
  template <typename Kept>
  static void MultiplyWidened(const Product& p, int64_t first, int64_t begin, int64_t rows, char* packed,
                              const Kept& kept) {
    auto* const widened = &Packed<Widened>(std::min(kRows, rows) * p.in)->number;
    for (const int64_t end = begin + rows; begin < end; begin += kRows) {
      const int64_t count = std::min(kRows, end - begin);
      kept.Widen(begin, count, p.in, widened);
      typename Pieces::Product plain = p;
      plain.weights = widened - begin * p.in;
      Pieces::Multiply(plain, first, begin, count, packed);
    }
  }

#ifdef JAXSGL_FEW_KEPT
  template <typename Kept>
  static void MultiplyFew(const Product& p, int64_t begin, int64_t rows, char* packed, const Kept& kept) {
    for (int64_t end = begin + rows, next; begin < end; begin = next) {
      next = std::min(end, (begin / kFewRows + 1) * kFewRows);
      if (kept.HasFew(begin, next - begin))
        MultiplyFewKept(p, begin, next - begin, reinterpret_cast<const uint16_t*>(packed), kept);
      else
        MultiplyWidened(p, 0, begin, next - begin, packed, kept);
    }
  }
#endif
};

}  // namespace
}  // namespace jaxsgl
