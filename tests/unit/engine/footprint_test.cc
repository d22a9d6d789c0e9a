// What sessions cost in memory beside their blocks.
#include <gtest/gtest.h>
#include <malloc.h>
#include <unistd.h>

#include <fstream>

#include "tests/unit/engine/engine_harness.h"

namespace attnd {
namespace {

int64_t ResidentBytes() {
  int64_t size = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

int64_t HeapBytes() {
  const struct mallinfo2 info = mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
}

// Appends to one layer without asking for an answer.
void Append(Harness* h, const std::string& id, int layer, const std::vector<float>& k, const std::vector<float>& v,
            int64_t tokens) {
  StepArgs args;
  args.layer = layer;
  args.segments.push_back({id, tokens, {}, false, {}});
  args.k = k;
  args.v = v;
  ASSERT_TRUE(h->Step(std::move(args)).status.ok());
}

TEST(Footprint, AHundredThousandIdleSessionsOf64TokensTakeTheirBlocksAnd2KiBEach) {
  constexpr int kSessions = 100000, kDim = 8;
  EngineOptions options = Harness::DefaultOptions();
  options.poison_cache = false;
  options.kv_cache_bytes = int64_t{1} << 30;
  options.max_sessions = kSessions + 1;
  Harness h(options);
  SessionConfig config = TinyConfig();
  config.shape = {kDim, kDim, KvDType::kF32};
  const std::vector<float> rows(64 * kDim, 0.5f);
  Append(&h, h.Create(config), 0, rows, rows, 64);  // what the first one costs, such as its kernels, is paid
  const int64_t before = ResidentBytes(), used_before = h.used_bytes();
  for (int i = 0; i < kSessions; i++) Append(&h, h.Create(config), 0, rows, rows, 64);
  const int64_t blocks = h.used_bytes() - used_before;
  EXPECT_EQ(blocks, int64_t{kSessions} * 64 * 2 * kDim * 4);
  const int64_t beside = (ResidentBytes() - before - blocks) / kSessions;
  RecordProperty("bytes_a_session", std::to_string(beside));
  EXPECT_LE(beside, 2048);
  EXPECT_GE(h.engine->stats().sessions_active, kSessions);
}

TEST(Footprint, MetadataIsAPercentOfA4096TokenSession) {
  constexpr int kLayers = 30, kHeads = 3, kDim = 64;  // SmolLM2-135M
  EngineOptions options = Harness::DefaultOptions();
  options.poison_cache = false;
  options.kv_cache_bytes = int64_t{512} << 20;
  Harness h(options);
  SessionConfig config = TinyConfig();
  config.num_layers = kLayers;
  config.heads = {9, kHeads};
  config.shape = {kDim, kDim, KvDType::kBf16};
  const std::vector<float> rows(size_t{64} * kHeads * kDim, 0.5f);
  const std::string first = h.Create(config);
  Append(&h, first, 0, rows, rows, 64);
  const int64_t before = HeapBytes(), used_before = h.used_bytes();
  const std::string id = h.Create(config);
  for (int layer = 0; layer < kLayers; layer++) {
    for (int step = 0; step < 64; step++) Append(&h, id, layer, rows, rows, 64);
  }
  const int64_t used = h.used_bytes() - used_before;
  EXPECT_EQ(used, int64_t{kLayers} * kHeads * 4096 * 2 * kDim * 2);
  EXPECT_LE(HeapBytes() - before, used / 100);
}

}  // namespace
}  // namespace attnd
