// Sums of rows, their logarithms, or sums of squares, each in an order that depends on the row's length alone; and their
// largest numbers.
//
// XLA's own reductions add in another order for few rows than for many, what it fuses with a maximum it may compute
// with other instructions, and so it does with the logarithms of a few numbers. A row is summed in kSums registers, which are added up at its end. Compiled and called by
// library.py and sums.py.

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <string_view>

#include "blocks.h"

namespace ffi = xla::ffi;

namespace jaxsgl {
namespace {

constexpr int kSums = 4;                 // an addition takes as many cycles
constexpr int64_t kMostAlone = 1 << 15;  // numbers that are summed before another thread has woken up

template <bool squares>
float RowSum(const float* x, int64_t n) {
  Floats sum[kSums];
  for (int s = 0; s < kSums; ++s) sum[s] = Zero();
  const auto add = [&](Floats to, const float* from) {
    const Floats numbers = Load(from);
    return squares ? TimesPlus(numbers, numbers, to) : Add(to, numbers);
  };
  int64_t i = 0;
  for (; i + kSums * kLanes <= n; i += kSums * kLanes)
    for (int s = 0; s < kSums; ++s) sum[s] = add(sum[s], x + i + s * kLanes);
  for (; i + kLanes <= n; i += kLanes) sum[0] = add(sum[0], x + i);
  float rest = 0;
  for (; i < n; ++i) rest += squares ? x[i] * x[i] : x[i];
  return Sum(Add(Add(sum[0], sum[1]), Add(sum[2], sum[3]))) + rest;
}

float LogOfRowSum(const float* x, int64_t n) { return std::log(RowSum<false>(x, n)); }

// A row's largest number that is one; of none, minus infinity.
float RowTop(const float* x, int64_t n) {
  Floats tops[kSums];
  for (int s = 0; s < kSums; ++s) tops[s] = All(-std::numeric_limits<float>::infinity());
  int64_t i = 0;
  for (; i + kSums * kLanes <= n; i += kSums * kLanes)
    for (int s = 0; s < kSums; ++s) tops[s] = Max(Load(x + i + s * kLanes), tops[s]);
  float top = Largest(Max(Max(tops[0], tops[1]), Max(tops[2], tops[3])));
  for (; i < n; ++i) top = x[i] > top ? x[i] : top;
  return top;
}

// y [..]: of x [.., n], in `what` way.
ffi::Error RowSums(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, std::string_view what,
                   ffi::ResultBuffer<ffi::F32> y) {
  const auto of_row = what == "sum"       ? RowSum<false>
                      : what == "squares" ? RowSum<true>
                      : what == "log"     ? LogOfRowSum
                      : what == "top"     ? RowTop
                                          : nullptr;
  if (!of_row) return {ffi::ErrorCode::kInvalidArgument, "rows have no " + std::string(what)};
  const float* const from = x.typed_data();
  float* const to = y->typed_data();
  const int64_t rows = y->element_count(), n = x.dimensions().back();
  const int64_t share = std::max<int64_t>(1, kMostAlone / std::max<int64_t>(1, n));  // rows
  const auto work = [=](int i) {
    for (int64_t row = i * share; row < std::min((i + 1) * share, rows); ++row)
      to[row] = of_row(from + row * n, n);
  };
  if (rows <= share) {
    if (rows > 0) work(0);
  } else {
    InParallel(pool, int((rows + share - 1) / share), work);
  }
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxsgl

XLA_FFI_DEFINE_HANDLER_SYMBOL(row_sums, jaxsgl::RowSums,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Attr<std::string_view>("what")
                                  .Ret<ffi::Buffer<ffi::F32>>());
