/* Numbers one at a time: conversions between fp32 and the 16-bit types, the loads and stores that use them, and what a
 * size may be. In an unnamed namespace: a copy compiled with one instruction set's flags must never serve another's. */
#ifndef TRIRUN_CPU_NUMBERS_H
#define TRIRUN_CPU_NUMBERS_H

#include <stdint.h>
#include <string.h>

#include "trirun.h"

namespace trirun {
namespace {

/* Sizes beyond these are nonsense: no memory holds so many elements, and further products could leave int64. */
constexpr int64_t kMaxSize = int64_t{1} << 31;
constexpr int64_t kMaxElements = int64_t{1} << 44;

inline bool is_size(int64_t value) { return value > 0 && value <= kMaxSize; }

/* Whether `rows` of so many elements each, neither negative, are no more than kMaxElements. */
inline bool fits(int64_t rows, int64_t elements) { return !elements || rows <= kMaxElements / elements; }

/* Whether a pointer can be that of an array whose elements have `width` bytes, a power of two; or null. */
inline bool is_aligned(const void* array, int64_t width) {
  return !(reinterpret_cast<uintptr_t>(array) & static_cast<uintptr_t>(width - 1));
}
inline bool is_array(const void* array, int64_t width) { return array && is_aligned(array, width); }

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

inline float half_to_float(uint16_t half) {
  uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = static_cast<uint32_t>(half & 0x7fff) << 13;
  if (rest >= 0x0f800000) return float_of(sign | 0x7f800000 | (rest & 0x7fffff));
  /* The exponent's bias differs by 112; the product is exact, subnormals included. */
  return float_of(sign | bits_of(float_of(rest) * 0x1p112f));
}

inline uint16_t float_to_half(float value) {
  uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return static_cast<uint16_t>(sign | 0x7e00 | (magnitude >> 13 & 0x3ff));
  if (magnitude >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);
  if (magnitude < 0x38800000) {
    /* Subnormal: adding 2^-1 puts the 2^-24 place at the last bit, and the addition rounds half to even. */
    return static_cast<uint16_t>(sign | (bits_of(float_of(magnitude) + 0.5f) - 0x3f000000));
  }
  return static_cast<uint16_t>(sign | ((magnitude + 0xc8000fff + (magnitude >> 13 & 1)) >> 13));
}

inline float bfloat_to_float(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }

inline uint16_t float_to_bfloat(float value) {
  uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline bool is_float_type(int dtype) { return dtype == TRIRUN_F32 || dtype == TRIRUN_F16 || dtype == TRIRUN_BF16; }

inline int64_t bytes_of(int dtype) { return dtype == TRIRUN_F32 ? 4 : 2; }

inline float load_number(const void* array, int dtype, int64_t i) {
  if (dtype == TRIRUN_F32) return static_cast<const float*>(array)[i];
  uint16_t bits = static_cast<const uint16_t*>(array)[i];
  return dtype == TRIRUN_F16 ? half_to_float(bits) : bfloat_to_float(bits);
}

inline void store_number(void* array, int dtype, int64_t i, float value) {
  if (dtype == TRIRUN_F32)
    static_cast<float*>(array)[i] = value;
  else
    static_cast<uint16_t*>(array)[i] = dtype == TRIRUN_F16 ? float_to_half(value) : float_to_bfloat(value);
}

}  // namespace
}  // namespace trirun
#endif
