// AMX tiles: their state on a thread, and whether the system lets this process use them and keeps what is in them.
//
// A tile is a register of 16 rows of 64 bytes; a thread has 8. Linux saves them at a switch of threads only for
// processes that asked (arch_prctl); in others the first instruction that fills a tile is fatal. Tests define
// JAXSGL_IMITATED_TILES, a header that stands for the instructions, the processor and the system.
// Called by attention_tiles.h, product_tiles.h, packed_tiles.h and library.py.

#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#ifdef JAXSGL_IMITATED_TILES
#include JAXSGL_IMITATED_TILES
#endif

// GCC before 11 and Clang before 12 don't define the two names for any processor.
#if defined(__AVX512BF16__) && (defined(JAXSGL_IMITATED_TILES) || (defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)))
#define JAXSGL_TILES
#endif

#ifdef JAXSGL_TILES

#ifndef JAXSGL_IMITATED_TILES
#include <cpuid.h>
#include <sys/syscall.h>
#endif
#include <unistd.h>

#include <atomic>
#include <cerrno>

namespace jaxsgl {

constexpr int kTileRows = 16;         // rows of a tile, and its columns of 32 bits
constexpr int kTileInputs = 32;   // bfloat16 numbers in a row
constexpr int kTileNumbers = 256; // of 32 bits in a tile

struct TileConfig {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// All 8 tiles whole. A constant: compilers don't see that the instruction reads more than the address.
alignas(64) inline constexpr TileConfig kWholeTiles = {
    1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

// Whole tiles for the calling thread, none once it's gone: tiles in use make every switch of threads slower.
class Tiles {
 public:
  explicit Tiles(const TileConfig& config = kWholeTiles) { _tile_loadconfig(&config); }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
};

#ifndef JAXSGL_IMITATED_TILES

// Whether the processor has tiles, products of bfloat16 and of bytes with them, and the system saves their state.
inline bool ProcessorHasTiles() {
  uint32_t a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 1) + (d >> 24 & 1) + (d >> 25 & 1) < 3) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;  // OSXSAVE: there is xgetbv
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low >> 17 & 3) == 3;
}

// 0, or why Linux (5.16 or later) doesn't permit this process, its later threads included, to use tiles.
inline int AskForTiles() {
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) ? errno : 0;
}

#endif

// Whether tiles are what they were after the thread has slept. Some virtual machines lose them then, which would be
// wrong results without an error.
inline bool TilesSurviveSleep() {
  constexpr int kSleeps = 20, kMicroseconds = 200;
  alignas(64) static uint8_t pattern[kTileNumbers * 4], found[kTileNumbers * 4];
  for (int i = 0; i < kTileNumbers * 4; ++i) pattern[i] = uint8_t(i * 7 + 1);
  asm volatile("" ::: "memory");  // loads of tiles don't tell compilers that they read memory
  const Tiles tiles;
  for (int i = 0; i < kSleeps; ++i) {
    _tile_loadd(3, pattern, 64);
    usleep(kMicroseconds);
    _tile_stored(3, found, 64);
    if (std::memcmp(pattern, found, sizeof(found))) return false;
  }
  return true;
}

// By RefuseTiles. Hidden, since each library of the process would see what another was granted.
[[gnu::visibility("hidden")]] inline std::atomic<bool> tiles_are_granted{false};

// Why this process can't use tiles, or nullptr. Asks the system for permission; call it once, before the first product.
inline const char* RefuseTiles() {
  if (!ProcessorHasTiles()) return "the processor or the system has no tiles";
  if (const int error = AskForTiles()) {
    static char text[80];
    std::strcpy(text, "the system refuses tiles: ");
    std::strncat(text, std::strerror(error), sizeof(text) - std::strlen(text) - 1);
    return text;
  }
  if (!TilesSurviveSleep()) return "the system loses what is in tiles when it switches threads";
  tiles_are_granted = true;
  return nullptr;
}

}  // namespace jaxsgl

#else

namespace jaxsgl {
inline const char* RefuseTiles() { return "the compiler knows no AMX"; }
}  // namespace jaxsgl

#endif

extern "C" [[gnu::used]] inline const char* refuse_tiles() { return jaxsgl::RefuseTiles(); }
