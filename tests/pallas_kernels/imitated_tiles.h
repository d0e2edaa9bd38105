// AMX in plain C++, for processors without it: what the instructions do to tiles, memory and sums, and when they fault.
//
// From Intel's description of the instructions (Software Developer's Manual, volume 2). The kernels are compiled with
// -DJAXSGL_IMITATED_TILES="this file", and their source then calls these functions. Where the processor would fault,
// the process ends with a reason. The variable IMITATED_SYSTEM stands for systems that don't let a process use tiles:
// "absent", "refuses" and "forgets".

#pragma once

#include <immintrin.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace imitated {

constexpr int kTiles = 8, kMostRows = 16, kMostBytes = 64;

struct State {
  int palette, rows[kTiles], row_bytes[kTiles];
  alignas(64) unsigned char data[kTiles][kMostRows][kMostBytes];
};
inline thread_local State state{};

[[noreturn]] inline void Fault(const char* what) {
  std::fprintf(stderr, "imitated tiles: %s\n", what);
  std::fflush(stderr);
  std::abort();
}

inline bool SystemIs(const char* name) {
  const char* given = std::getenv("IMITATED_SYSTEM");
  return given && !std::strcmp(given, name);
}

inline void CheckValid(int tile) {
  if (tile < 0 || tile >= kTiles) Fault("there are 8 tiles");
  if (!state.palette) Fault("no tiles are configured");
  if (!state.rows[tile]) Fault("the tile isn't configured");
}

inline void Release() { state = {}; }

inline void LoadConfig(const void* memory) {
  unsigned char config[64];
  std::memcpy(config, memory, sizeof(config));
  if (config[0] > 1) Fault("there is no such palette");
  Release();
  if (!config[0]) return;
  if (config[1] >= kMostRows) Fault("the first row is past the last");
  for (int i = 2; i < 16; ++i)
    if (config[i]) Fault("reserved bytes aren't zero");
  for (int i = 0; i < 16; ++i) {
    const int row_bytes = config[16 + 2 * i] | config[17 + 2 * i] << 8, rows = config[48 + i];
    if (i >= kTiles && (row_bytes || rows)) Fault("there are 8 tiles");
    if (row_bytes > kMostBytes || rows > kMostRows) Fault("a tile has 16 rows of 64 bytes at most");
    if (!row_bytes != !rows) Fault("a tile has rows but no columns, or the reverse");
    if (i < kTiles) state.rows[i] = rows, state.row_bytes[i] = row_bytes;
  }
  if (config[1]) Fault("not imitated: an instruction that continues at a row");
  state.palette = config[0];
}

inline void Load(int tile, const void* memory, int64_t stride) {
  CheckValid(tile);
  std::memset(state.data[tile], 0, sizeof(state.data[tile]));
  for (int r = 0; r < state.rows[tile]; ++r)
    std::memcpy(state.data[tile][r], static_cast<const char*>(memory) + r * stride, state.row_bytes[tile]);
}

inline void Store(int tile, void* memory, int64_t stride) {
  CheckValid(tile);
  for (int r = 0; r < state.rows[tile]; ++r)
    std::memcpy(static_cast<char*>(memory) + r * stride, state.data[tile][r], state.row_bytes[tile]);
}

inline void Zero(int tile) {
  CheckValid(tile);
  std::memset(state.data[tile], 0, sizeof(state.data[tile]));
}

inline float Number(const unsigned char* bfloat16) {
  const uint32_t bits = uint32_t(bfloat16[0]) << 16 | uint32_t(bfloat16[1]) << 24;
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}

