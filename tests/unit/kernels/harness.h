// A small attention problem with everything around it: random tensors, blocks in memory that held NaN before, a
// permuted block table, and the float64 reference on the values as stored.
#ifndef ATTND_TESTS_UNIT_KERNELS_HARNESS_H_
#define ATTND_TESTS_UNIT_KERNELS_HARNESS_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "kernels/aligned_buffer.h"
#include "kernels/attention.h"
#include "kernels/reference.h"

namespace attnd::testing {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInf = std::numeric_limits<float>::infinity();

// The numeric contract: largest ||out - reference|| / ||reference|| of a row.
double RowTolerance(KvDType dtype);

// The value as an element of the type holds it.
float Rounded(float value, DType dtype);
// Rows of `dim` values as blocks of the dtype hold them.
std::vector<float> Stored(const std::vector<float>& values, int dim, KvDType dtype);

// For INSTANTIATE_TEST_SUITE_P.
inline auto AllKvDTypes() { return ::testing::Values(KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8); }
const char* Name(KvDType dtype);
inline std::string KvParamName(const ::testing::TestParamInfo<KvDType>& info) { return Name(info.param); }

struct Problem {
  KvShape shape{16, 16, KvDType::kF32};
  HeadCounts heads{1, 1};
  SoftmaxOptions softmax;
  MaskView mask;
  int64_t num_queries = 1;
  int64_t num_keys = 1;
  int64_t first_position = 0;
  DType q_dtype = DType::kF32;
  DType out_dtype = DType::kF32;
  // As the caller gives them; f32, already representable in q_dtype.
  std::vector<float> q, k, v;

  // Queries are the last ones, as in a session.
  Problem& Lengths(int64_t queries, int64_t keys);
  // Normal q and k; v normal, or from 0.5 to 1.5 where a row is so short that it could cancel to nothing.
  Problem& Fill(unsigned seed);
  std::string Describe() const;
};

// Blocks that hold a problem's K and V.
class Blocks {
 public:
  // All memory is NaN before; block tables are permuted by the seed.
  explicit Blocks(const Problem& problem, unsigned seed = 1);
  const std::byte* const* table() const { return table_.data(); }
  int64_t num_blocks() const { return num_blocks_; }
  void Drop(int kv_head, int64_t block) { table_[kv_head * num_blocks_ + block] = nullptr; }

 private:
  int64_t num_blocks_;
  AlignedBuffer memory_;
  std::vector<const std::byte*> table_;
};

struct Answer {
  std::vector<float> out;  // widened from out_dtype
  std::vector<float> lse;
  std::vector<float> weights;  // if asked for
  AttentionResult result;
};

// How a problem is run. Bits must not depend on any of it.
struct How {
  int threads = 1;
  unsigned task_order = 0;      // 0: as planned; otherwise the seed of a permutation
  std::vector<int64_t> chunks;  // query tokens per work; empty: one work
  int64_t visible_beyond = 0;   // 0: chunks see the keys up to their own last position only
  bool weights = false;
  bool misaligned = false;
  bool real_threads = false;  // run tasks on std::threads instead of one after the other
};

// A work of queries [first, first + count) with q and out taken from the given buffers.
AttentionWork MakeWork(const Problem& problem, const Blocks& blocks, const std::byte* q, std::byte* out, float* lse);

void RunTasks(AttentionBatch* batch, const How& how);
Answer Attend(const Problem& problem, const Blocks& blocks, const How& how = {});
Answer Attend(const Problem& problem, const How& how = {});

ReferenceOutput Expected(const Problem& problem);

// Checks out, lse and (if there) weights against the reference.
void ExpectRight(const Problem& problem, const Answer& answer, double tolerance_factor = 1.0);
void ExpectRight(const Problem& problem, const How& how = {});

// Compares bits.
void ExpectSameBits(const Answer& x, const Answer& y, const std::string& what);

}  // namespace attnd::testing

#endif  // ATTND_TESTS_UNIT_KERNELS_HARNESS_H_
