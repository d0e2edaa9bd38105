// Rows of activations times a matrix of int8 weights stored [out, in], with scales [out, groups of inputs], or of packed
// weights (product_packed.h).
//
// Each block of inputs of a row becomes integers: of 16 bits, so that a row is rounded less than to bfloat16, or, for
// packed weights, of 8, which the processor multiplies several times as fast. Products with a block, of 512 inputs at
// most, are summed in 32 bits without rounding: 512 * 128 * 32767 < 2^31. So they are the same in any order, and a row's
// result depends neither on the rows beside it nor on the processor. The blocks' sums, times their scales, are added up
// in float32 from the first block to the last.
// Compiled and called by library.py, product.py and packed_product.py beside it.

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string_view>

#include "blocks.h"
#include "grouped_product.h"
#include "packed_tiles.h"
#include "product_dots.h"
#include "product_packed.h"

namespace ffi = xla::ffi;

namespace jaxsgl {
namespace {

ffi::Error MultiplyInt8(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S8> weights,
                        ffi::Buffer<ffi::F32> scales, std::string_view activation, int64_t group,
                        ffi::ResultBuffer<ffi::F32> y) {
  const int64_t groups = scales.dimensions()[1];
  Int8Product p{{x.typed_data(), weights.typed_data(), y->typed_data(), x.dimensions()[0], x.dimensions()[1],
                 y->dimensions()[1]},
                scales.typed_data(),
                groups,
                groups == 1 ? kMostInputs : group};
  const std::optional<Activation> gate = GateOf(activation, weights.dimensions()[0], p.out);
  if (!gate) return NoSuchGate();
  p.gate = *gate;
  if ((groups > 1 && (group > kMostInputs || group % 32)) || p.in % 32 || p.out % 16)
    return {ffi::ErrorCode::kInvalidArgument, "groups have 32 to 512 inputs, weights multiples of 32 by 16"};
  MultiplyAll<PiecesOfTiles>(pool, p);
  return ffi::Error::Success();
}

// As GroupedProduct of product.cc, with int8 weights [E, out, in].
ffi::Error GroupedInt8Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> tokens,
                              ffi::Buffer<ffi::S32> sizes, ffi::Buffer<ffi::S8> weights, bool of_tokens,
                              ffi::ResultBuffer<ffi::F32> y) {
  const Grouped g{x.typed_data(), of_tokens ? tokens.typed_data() : nullptr, sizes.typed_data(), y->typed_data(),
                  sizes.dimensions()[0], y->dimensions()[0], weights.dimensions()[2], weights.dimensions()[1]};
  if (!SizesFit(g)) return {ffi::ErrorCode::kInvalidArgument, "the experts' sizes exceed the places"};
  if (g.in % 32 || g.out % 16) return {ffi::ErrorCode::kInvalidArgument, "weights have multiples of 16 by 32"};
  const Int8Product first{WithFirstExpert(g, weights.typed_data()), nullptr, 1, kMostInputs};
  MultiplyGroups<OfExperts<PiecesOfTiles>>(pool, g, first);
  return ffi::Error::Success();
}

// Calls `work` with the pieces that multiply rows as integers of so many bits with packed weights.
template <typename Work>
ffi::Error WithBitsOfPacked(int64_t weight_bits, int64_t row_bits, const Work& work) {
#ifdef JAXSGL_TILES_OF_BYTES
  if (tiles_are_granted && weight_bits == 8 && row_bits == 8)
    return work(PiecesByTiles<EightBits>()), ffi::Error::Success();
  if (tiles_are_granted && weight_bits == 4 && row_bits == 8)
    return work(PiecesByTiles<FourBits>()), ffi::Error::Success();
#endif
#ifdef JAXSGL_BYTES
  if (weight_bits == 8 && row_bits == 8) return work(PiecesOfPacked<EightBits, FourBytes>()), ffi::Error::Success();
  if (weight_bits == 4 && row_bits == 8) return work(PiecesOfPacked<FourBits, FourBytes>()), ffi::Error::Success();
#endif
  if (weight_bits == 4 && row_bits == 16) return work(PiecesOfPacked<FourBits, FourWords>()), ffi::Error::Success();
  return {ffi::ErrorCode::kInvalidArgument,
          "rows become integers of 8 bits, if these kernels were compiled for products of bytes, or for int4 of 16"};
}

// x [T, in] times the weights that stand at each place's expert, of `weight_bits` [E, out / 32, in * 4 * weight_bits]
// with scales and, of the same shape or empty, zeros [E, out / 32, 32 * groups]: see product_packed.h. Places, tokens and
// sizes as in GroupedProduct.
ffi::Error GroupedPackedProduct(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::S32> tokens,
                                ffi::Buffer<ffi::S32> sizes, ffi::Buffer<ffi::U8> weights, ffi::Buffer<ffi::F32> scales,
                                ffi::Buffer<ffi::S8> zeros, std::string_view activation, bool of_tokens, int64_t group,
                                int64_t row_bits, int64_t weight_bits, ffi::ResultBuffer<ffi::F32> y) {
  const int64_t groups = scales.dimensions()[2] / kSide;
  const Grouped g{x.typed_data(), of_tokens ? tokens.typed_data() : nullptr, sizes.typed_data(), y->typed_data(),
                  sizes.dimensions()[0], y->dimensions()[0], x.dimensions()[1], y->dimensions()[1]};
  if (!SizesFit(g)) return {ffi::ErrorCode::kInvalidArgument, "the experts' sizes exceed the places"};
  if ((groups > 1 && (group > kMostInputs || group % 32)) || g.in % 32 || g.out % kSide)
    return {ffi::ErrorCode::kInvalidArgument, "groups have 32 to 512 inputs, weights multiples of 32 by 32"};
  if (weights.dimensions()[2] != g.in * kSide * weight_bits / 8)
    return {ffi::ErrorCode::kInvalidArgument, "rows have as many inputs as weights"};
  const bool is_one = g.experts == 1 && !g.tokens && g.sizes[0] == g.places;
  const std::optional<Activation> gate = GateOf(activation, weights.dimensions()[1] * kSide, g.out);
  if (!gate) return NoSuchGate();
  if (*gate != Activation::kNone && !is_one)
    return {ffi::ErrorCode::kInvalidArgument, "a gated product has one matrix for all rows"};
  const int8_t* const given = zeros.element_count() ? zeros.typed_data() : nullptr;
  return WithBitsOfPacked(weight_bits, row_bits, [&](auto pieces) {
    using Of = decltype(pieces);
    const PackedProduct first{WithFirstExpert(g, weights.typed_data()), scales.typed_data(), given, groups,
                              groups == 1 ? Of::kInputs : group, Of::kBits};
    if (!is_one) return MultiplyGroups<OfExperts<Of>>(pool, g, first);
    PackedProduct all = first;
    all.x = g.x, all.y = g.y, all.tokens = g.places, all.gate = *gate;
    MultiplyAll<Of>(pool, all);
  });
}

}  // namespace
}  // namespace jaxsgl

#ifdef JAXSGL_BYTES
extern "C" int multiplies_bytes() { return 1; }
#else
extern "C" int multiplies_bytes() { return 0; }
#endif

XLA_FFI_DEFINE_HANDLER_SYMBOL(int8_product, jaxsgl::MultiplyInt8,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<std::string_view>("activation")
                                  .Attr<int64_t>("group")
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_int8_product, jaxsgl::GroupedInt8Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Attr<bool>("of_tokens")
                                  .Ret<ffi::Buffer<ffi::F32>>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(grouped_packed_product, jaxsgl::GroupedPackedProduct,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::U8>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Attr<std::string_view>("activation")
                                  .Attr<bool>("of_tokens")
                                  .Attr<int64_t>("group")
                                  .Attr<int64_t>("row_bits")
                                  .Attr<int64_t>("weight_bits")
                                  .Ret<ffi::Buffer<ffi::F32>>());
