#include "client/cpp/types.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>

namespace attnd::client {
namespace {

// Tensors travel as the host's own bytes.
static_assert(std::endian::native == std::endian::little, "attnd's client needs a little-endian host");

size_t BitIndex(const BitMask& mask, int64_t row, int64_t column) {
  assert(row >= 0 && row < mask.rows && column >= 0 && column < mask.columns);
  return static_cast<size_t>(row * mask.columns + column);
}

}  // namespace

BFloat16 ToBFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  // A NaN whose payload sits in the low half would round to infinity: keep it quiet instead.
  if (std::isnan(value)) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  const uint32_t rounding = 0x7FFF + ((bits >> 16) & 1);
  return {static_cast<uint16_t>((bits + rounding) >> 16)};
}

float ToFloat(BFloat16 value) { return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

Float16 ToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return {static_cast<uint16_t>(sign | 0x7E00)};
  // 65520 is half-way between the largest half, 65504, and the next step: from there on it rounds to infinity.
  if (magnitude >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7C00)};
  if (magnitude < 0x1p-14f) {
    // Subnormal: a multiple of 2^-24. nearbyint rounds ties to even in the default rounding mode.
    return {static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f)))};
  }
  const uint32_t absolute = bits & 0x7FFFFFFF;
  const uint32_t rounding = 0xFFF + ((absolute >> 13) & 1);
  // Rebias the exponent from 127 to 15 in place; a carry out of the mantissa moves into it as it should.
  return {static_cast<uint16_t>(sign | ((absolute + rounding - (112u << 23)) >> 13))};
}

float ToFloat(Float16 value) {
  const float sign = (value.bits & 0x8000) != 0 ? -1.0f : 1.0f;
  const int exponent = (value.bits >> 10) & 0x1F;
  const int mantissa = value.bits & 0x3FF;
  if (exponent == 0) return sign * static_cast<float>(mantissa) * 0x1p-24f;
  if (exponent == 31) return mantissa == 0 ? sign * INFINITY : NAN;
  return sign * std::ldexp(static_cast<float>(mantissa | 0x400), exponent - 25);
}

std::vector<float> Tensor::ToFloats() const {
  std::vector<float> floats(size());
  switch (dtype) {
    case DType::kF32:
      std::ranges::copy(As<float>(), floats.begin());
      break;
    case DType::kBf16:
      for (size_t i = 0; i < floats.size(); ++i) floats[i] = ToFloat(As<BFloat16>()[i]);
      break;
    case DType::kF16:
      for (size_t i = 0; i < floats.size(); ++i) floats[i] = ToFloat(As<Float16>()[i]);
      break;
  }
  return floats;
}

BitMask BitMask::Filled(int64_t rows, int64_t columns, bool allowed) {
  BitMask mask{rows, columns, std::string(static_cast<size_t>((rows * columns + 7) / 8), '\0')};
  for (int64_t row = 0; allowed && row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) mask.Set(row, column, true);
  }
  return mask;
}

void BitMask::Set(int64_t row, int64_t column, bool allowed) {
  const size_t bit = BitIndex(*this, row, column);
  const unsigned char flag = static_cast<unsigned char>(1u << (bit % 8));
  unsigned char& byte = reinterpret_cast<unsigned char&>(bits[bit / 8]);
  byte = static_cast<unsigned char>(allowed ? byte | flag : byte & ~flag);
}

bool BitMask::Get(int64_t row, int64_t column) const {
  const size_t bit = BitIndex(*this, row, column);
  return (static_cast<unsigned char>(bits[bit / 8]) >> (bit % 8)) & 1;
}

const char* Name(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBf16:
      return "bf16";
    case DType::kF16:
      return "f16";
  }
  return "?";
}

const char* Name(KvDType dtype) {
  switch (dtype) {
    case KvDType::kF32:
      return "f32";
    case KvDType::kBf16:
      return "bf16";
    case KvDType::kF16:
      return "f16";
    case KvDType::kInt8:
      return "int8";
  }
  return "?";
}

std::optional<KvDType> ParseKvDType(const std::string& name) {
  for (KvDType dtype : {KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8}) {
    if (name == Name(dtype)) return dtype;
  }
  return std::nullopt;
}

}  // namespace attnd::client
