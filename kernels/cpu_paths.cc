#include "kernels/cpu_paths.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "kernels/aligned_buffer.h"
#include "kernels/append.h"
#include "kernels/attention.h"
#include "kernels/convert.h"
#include "kernels/isa.h"
#include "kernels/reference.h"
#include "kernels/shape_kernels.h"
#include "oneapi/dnnl/dnnl.h"

namespace attnd {
namespace {

constexpr int kTestQueries = 2, kTestDim = 33, kTestKeys = 65;

// Relative error of an output row that is still right: rounding to bf16 costs 2^-9 on each operand.
double Tolerance(KvDType dtype) { return dtype == KvDType::kF32 ? 1e-5 : 1e-2; }

std::vector<float> RandomValues(size_t count, bool bf16, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) {
    value = normal(*random);
    uint16_t rounded;
    RoundRowToBf16(&value, 1, &rounded);
    if (bf16) value = Bf16ToFloat(rounded);
  }
  return values;
}

// The largest relative error of a row: `groups` query heads on one kv head, so that tiles have 2 * groups rows.
double WorstError(KvDType dtype, int groups) {
  std::mt19937 random(7);
  const KvShape shape{kTestDim, kTestDim, dtype};
  const BlockLayout layout(shape);
  const bool bf16 = dtype == KvDType::kBf16;
  const std::vector<float> q = RandomValues(size_t{kTestQueries} * groups * kTestDim, bf16, &random);
  const std::vector<float> k = RandomValues(size_t{kTestKeys} * kTestDim, bf16, &random);
  const std::vector<float> v = RandomValues(size_t{kTestKeys} * kTestDim, bf16, &random);

  AlignedBuffer memory(2 * layout.block_bytes);
  const std::byte* blocks[2] = {memory.As<std::byte>(), memory.As<std::byte>() + layout.block_bytes};
  constexpr size_t kRowBytes = kTestDim * sizeof(float);
  const RowsView k_rows{reinterpret_cast<const std::byte*>(k.data()), kRowBytes, DType::kF32};
  const RowsView v_rows{reinterpret_cast<const std::byte*>(v.data()), kRowBytes, DType::kF32};
  for (int first = 0; first < kTestKeys; first += kBlockTokens) {
    std::byte* block = memory.As<std::byte>() + first / kBlockTokens * layout.block_bytes;
    InitBlock(layout, block);
    WriteTokens(layout, block, 0, std::min(kBlockTokens, kTestKeys - first),
                {k_rows.data + first * kRowBytes, kRowBytes, DType::kF32},
                {v_rows.data + first * kRowBytes, kRowBytes, DType::kF32});
  }

  std::vector<float> out(size_t{kTestQueries} * groups * kTestDim);
  AttentionWork work;
  work.shape = shape;
  work.heads = {groups, 1};
  work.softmax.softmax_scale = 1.0f / std::sqrt(static_cast<float>(kTestDim));
  work.num_queries = kTestQueries;
  work.first_position = kTestKeys - kTestQueries;
  work.num_keys = kTestKeys;
  work.blocks = blocks;
  work.num_blocks = 2;
  work.q = reinterpret_cast<const std::byte*>(q.data());
  work.out = reinterpret_cast<std::byte*>(out.data());
  AttentionBatch batch(1);
  batch.Add(work);
  const int tasks = batch.Plan();
  for (int task = 0; task < tasks; ++task) batch.Run(task, 0);

  const ReferenceOutput expected = ReferenceAttention({work.heads,
                                                       kTestDim,
                                                       kTestDim,
                                                       work.softmax,
                                                       {},
                                                       work.first_position,
                                                       {q.begin(), q.end()},
                                                       {k.begin(), k.end()},
                                                       {v.begin(), v.end()}});
  double worst = 0;
  for (size_t row = 0; row < out.size(); row += kTestDim) {
    double error = 0, norm = 0;
    for (size_t c = row; c < row + kTestDim; ++c) {
      error += (out[c] - expected.out[c]) * (out[c] - expected.out[c]);
      norm += expected.out[c] * expected.out[c];
    }
    const double relative = std::sqrt(error / norm);
    worst = relative <= worst ? worst : relative;  // NaN counts as worse
  }
  return worst;
}

const char* Name(KvDType dtype) { return dtype == KvDType::kF32 ? "f32" : "bf16"; }

}  // namespace

std::string IsaName() { return OneDnnIsaName(); }

std::string OneDnnVersion() {
  const dnnl_version_t* version = dnnl_version();
  return std::to_string(version->major) + "." + std::to_string(version->minor) + "." + std::to_string(version->patch);
}

std::string KernelPath(KvDType dtype) { return ShapeKernels::Get({128, 128, dtype}).Description(); }

bool SelfTest(std::string* what) {
  what->clear();
  for (const KvDType dtype : {KvDType::kF32, KvDType::kBf16}) {
    // Two rows (streaming where it serves few rows), and more than streaming serves, a tail of each tile size included.
    for (const int groups : {1, 31}) {
      const double error = WorstError(dtype, groups);
      if (error <= Tolerance(dtype)) continue;
      *what = std::string("attention over ") + Name(dtype) + " with " + std::to_string(2 * groups) +
              " rows is wrong on this machine: relative error " + std::to_string(error) + " (" +
              ShapeKernels::Get({kTestDim, kTestDim, dtype}).Description() + ")";
      return false;
    }
  }
  return true;
}

}  // namespace attnd
