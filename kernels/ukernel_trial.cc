#include "kernels/ukernel_trial.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "kernels/convert.h"

namespace attnd {
namespace {

constexpr int kTrialRows = 32;

// Random values in -1..1 that are bf16 if `narrow`.
float RandomValue(bool narrow, std::mt19937& random) {
  float value = std::uniform_real_distribution<float>(-1.0f, 1.0f)(random);
  uint16_t rounded;
  RoundRowToBf16(&value, 1, &rounded);
  return narrow ? Bf16ToFloat(rounded) : value;
}

void FillRow(bool narrow, float* f32, uint16_t* bf16, size_t count, std::mt19937& random) {
  for (size_t i = 0; i < count; ++i) f32[i] = RandomValue(narrow, random);
  RoundRowToBf16(f32, static_cast<int>(count), bf16);
}

}  // namespace

UkernelTrial::UkernelTrial(const ShapeKernels& kernels)
    : kernels_(kernels),
      blocks_(kernels.layout().block_bytes * kRunBlocks),
      scratch_(ProductScratch::kWidenedFloats * sizeof(float) + Brgemm::kScratchpadBytes) {
  std::mt19937 random(1);
  const bool narrow = kernels.rounds_to_bf16();
  if (narrow) {
    for (size_t i = 0; i < blocks_.bytes() / 2; ++i) {
      const float value = RandomValue(narrow, random);
      RoundRowToBf16(&value, 1, blocks_.As<uint16_t>() + i);
    }
  } else {
    for (size_t i = 0; i < blocks_.bytes() / 4; ++i) blocks_.As<float>()[i] = RandomValue(narrow, random);
  }
  const size_t q_count = size_t{kTrialRows} * kernels.q_ld();
  q_.f32.Reserve(q_count * sizeof(float));
  q_.bf16.Reserve(q_count * sizeof(uint16_t));
  FillRow(narrow, q_.f32.As<float>(), q_.bf16.As<uint16_t>(), q_count, random);
  // Rows of weights are kStripLd floats apart, whatever they hold.
  weights_.f32.Reserve(kTrialRows * kStripLd * sizeof(float));
  weights_.bf16.Reserve(kTrialRows * kStripLd * sizeof(float));
  for (size_t row = 0; row < kTrialRows; ++row) {
    FillRow(narrow, weights_.f32.As<float>() + row * kStripLd, weights_.bf16.As<uint16_t>() + row * 2 * kStripLd,
            kRunTokens, random);
  }
  for (AlignedBuffer& result : results_) result.Reserve(kTrialRows * kStripLd * sizeof(float));
}

UkernelTrial::Outcome UkernelTrial::Compare() {
  Outcome worst = Outcome::kSameBits;
  // Rows around the sizes that streaming serves and one of several tiles; batches of one (a path of its own on AMX), odd
  // and whole runs.
  for (const int rows : {1, 4, 7, 8, kTrialRows}) {
    for (const int slots : {1, 3, kRunBlocks}) worst = std::max(worst, CompareRows(rows, slots));
  }
  return worst;
}

UkernelTrial::Outcome UkernelTrial::CompareRows(int rows, int slots) {
  const BlockLayout& layout = kernels_.layout();
  const std::byte* blocks[kRunBlocks];
  // Backwards: offsets from the first block may be negative.
  for (int s = 0; s < kRunBlocks; ++s) {
    blocks[s] = blocks_.As<std::byte>() + (kRunBlocks - 1 - s) * layout.block_bytes;
  }
  ProductScratch scratch;
  scratch.widened = scratch_.As<float>();
  scratch.scratchpad = scratch_.As<float>() + ProductScratch::kWidenedFloats;
  const bool ukernel_bf16 = kernels_.UkernelOperandBytes() == 2, stream_bf16 = kernels_.StreamOperandBytes() == 2;

  float* x = results_[0].As<float>();
  float* y = results_[1].As<float>();
  const Products ukernel_scores{q_.As(ukernel_bf16), rows, blocks, slots, x, nullptr};
  bool done = kernels_.UkernelScores(ukernel_scores, &scratch);
  kernels_.StreamScores({q_.As(stream_bf16), rows, blocks, slots, y, nullptr});
  Outcome outcome = CompareFloats(x, y, rows, kStripLd, slots * kBlockTokens, kernels_.q_ld());

  const auto weights = [&](bool bf16) { return reinterpret_cast<float*>(weights_.As(bf16)); };
  const int padded = kernels_.PaddedRows(rows);
  done = done && kernels_.UkernelValues({nullptr, rows, blocks, slots, weights(ukernel_bf16), nullptr}, x, &scratch);
  kernels_.StreamValues({nullptr, rows, blocks, slots, weights(stream_bf16), nullptr}, y);
  scratch.ReleaseContext();
  for (int p = 0; p < layout.num_panels; ++p) {
    const size_t offset = static_cast<size_t>(p) * padded * kPanelColumns;
    outcome = std::max(outcome, CompareFloats(x + offset, y + offset, rows, kPanelColumns, layout.PanelWidth(p),
                                              slots * kBlockTokens));
  }
  return done ? outcome : Outcome::kWrong;
}

UkernelTrial::Outcome UkernelTrial::CompareFloats(const float* x, const float* y, int rows, size_t ld, int columns,
                                                  double terms) {
  Outcome outcome = Outcome::kSameBits;
  // Operands are below 1: two orders of the same sum differ by less than this.
  const double close = 2 * terms * terms * std::ldexp(1.0, -24);
  for (int r = 0; r < rows; ++r, x += ld, y += ld) {
    if (std::memcmp(x, y, columns * sizeof(float)) == 0) continue;
    for (int c = 0; c < columns; ++c) {
      if (!(std::fabs(double{x[c]} - y[c]) <= close)) return Outcome::kWrong;
    }
    outcome = Outcome::kClose;
  }
  return outcome;
}

}  // namespace attnd
