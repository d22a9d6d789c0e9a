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

constexpr int kTestQueries = 2, kTestKeys = 65;
// Rests of every tile, and whole tiles, which AMX streams.
constexpr int kTestDims[] = {33, 64};

// Relative error of an output row that is still right. K and V are exactly representable, so this is what rounding Q
// and the weights costs: 2^-9 of each as bf16, 2^-16 of the row's largest as s16.
double Tolerance(KvDType dtype) { return dtype == KvDType::kBf16 ? 1e-2 : dtype == KvDType::kInt8 ? 1e-3 : 1e-5; }

// Rows of `dim` values that the dtype holds exactly.
std::vector<float> RandomRows(size_t rows, size_t dim, KvDType dtype, std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> s8(-127, 127);
  std::vector<float> values(rows * dim);
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = normal(*random);
    // An element of 127 in every row makes the row's scale 1/64.
    if (dtype == KvDType::kInt8) values[i] = static_cast<float>(i % dim == 0 ? 127 : s8(*random)) / 64;
    if (dtype != KvDType::kBf16 && dtype != KvDType::kF16) continue;
    const DType narrow = dtype == KvDType::kBf16 ? DType::kBf16 : DType::kF16;
    std::byte bytes[sizeof(uint16_t)];
    NarrowRow(&values[i], 1, narrow, bytes);
    WidenRow(bytes, narrow, 1, &values[i]);
  }
  return values;
}

// The largest relative error of a row: `groups` query heads on one kv head, so that tiles have 2 * groups rows.
double WorstError(KvDType dtype, int dim, int groups) {
  std::mt19937 random(7);
  const KvShape shape{dim, dim, dtype};
  const BlockLayout layout(shape);
  const std::vector<float> q = RandomRows(size_t{kTestQueries} * groups, dim, dtype, &random);
  const std::vector<float> k = RandomRows(kTestKeys, dim, dtype, &random);
  const std::vector<float> v = RandomRows(kTestKeys, dim, dtype, &random);

  AlignedBuffer memory(2 * layout.block_bytes);
  const std::byte* blocks[2] = {memory.As<std::byte>(), memory.As<std::byte>() + layout.block_bytes};
  const size_t row_bytes = dim * sizeof(float);
  const RowsView k_rows{reinterpret_cast<const std::byte*>(k.data()), row_bytes, DType::kF32};
  const RowsView v_rows{reinterpret_cast<const std::byte*>(v.data()), row_bytes, DType::kF32};
  for (int first = 0; first < kTestKeys; first += kBlockTokens) {
    std::byte* block = memory.As<std::byte>() + first / kBlockTokens * layout.block_bytes;
    InitBlock(layout, block);
    WriteTokens(layout, block, 0, std::min(kBlockTokens, kTestKeys - first),
                {k_rows.data + first * row_bytes, row_bytes, DType::kF32},
                {v_rows.data + first * row_bytes, row_bytes, DType::kF32});
  }

  std::vector<float> out(q.size());
  AttentionWork work;
  work.shape = shape;
  work.heads = {groups, 1};
  work.softmax.softmax_scale = 1.0f / std::sqrt(static_cast<float>(dim));
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
                                                       dim,
                                                       dim,
                                                       work.softmax,
                                                       {},
                                                       work.first_position,
                                                       {q.begin(), q.end()},
                                                       {k.begin(), k.end()},
                                                       {v.begin(), v.end()}});
  double worst = 0;
  for (size_t row = 0; row < out.size(); row += dim) {
    double error = 0, norm = 0;
    for (size_t c = row; c < row + dim; ++c) {
      error += (out[c] - expected.out[c]) * (out[c] - expected.out[c]);
      norm += expected.out[c] * expected.out[c];
    }
    const double relative = std::sqrt(error / norm);
    worst = relative <= worst ? worst : relative;  // NaN counts as worse
  }
  return worst;
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

}  // namespace

std::string IsaName() { return OneDnnIsaName(); }

std::string OneDnnVersion() {
  const dnnl_version_t* version = dnnl_version();
  return std::to_string(version->major) + "." + std::to_string(version->minor) + "." + std::to_string(version->patch);
}

std::string KernelPath(KvDType dtype) { return ShapeKernels::Get({128, 128, dtype}).Description(); }

bool SelfTest(std::string* what) {
  what->clear();
  for (const KvDType dtype : {KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8}) {
    for (const int dim : kTestDims) {
      // Two rows (streaming where it serves few rows), and more than streaming serves.
      for (const int groups : {1, 31}) {
        const double error = WorstError(dtype, dim, groups);
        if (error <= Tolerance(dtype)) continue;
        *what = std::string("attention over ") + Name(dtype) + " with " + std::to_string(2 * groups) +
                " rows of dimension " + std::to_string(dim) + " is wrong on this machine: relative error " +
                std::to_string(error) + " (" + ShapeKernels::Get({dim, dim, dtype}).Description() + ")";
        return false;
      }
    }
  }
  return true;
}

}  // namespace attnd
