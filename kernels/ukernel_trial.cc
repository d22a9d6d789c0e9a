#include "kernels/ukernel_trial.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "kernels/convert.h"

namespace attnd {
namespace {

constexpr int kTrialRows = 32;

void FillRandom(bool bf16, std::byte* to, size_t count, std::mt19937& random) {
  std::uniform_real_distribution<float> uniform(-1.0f, 1.0f);
  for (size_t i = 0; i < count; ++i) {
    const float value = uniform(random);
    if (bf16) {
      RoundRowToBf16(&value, 1, reinterpret_cast<uint16_t*>(to) + i);
    } else {
      std::memcpy(to + i * sizeof(value), &value, sizeof(value));
    }
  }
}

}  // namespace

UkernelTrial::UkernelTrial(const ShapeKernels& kernels)
    : kernels_(kernels),
      blocks_(kernels.layout().block_bytes * kRunBlocks),
      q_(size_t{kTrialRows} * kernels.q_ld() * sizeof(float)),
      weights_(kTrialRows * kStripLd * sizeof(float)),
      scratch_(ProductScratch::kWidenedFloats * sizeof(float) + Brgemm::kScratchpadBytes) {
  std::mt19937 random(1);
  const bool narrow = kernels.rounds_to_bf16(), bf16 = kernels.bf16_operands();
  FillRandom(narrow, blocks_.As<std::byte>(), blocks_.bytes() / (narrow ? 2 : 4), random);
  FillRandom(bf16, q_.As<std::byte>(), size_t{kTrialRows} * kernels.q_ld(), random);
  FillRandom(bf16, weights_.As<std::byte>(), kTrialRows * kStripLd * (bf16 ? 2 : 1), random);
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
  Products args{q_.As<std::byte>(), rows, blocks, slots, nullptr, nullptr};

  float* x = results_[0].As<float>();
  float* y = results_[1].As<float>();
  args.strip = x;
  bool done = kernels_.UkernelScores(args, &scratch);
  args.strip = y;
  kernels_.StreamScores(args);
  Outcome outcome = CompareFloats(x, y, rows, kStripLd, slots * kBlockTokens, kernels_.q_ld());

  args.strip = weights_.As<float>();
  const int padded = kernels_.PaddedRows(rows);
  done = done && kernels_.UkernelValues(args, x, &scratch);
  kernels_.StreamValues(args, y);
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
