#include "kernels/ukernel_trial.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/convert.h"

namespace attnd {
namespace {

constexpr int kTrialRows = 32;

// Random values in -1..1, as f32 and rounded to bf16 and f16; exactly bf16 in f32 too if `narrow`. Drawn once, the
// memory is filled with them over and over: their number is prime, so nothing repeats from row to row.
struct Values {
  static constexpr size_t kCount = 4093;
  std::vector<float> f32 = std::vector<float>(kCount);
  std::vector<uint16_t> bf16 = std::vector<uint16_t>(kCount), f16 = std::vector<uint16_t>(kCount);

  explicit Values(bool narrow) {
    std::mt19937 random(1);
    std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
    for (float& value : f32) value = uniform(random);
    RoundRowToBf16(f32.data(), kCount, bf16.data());
    NarrowRow(f32.data(), kCount, DType::kF16, reinterpret_cast<std::byte*>(f16.data()));
    for (size_t i = 0; i < kCount && narrow; ++i) f32[i] = Bf16ToFloat(bf16[i]);
  }

  template <class T>
  static void Fill(const std::vector<T>& values, size_t first, T* to, size_t count) {
    for (size_t i = 0; i < count; ++i) to[i] = values[(first + i) % kCount];
  }
};

}  // namespace

UkernelTrial::UkernelTrial(const ShapeKernels& kernels)
    : kernels_(kernels),
      blocks_(kernels.layout().block_bytes * kRunBlocks),
      scratch_(ProductScratch::kWidenedFloats * sizeof(float) + Brgemm::kScratchpadBytes) {
  const Values values(kernels.rounds_to_bf16());
  if (kernels.layout().shape.dtype == KvDType::kF32) {
    Values::Fill(values.f32, 0, blocks_.As<float>(), blocks_.bytes() / sizeof(float));
  } else {
    Values::Fill(kernels.rounds_to_bf16() ? values.bf16 : values.f16, 0, blocks_.As<uint16_t>(),
                 blocks_.bytes() / sizeof(uint16_t));
  }
  const auto fill = [&values](Operand& operand, size_t columns, size_t f32_ld, size_t bf16_ld) {
    operand.f32.Reserve(kTrialRows * f32_ld * sizeof(float));
    operand.bf16.Reserve(kTrialRows * bf16_ld * sizeof(uint16_t));
    for (size_t row = 0; row < kTrialRows; ++row) {
      Values::Fill(values.f32, row * columns, operand.f32.As<float>() + row * f32_ld, columns);
      Values::Fill(values.bf16, row * columns, operand.bf16.As<uint16_t>() + row * bf16_ld, columns);
    }
  };
  fill(q_, kernels.q_ld(), kernels.q_ld(), kernels.q_ld());
  fill(weights_, kRunTokens, kStripLd, 2 * kStripLd);
  for (AlignedBuffer& result : results_) result.Reserve(kTrialRows * kStripLd * sizeof(float));
}

UkernelTrial::Outcome UkernelTrial::Compare() {
  Outcome worst = Outcome::kSameBits;
  // Rows around the sizes that streaming serves and one of several tiles; batches of one (a path of its own on AMX),
  // odd and whole runs.
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
  kernels_.StreamScores({q_.As(stream_bf16), rows, blocks, slots, y, nullptr}, &scratch);
  Outcome outcome = CompareFloats(x, y, rows, kStripLd, slots * kBlockTokens, kernels_.q_ld());

  const auto weights = [&](bool bf16) { return reinterpret_cast<float*>(weights_.As(bf16)); };
  const int padded = kernels_.PaddedRows(rows);
  done = done && kernels_.UkernelValues({nullptr, rows, blocks, slots, weights(ukernel_bf16), nullptr}, x, &scratch);
  kernels_.StreamValues({nullptr, rows, blocks, slots, weights(stream_bf16), nullptr}, y, &scratch);
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
