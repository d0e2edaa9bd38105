// What a thread's floating-point arithmetic depends on besides its inputs, as far as a program can see it.

#pragma once

#include <cpuid.h>
#include <immintrin.h>

#include <cstdint>
#include <cstring>

struct FpEnvironment {
  uint32_t mxcsr;    // rounding, denormals, masked exceptions; without the flags that any operation may raise
  uint16_t control;  // of the x87 unit: rounding, precision
  uint16_t tags;     // of its registers: 0xffff if all are empty
  uint8_t tiles;     // palette of the AMX tiles, or of the library's imitated ones; 0 if none are configured

  bool operator==(const FpEnvironment& other) const {
    return mxcsr == other.mxcsr && control == other.control && tags == other.tags && tiles == other.tiles;
  }
};

constexpr uint32_t kRaisedFlags = 0x3f, kFlushToZero = 0x8000, kRoundUp = 0x4000;

// Whether the processor has tiles and the system saves them.
inline bool HasTiles() {
  static const bool has = [] {
    uint32_t a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d >> 24 & 1)) return false;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c >> 27 & 1)) return false;
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low >> 17 & 3) == 3;
  }();
  return has;
}

inline int (*imitated_palette)() = nullptr;  // a library's, if its tiles are imitated

inline FpEnvironment ReadFpEnvironment() {
  FpEnvironment found{};
  found.mxcsr = _mm_getcsr() & ~kRaisedFlags;
  uint32_t x87[7];
  asm volatile("fnstenv %0\n\tfldenv %0" : "+m"(x87));  // storing masks exceptions, hence the load
  found.control = uint16_t(x87[0]);
  found.tags = uint16_t(x87[2]);
  if (HasTiles()) {
    alignas(64) uint8_t config[64] = {};
    asm volatile(".byte 0xc4, 0xe2, 0x79, 0x49, 0x00" : "+m"(config) : "a"(config) : "memory");  // sttilecfg [rax]
    found.tiles = config[0];
  }
  if (imitated_palette) found.tiles = uint8_t(imitated_palette());
  return found;
}
