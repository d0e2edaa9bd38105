// The building blocks of the kernels: products of small matrices, and work shared among XLA's threads.
//
// bfloat16 numbers are kept as uint16, their bits. There are two ways to multiply them; library.py chooses. "Paired":
// the instruction takes pairs from both sides and adds their two products up. "Widened", on processors without it, or
// whose float32 instruction does more: both sides become float32 first. The type of numbers rounded for a product,
// uint16 or float, tells the two apart. Multiply's right side is packed [pairs, columns, 2] in both: a register has
// pairs of kLanes columns.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <type_traits>

#include "registers.h"
#include "xla/ffi/api/ffi.h"

namespace jaxsgl {

#ifdef __AVX512BF16__
constexpr bool kHasPairs = true;
#else
constexpr bool kHasPairs = false;
#endif

inline xla::ffi::Error NoSuchGate() {
  return {xla::ffi::ErrorCode::kInvalidArgument,
          "a gated product has twice as many weight rows as results, and a known activation"};
}

// c [R, kLanes * V] (+)= a [R, 2 * pairs] b [pairs, kLanes * V, 2], widened; strides in elements of each array.
template <int R, int V>
void Multiply(const float* a, int a_stride, const uint16_t* b, int b_stride, int pairs, float* c, int c_stride,
              bool add) {
  Floats sum[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = add ? Load(c + r * c_stride + kLanes * v) : Zero();
  for (int i = 0; i < pairs; ++i) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      Floats right[V];
      for (int v = 0; v < V; ++v) {
        const Bits pair = LoadBits(b + i * b_stride + 2 * kLanes * v);
        right[v] = half ? SecondOfPairs(pair) : FirstOfPairs(pair);
      }
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        const Floats left = All(a[r * a_stride + 2 * i + half]);
        for (int v = 0; v < V; ++v) sum[r][v] = TimesPlus(left, right[v], sum[r][v]);
      }
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) Store(c + r * c_stride + kLanes * v, sum[r][v]);
}

#ifdef __AVX512BF16__
// The same, paired.
template <int R, int V>
void Multiply(const uint16_t* a, int a_stride, const uint16_t* b, int b_stride, int pairs, float* c, int c_stride,
              bool add) {
  __m512 sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = add ? _mm512_loadu_ps(c + r * c_stride + 16 * v) : _mm512_setzero_ps();
  for (int i = 0; i < pairs; ++i) {
    __m512bh right[V];
    for (int v = 0; v < V; ++v) right[v] = (__m512bh)LoadBits(b + i * b_stride + 32 * v);
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
#endif

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

// c [rows, columns] (+)= a [rows, 2 * pairs] b [pairs, columns, 2]; `columns` is a multiple of 32.
template <typename Left>
void MultiplyTile(int rows, int columns, const Left* a, int a_stride, const uint16_t* b, int b_stride, int pairs,
                  float* c, int c_stride, bool add) {
  constexpr int wide = 4 * kLanes, narrow = 2 * kLanes;
  int column = 0;
  if (kLanes == 16 || rows <= 3)  // 6 rows of 4 registers need more than AVX2 has; few of 2 would wait for each other
    for (; column + wide <= columns; column += wide)
      MultiplyRows<4>(rows, a, a_stride, b + 2 * column, b_stride, pairs, c + column, c_stride, add);
  for (; column < columns; column += narrow)
    MultiplyRows<2>(rows, a, a_stride, b + 2 * column, b_stride, pairs, c + column, c_stride, add);
}

constexpr int kLooks = 2000;  // some 30 us on AMD's processors, 100 on Intel's

// Items 0 .. count - 1, each done once, by one of several threads.
class Items {
 public:
  explicit Items(int count) : count_(count) {}

  void Run(const std::function<void(int)>& work) {
    for (int i; (i = next_.fetch_add(1)) < count_;) {
      work(i);
      if (done_.fetch_add(1) + 1 == count_) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_all();
      }
    }
  }

  // Looks for a while before it sleeps: being woken takes tens of microseconds, the last item often less.
  void Wait() {
    for (int i = 0; i < kLooks && done_.load() < count_; ++i) _mm_pause();
    if (done_.load() >= count_) return;
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return done_.load() >= count_; });
  }

 private:
  const int count_;
  std::atomic<int> next_{0}, done_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
};

// work(0) .. work(count - 1) on the pool's threads and the caller's. Waits for the items, not for the threads: a thread
// that the pool starts after this has returned finds nothing to do, and so never touches what `work` refers to.
inline void InParallel(xla::ffi::ThreadPool pool, int count, const std::function<void(int)>& work) {
  const auto items = std::make_shared<Items>(count);
  const auto share = [items, work] { items->Run(work); };
  const int helpers = static_cast<int>(std::min<int64_t>(pool.num_threads(), count)) - 1;
  for (int i = 0; i < helpers; ++i) pool.Schedule(std::decay_t<decltype(share)>(share));
  share();
  items->Wait();
}

}  // namespace jaxsgl
