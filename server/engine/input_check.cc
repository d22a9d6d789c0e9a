#include "server/engine/input_check.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "kernels/append.h"
#include "kernels/attention.h"
#include "server/engine/errors.h"

namespace attnd {
namespace {

constexpr int64_t kUnitElements = 1 << 16;

// The least magnitudes that round (to nearest, ties to even) beyond the largest number of a narrower type. Infinities
// and NaN have larger bits still.
constexpr uint32_t kF32BeyondBf16 = 0x7F7F8000;
constexpr uint32_t kF32BeyondF16 = 0x477FF000;  // 65520
constexpr uint16_t kBf16BeyondF16 = 0x4780;     // 65536, the next after 65280

// Index of the first element whose bits but for the sign are `beyond` or more, or -1.
template <class Bits>
int64_t FindBeyond(const std::byte* data, int64_t count, Bits beyond) {
  constexpr Bits kMagnitude = static_cast<Bits>(~Bits{0}) >> 1;
  constexpr int64_t kStride = 256;  // so that the loop inside is a vector loop without exits
  for (int64_t begin = 0; begin < count; begin += kStride) {
    const int64_t n = std::min(kStride, count - begin);
    Bits bits[kStride];
    std::memcpy(bits, data + begin * sizeof(Bits), n * sizeof(Bits));
    Bits largest = 0;
    for (int64_t i = 0; i < n; i++) largest = std::max<Bits>(largest, bits[i] & kMagnitude);
    if (largest < beyond) continue;
    for (int64_t i = 0; i < n; i++) {
      if ((bits[i] & kMagnitude) >= beyond) return begin + i;
    }
  }
  return -1;
}

absl::Status NotFiniteError(absl::string_view tensor, const TensorView& view, int64_t element) {
  const int64_t row = element / (int64_t{view.heads} * view.dim);
  const int64_t head = element / view.dim % view.heads;
  const bool finite = FindNonFinite(view.data + element * DTypeBytes(view.dtype), view.dtype, 1) < 0;
  return MakeError(absl::StatusCode::kInvalidArgument, "NOT_FINITE",
                   absl::StrCat(tensor, " row ", row, ", head ", head, ", element ", element % view.dim,
                                finite ? " is beyond the range of the session's element type" : " is not finite"),
                   {{"tensor", std::string(tensor)},
                    {"row", absl::StrCat(row)},
                    {"head", absl::StrCat(head)},
                    {"element", absl::StrCat(element % view.dim)}});
}

absl::Status EmptyRowError(int64_t row) {
  return MakeError(absl::StatusCode::kInvalidArgument, "EMPTY_ROW",
                   absl::StrCat("query row ", row, " has no allowed key"), {{"row", absl::StrCat(row)}});
}

}  // namespace

int64_t FindUnstorable(const std::byte* data, DType dtype, int64_t count, KvDType kv_dtype) {
  if (dtype == DType::kF32 && kv_dtype == KvDType::kBf16) return FindBeyond(data, count, kF32BeyondBf16);
  if (dtype == DType::kF32 && kv_dtype == KvDType::kF16) return FindBeyond(data, count, kF32BeyondF16);
  if (dtype == DType::kBf16 && kv_dtype == KvDType::kF16) return FindBeyond(data, count, kBf16BeyondF16);
  return FindNonFinite(data, dtype, count);
}

const TensorView& InputCheck::TensorOf(const Unit& unit) {
  switch (unit.what) {
    case What::kQ:
      return unit.run->q;
    case What::kK:
      return unit.run->k;
    case What::kDOut:
      return unit.run->backward->d_out;
    default:
      return unit.run->v;
  }
}

void InputCheck::Add(SegmentRun* run, What what, const TensorView& tensor, int64_t rows) {
  if (tensor.data == nullptr) return;
  const int64_t elements = rows * tensor.heads * tensor.dim;
  for (int64_t first = 0; first < elements; first += kUnitElements) {
    units_.push_back({run, what, first, std::min(kUnitElements, elements - first), -1});
  }
}

void InputCheck::Check(Unit* unit) {
  if (unit->what == What::kEmptyRow) {
    unit->bad = FindEmptyRow(unit->run->Work(0, unit->run->num_tokens, nullptr));
    return;
  }
  const TensorView& tensor = TensorOf(*unit);
  // Q is rounded as K and V are for BF16 only.
  KvDType stored = unit->run->layout->shape.dtype;
  if (unit->what == What::kQ && stored != KvDType::kBf16) stored = KvDType::kF32;
  const int64_t bad =
      FindUnstorable(tensor.data + unit->first_element * DTypeBytes(tensor.dtype), tensor.dtype, unit->count, stored);
  if (bad >= 0) unit->bad = unit->first_element + bad;
}

void InputCheck::Run(absl::Span<const ChunkWork> chunks, ForEach for_each) {
  units_.clear();
  for (const ChunkWork& chunk : chunks) {
    SegmentRun* const run = chunk.run;
    if (chunk.begin > 0 || !run->status.ok()) continue;
    Add(run, What::kQ, run->q, run->num_tokens);
    Add(run, What::kK, run->k, run->kv_rows);
    Add(run, What::kV, run->v, run->kv_rows);
    if (run->backward != nullptr) Add(run, What::kDOut, run->backward->d_out, run->num_tokens);
    if (run->q.data != nullptr && !run->zero_empty_rows) units_.push_back({run, What::kEmptyRow, 0, 0, -1});
  }
  int64_t bytes = 0;
  for (const Unit& unit : units_) bytes += 4 * unit.count;
  for_each(static_cast<int64_t>(units_.size()), bytes, [&](int64_t task, int) { Check(&units_[task]); });
  for (const Unit& unit : units_) {
    if (unit.bad < 0) continue;
    constexpr absl::string_view kNames[] = {"q", "k", "v", "d_out"};
    unit.run->status.Update(unit.what == What::kEmptyRow
                                ? EmptyRowError(unit.bad)
                                : NotFiniteError(kNames[static_cast<int>(unit.what)], TensorOf(unit), unit.bad));
  }
}

}  // namespace attnd
