// Sessions: what a fork and a beam search's reorder of long sessions take, beside a loop that touches as many counters
// of 4 bytes. Blocks are held and never looked at: no memory of theirs is used.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "kernels/block_layout.h"
#include "server/cache/session_cache.h"
#include "tests/bench/measure.h"
#include "tests/bench/modes.h"
#include "tests/bench/report.h"

namespace attnd::bench {
namespace {

// Tokens at the end of each beam that no other has.
constexpr int64_t kOwnTokens = 128;

class Sessions {
 public:
  Sessions(const Case& c, std::unique_ptr<BlockPool> pool) : case_(c), layout_(c.kv_shape()), pool_(std::move(pool)) {
    parent_ = Open();
    const std::vector<int64_t> lengths(c.layers, c.tokens), from_the_beginning(c.layers, 0);
    held_ = parent_->AllocateLayers(lengths, from_the_beginning);
    for (int i = 0; i < c.batch && held_; ++i) {
      std::unique_ptr<SessionCache>& beam = beams_.emplace_back(Open());
      const int64_t common = std::max<int64_t>(0, c.tokens - kOwnTokens) / kBlockTokens * kBlockTokens;
      beam->ShareFrom(*parent_, common);
      for (int layer = 0; layer < c.layers && held_; ++layer) held_ = Grow(beam.get(), layer, c.tokens - common);
      rows_.push_back(beam.get());
    }
    sources_.resize(rows_.size());
    std::iota(sources_.begin(), sources_.end(), 1);
    sources_.back() = 0;
    counters_.resize(references());
    row_counters_.resize(references() * rows_.size());
  }
  ~Sessions() {
    CloseForks();
    for (const auto& beam : beams_) Close(beam.get());
    Close(parent_.get());
  }

  bool held() const { return held_; }  // else the pool was too small
  size_t references() const {
    return static_cast<size_t>(case_.layers) * case_.shape.num_kv_heads *
           ((case_.tokens + kBlockTokens - 1) / kBlockTokens);
  }

  void Fork() {
    forks_.push_back(Open());
    forks_.back()->ShareFrom(*parent_, case_.tokens);
  }
  void CloseForks() {
    for (const auto& fork : forks_) Close(fork.get());
    forks_.clear();
  }
  // Each beam takes the next one's history: they stay as different as they are.
  void Reorder() { SessionCache::Reorder(rows_, sources_); }

  void TouchOfFork() { Touch(&counters_); }
  void TouchOfReorder() { Touch(&row_counters_); }

 private:
  std::unique_ptr<SessionCache> Open() {
    return std::make_unique<SessionCache>(pool_.get(), layout_.block_bytes, case_.layers, case_.shape.num_kv_heads);
  }
  static void Close(SessionCache* cache) {
    while (!cache->Release(1 << 20)) {
    }
  }
  static bool Grow(SessionCache* cache, int layer, int64_t tokens) {
    StagedAppend staged;
    if (!cache->Stage(layer, cache->length(layer), tokens, &staged)) return false;
    cache->Commit(&staged);
    return true;
  }
  static void Touch(std::vector<uint32_t>* counters) {
    for (uint32_t& counter : *counters) counter++;
    asm volatile("" : : "r"(counters->data()) : "memory");
  }

  const Case case_;
  const BlockLayout layout_;
  const std::unique_ptr<BlockPool> pool_;
  std::unique_ptr<SessionCache> parent_;
  std::vector<std::unique_ptr<SessionCache>> beams_, forks_;
  std::vector<SessionCache*> rows_;
  std::vector<int> sources_;
  std::vector<uint32_t> counters_, row_counters_;
  bool held_ = false;
};

int64_t PoolBytes(const Case& c) {
  const int64_t blocks = (c.tokens + kBlockTokens - 1) / kBlockTokens + c.batch * (kOwnTokens / kBlockTokens + 1);
  return blocks * c.layers * c.shape.num_kv_heads * static_cast<int64_t>(BlockLayout(c.kv_shape()).block_bytes);
}

bool RunCase(const Case& c) {
  absl::StatusOr<std::unique_ptr<BlockPool>> pool = BlockPool::Create({PoolBytes(c), false});
  if (!pool.ok()) {
    std::fprintf(stderr, "attnd_bench: %s\n", std::string(pool.status().message()).c_str());
    return false;
  }
  Sessions sessions(c, *std::move(pool));
  if (!sessions.held()) {
    std::fprintf(stderr, "attnd_bench: the pool is too small for its sessions\n");
    return false;
  }
  const std::vector<double> medians =
      MediansInterleaved(c.seconds,
                         {[&] { sessions.Fork(); }, [&] { sessions.TouchOfFork(); }, [&] { sessions.Reorder(); },
                          [&] { sessions.TouchOfReorder(); }},
                         [&](size_t) { sessions.CloseForks(); });
  const auto print = [&](const char* name, int rows, double seconds, double touch_seconds) {
    Case shown = c;
    shown.batch = rows;
    const double references = static_cast<double>(sessions.references()) * rows / 1e6;
    Row row;
    row.name = name;
    row.median_us = seconds * 1e6;
    row.value = references / seconds;
    row.unit = "Mref/s";
    row.roof = references / touch_seconds;
    row.bound = "touch";
    row.numbers = {{"layers", c.layers}, {"references", references * 1e6}, {"touch_us", touch_seconds * 1e6}};
    Print(shown, row);
  };
  print("session_fork", 1, medians[0], medians[1]);
  print("beam_reorder", c.batch, medians[2], medians[3]);
  return true;
}

}  // namespace

int RunSessions(const Options& options) {
  PrintHeading(options.json);
  bool measured = true;
  const bool possible = ForEachCase("sessions", options, [&](const Case& c) { measured = RunCase(c) && measured; });
  return possible && measured ? 0 : 1;
}

}  // namespace attnd::bench
