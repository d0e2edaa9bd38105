// The arguments of both ways to cut a product of rows and weights into blocks.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace jaxsgl {

// y = x weights^T.
struct Product {
  const float* x;           // [T, in]
  const uint16_t* weights;  // [out, in], bits of bfloat16
  float* y;                 // [T, out]
  int64_t tokens, in, out;  // `in` is a multiple of 32, `out` of 16
};

// Memory for `count` numbers at a multiple of 64 bytes, the calling thread's until its next call. It is kept, since
// fresh memory costs system time at each call.
template <typename Number>
Number* Packed(int64_t count) {
  struct alignas(64) Line {
    char bytes[64];
  };
  thread_local std::vector<Line> lines;
  const size_t needed = (count * sizeof(Number) + 63) / 64;
  if (lines.size() < needed) lines.resize(needed);
  return reinterpret_cast<Number*>(lines.data());
}

}  // namespace jaxsgl