// The left side's bytes have a sign, the right side's none.
__attribute__((noinline)) inline void AddRowOfBytes(int to, int a, int b, int row) {
  int32_t sum[kMostBytes / 4];
  std::memcpy(sum, state.data[to][row], sizeof(sum));
  for (int k = 0; k < state.row_bytes[a]; ++k)
    for (int n = 0; n < state.row_bytes[to] / 4; ++n)
      sum[n] += static_cast<signed char>(state.data[a][row][k]) * state.data[b][k / 4][4 * n + k % 4];
  std::memset(state.data[to][row], 0, kMostBytes);
  std::memcpy(state.data[to][row], sum, state.row_bytes[to]);
}

// Even inputs are added up by themselves and odd ones too, each from zero and each step rounded once; then both sums,
// and that to what the tile held.
__attribute__((noinline)) inline void AddRow(int to, int a, int b, int row) {
  float even[kMostBytes / 4] = {}, odd[kMostBytes / 4] = {}, sum[kMostBytes / 4];
  const int columns = state.row_bytes[to] / 4;
  for (int k = 0; k < state.row_bytes[a] / 4; ++k) {
    const float first = Number(&state.data[a][row][4 * k]), second = Number(&state.data[a][row][4 * k + 2]);
    for (int n = 0; n < columns; ++n) {
      even[n] = __builtin_fmaf(first, Number(&state.data[b][k][4 * n]), even[n]);
      odd[n] = __builtin_fmaf(second, Number(&state.data[b][k][4 * n + 2]), odd[n]);
    }
  }
  std::memcpy(sum, state.data[to][row], sizeof(sum));
  for (int n = 0; n < columns; ++n) sum[n] += even[n] + odd[n];
  std::memset(state.data[to][row], 0, kMostBytes);
  std::memcpy(state.data[to][row], sum, state.row_bytes[to]);
}

inline void CheckProducts(int to, int a, int b) {
  CheckValid(to), CheckValid(a), CheckValid(b);
  if (to == a || to == b || a == b) Fault("the three tiles must differ");
  if (state.row_bytes[to] % 4 || state.row_bytes[a] % 4 || state.row_bytes[b] % 4) Fault("a row ends within a pair");
  if (state.rows[to] != state.rows[a]) Fault("the sums have other rows than the left side");
  if (state.row_bytes[a] / 4 != state.rows[b]) Fault("the sides have different numbers of pairs");
  if (state.row_bytes[to] != state.row_bytes[b]) Fault("the sums have other columns than the right side");
}

inline void AddProductsOfBytes(int to, int a, int b) {
  CheckProducts(to, a, b);
  for (int row = 0; row < state.rows[to]; ++row) AddRowOfBytes(to, a, b, row);
}

inline void AddProducts(int to, int a, int b) {
  CheckProducts(to, a, b);
  const unsigned before = _mm_getcsr();  // neither read nor changed by the instruction: nearest, denormals are zeros
  _mm_setcsr(0x9fc0);
  for (int row = 0; row < state.rows[to]; ++row) AddRow(to, a, b, row);
  _mm_setcsr(before);
}

inline int Sleep(unsigned microseconds) {
  const int result = usleep(microseconds);
  if (SystemIs("forgets")) std::memset(state.data, 0, sizeof(state.data));
  return result;
}

}  // namespace imitated

namespace jaxsgl {
inline bool ProcessorHasTiles() { return !imitated::SystemIs("absent"); }
inline int AskForTiles() { return imitated::SystemIs("refuses") ? EPERM : 0; }
}  // namespace jaxsgl

// For guarded.cc: the palette of the calling thread's tiles; and a mistake.
extern "C" [[gnu::used]] inline int imitated_palette() { return imitated::state.palette; }
extern "C" [[gnu::used]] inline void imitated_leave_tiles() { imitated::state.palette = 1; }

#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadconfig imitated::LoadConfig
#define _tile_release imitated::Release
#define _tile_loadd imitated::Load
#define _tile_stored imitated::Store
#define _tile_zero imitated::Zero
#define _tile_dpbf16ps imitated::AddProducts
#define _tile_dpbsud imitated::AddProductsOfBytes
#define usleep imitated::Sleep
