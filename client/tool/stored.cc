#include "client/tool/stored.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace attnd::tool {
namespace {

// A row as INT8 holds it: elements of -127 to 127 times the row's scale, or zeros where that would be no normal number.
void QuantizeRow(std::span<float> row) {
  float largest = 0;
  for (const float value : row) largest = std::max(largest, std::fabs(value));
  const bool vanishes = largest < 127 * std::numeric_limits<float>::min();
  for (float& value : row) value = vanishes ? 0 : largest / 127 * std::nearbyint(value * (127 / largest));
}

}  // namespace

void RoundAsStored(client::KvDType dtype, int dim, std::span<float> values) {
  if (dtype == client::KvDType::kBf16) {
    for (float& value : values) value = client::ToFloat(client::ToBFloat16(value));
  } else if (dtype == client::KvDType::kF16) {
    for (float& value : values) value = client::ToFloat(client::ToFloat16(value));
  } else if (dtype == client::KvDType::kInt8) {
    for (; !values.empty(); values = values.subspan(dim)) QuantizeRow(values.first(dim));
  }
}

void RoundAsMultiplied(client::KvDType dtype, int dim, std::span<float> queries) {
  if (dtype == client::KvDType::kBf16) RoundAsStored(dtype, dim, queries);
}

double RelativeError(const float* out, const double* reference, int dim) {
  double difference = 0, norm = 0;
  for (int d = 0; d < dim; ++d) {
    const double delta = out[d] - reference[d];
    difference += delta * delta;
    norm += reference[d] * reference[d];
  }
  if (!std::isfinite(difference)) return std::numeric_limits<double>::infinity();
  return difference == 0 ? 0 : std::sqrt(difference / norm);
}

double ErrorBound(client::KvDType dtype) {
  switch (dtype) {
    case client::KvDType::kF32:
      return 1e-5;
    case client::KvDType::kBf16:
    case client::KvDType::kF16:
      return 1e-2;
    case client::KvDType::kInt8:
      return 3e-2;
  }
  return 0;
}

}  // namespace attnd::tool
