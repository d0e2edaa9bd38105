// What the kernels are built of: products and transposes in registers, and work shared among XLA's threads.
//
// bfloat16 numbers are kept as uint16, their bits. There are two ways to multiply them; library.py chooses. "Paired": the
// instruction takes pairs from both sides and adds their two products up. "Widened", on processors whose float32
// instruction does more: both sides become float32 first. The type of what was rounded for a product, uint16 or float,
// tells the ways apart. Multiply's right side is packed [pairs, columns, 2] in both: a register has pairs of 16 columns.

#pragma once

#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <type_traits>

#include "xla/ffi/api/ffi.h"

namespace jaxsgl {

inline __m512i Load(const void* p) { return _mm512_loadu_si512(p); }

// 16 bfloat16 numbers as float32.
inline __m512 Widen(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

// 16 numbers, rounded to bfloat16, for a left side.
inline void StoreRounded(__m512 x, uint16_t* to) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(x));
}
inline void StoreRounded(__m512 x, float* to) { _mm512_storeu_ps(to, Widen((__m256i)_mm512_cvtneps_pbh(x))); }

// c [R, 16 * V] (+)= a [R, 2 * pairs] b [pairs, 16 * V, 2]; strides in elements of each array.
template <int R, int V>
void Multiply(const uint16_t* a, int a_stride, const uint16_t* b, int b_stride, int pairs, float* c, int c_stride,
              bool add) {
  __m512 sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = add ? _mm512_loadu_ps(c + r * c_stride + 16 * v) : _mm512_setzero_ps();
  for (int i = 0; i < pairs; ++i) {
    __m512bh right[V];
    for (int v = 0; v < V; ++v) right[v] = (__m512bh)Load(b + i * b_stride + 32 * v);
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, a + r * a_stride + 2 * i, 4);
      const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
      for (int v = 0; v < V; ++v) sum[r][v] = _mm512_dpbf16_ps(sum[r][v], left, right[v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(c + r * c_stride + 16 * v, sum[r][v]);
}

// The same, widened.
template <int R, int V>
void Multiply(const float* a, int a_stride, const uint16_t* b, int b_stride, int pairs, float* c, int c_stride,
              bool add) {
  const __m512i odd = _mm512_set1_epi32(0xffff0000);
  __m512 sum[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = add ? _mm512_loadu_ps(c + r * c_stride + 16 * v) : _mm512_setzero_ps();
  for (int i = 0; i < pairs; ++i) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      __m512 right[V];
      for (int v = 0; v < V; ++v) {
        const __m512i pair = Load(b + i * b_stride + 32 * v);
        right[v] = _mm512_castsi512_ps(half ? _mm512_and_si512(pair, odd) : _mm512_slli_epi32(pair, 16));
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const __m512 left = _mm512_set1_ps(a[r * a_stride + 2 * i + half]);
        for (int v = 0; v < V; ++v) sum[r][v] = _mm512_fmadd_ps(left, right[v], sum[r][v]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) _mm512_storeu_ps(c + r * c_stride + 16 * v, sum[r][v]);
}

template <int V, typename Left>
void MultiplyRows(int rows, const Left* a, int a_stride, const uint16_t* b, int b_stride, int pairs, float* c,
                  int c_stride, bool add) {
  int r = 0;
  for (; r + 6 <= rows; r += 6)
    Multiply<6, V>(a + r * a_stride, a_stride, b, b_stride, pairs, c + r * c_stride, c_stride, add);
  a += r * a_stride, c += r * c_stride;
  switch (rows - r) {
    case 1: return Multiply<1, V>(a, a_stride, b, b_stride, pairs, c, c_stride, add);
    case 2: return Multiply<2, V>(a, a_stride, b, b_stride, pairs, c, c_stride, add);
    case 3: return Multiply<3, V>(a, a_stride, b, b_stride, pairs, c, c_stride, add);
    case 4: return Multiply<4, V>(a, a_stride, b, b_stride, pairs, c, c_stride, add);
    case 5: return Multiply<5, V>(a, a_stride, b, b_stride, pairs, c, c_stride, add);
  }
}

// The transpose of 16 rows of 16 numbers of 32 bits.
inline void Transpose(__m512i x[16]) {
  __m512i y[16];
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

// Items 0 .. count - 1, each done once, by one of several threads.
class Items {
 public:
  explicit Items(int count) : count_(count) {}

  template <typename Work>
  void Run(const Work& work) {
    for (int i; (i = next_.fetch_add(1)) < count_;) {
      work(i);
      if (done_.fetch_add(1) + 1 == count_) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_all();
      }
    }
  }

  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return done_.load() >= count_; });
  }

 private:
  const int count_;
  std::atomic<int> next_{0}, done_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
};

// work(0) .. work(count - 1) on the pool's threads and the caller's. Waits for the items and not for the threads: one
// that the pool starts after this has returned finds nothing to do, and so never touches what `work` refers to.
template <typename Work>
void InParallel(xla::ffi::ThreadPool pool, int count, const Work& work) {
  const auto items = std::make_shared<Items>(count);
  const auto share = [items, work] { items->Run(work); };
  const int helpers = static_cast<int>(std::min<int64_t>(pool.num_threads(), count)) - 1;
  for (int i = 0; i < helpers; ++i) pool.Schedule(std::decay_t<decltype(share)>(share));
  share();
  items->Wait();
}

}  // namespace jaxsgl
