// attnd's side of tests/bench/peers: computes the attention that the driver describes through the server's own kernels
// and threads, one timed call on demand. It speaks the protocol of side.py, a line of words each way:
//
//   prepare Q_HEADS KV_HEADS HEAD_DIM BATCH TOKENS QUERIES DTYPE LAYERS DATA   -> ok
//   threads N                                                                  -> ok FORM...
//   output FORM FILE    writes layer 0's answer, f32 [batch, queries, q_heads, head_dim]   -> ok
//   run FORM            one timed call on the next layer                       -> ok MICROSECONDS APPEND_MICROSECONDS
//
// MICROSECONDS is the attention alone, APPEND_MICROSECONDS the writing of the call's own tokens into their blocks.
#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/append.h"
#include "kernels/attention.h"
#include "kernels/block_layout.h"
#include "kernels/cpu_paths.h"
#include "server/cache/arena.h"
#include "server/engine/worker_pool.h"

namespace attnd::bench {
namespace {

// Of untimed calls before each timed one, on every side: side.py says why.
constexpr double kWarmUpUs = 3e3;

struct Case {
  HeadCounts heads;
  int head_dim = 0;
  int64_t batch = 0, tokens = 0;
  int64_t queries = 0;  // the last ones of `tokens`: they are what a call appends
  KvDType kv = KvDType::kF32;
  int64_t layers = 0;

  DType dtype() const { return kv == KvDType::kF32 ? DType::kF32 : DType::kBf16; }
  KvShape shape() const { return {head_dim, head_dim, kv}; }
  int64_t num_blocks() const { return (tokens + kBlockTokens - 1) / kBlockTokens; }
};

// The driver's tensors are f32 whatever the case's dtype, and hold only numbers that bf16 holds too.
std::vector<std::byte> ReadTensor(const std::string& path, size_t elements, DType dtype) {
  std::vector<float> numbers(elements);
  std::ifstream file(path, std::ios::binary);
  const auto bytes = static_cast<std::streamsize>(elements * sizeof(float));
  if (!file.read(reinterpret_cast<char*>(numbers.data()), bytes)) throw std::runtime_error("cannot read " + path);
  std::vector<std::byte> tensor(elements * DTypeBytes(dtype));
  for (size_t i = 0; i < elements; ++i) {
    const uint32_t word = std::bit_cast<uint32_t>(numbers[i]);
    const uint16_t half = static_cast<uint16_t>(word >> 16);
    if (dtype == DType::kF32) {
      std::memcpy(&tensor[i * sizeof(word)], &word, sizeof(word));
    } else {
      std::memcpy(&tensor[i * sizeof(half)], &half, sizeof(half));
    }
  }
  return tensor;
}

void WriteTensor(const std::string& path, const std::vector<std::byte>& tensor, DType dtype) {
  std::vector<uint32_t> words(tensor.size() / DTypeBytes(dtype));
  for (size_t i = 0; i < words.size(); ++i) {
    uint16_t half = 0;
    if (dtype == DType::kF32) {
      std::memcpy(&words[i], &tensor[i * sizeof(uint32_t)], sizeof(uint32_t));
    } else {
      std::memcpy(&half, &tensor[i * sizeof(half)], sizeof(half));
      words[i] = uint32_t{half} << 16;
    }
  }
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(words.data()), static_cast<std::streamsize>(words.size() * 4));
  if (!file.flush()) throw std::runtime_error("cannot write " + path);
}

double MicrosecondsOf(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
}

class Side {
 public:
  void Prepare(const Case& c, const std::string& data);
  void SetThreads(int threads);
  void Append(int64_t layer);
  void Attend(int64_t layer);
  void Output(const std::string& path);
  // Attention alone, and the append before it.
  std::pair<double, double> Run();

 private:
  std::byte* block(int64_t layer, int64_t session, int64_t head, int64_t index) const {
    return blocks_[((layer * case_.batch + session) * case_.heads.num_kv_heads + head) * case_.num_blocks() + index];
  }
  void WriteBlock(int64_t layer, int64_t session, int64_t head, int64_t index, int64_t first_token);

  Case case_;
  std::unique_ptr<BlockLayout> layout_;
  std::unique_ptr<Arena> arena_;
  std::vector<std::byte*> blocks_;  // [layer][session][kv head][block]
  std::vector<std::byte> q_, k_, v_, out_;
  std::unique_ptr<WorkerPool> pool_;
  std::unique_ptr<AttentionBatch> batch_;
  int64_t turn_ = 0;
};

void Side::Prepare(const Case& c, const std::string& data) {
  blocks_.clear();
  arena_.reset();
  case_ = c;
  layout_ = std::make_unique<BlockLayout>(c.shape());
  const size_t kv_elements = c.batch * c.tokens * c.heads.num_kv_heads * c.head_dim;
  const size_t q_elements = c.batch * c.queries * c.heads.num_q_heads * c.head_dim;
  q_ = ReadTensor(data + ".q", q_elements, c.dtype());
  k_ = ReadTensor(data + ".k", kv_elements, c.dtype());
  v_ = ReadTensor(data + ".v", kv_elements, c.dtype());
  out_.assign(q_.size(), std::byte{0});

  const size_t layer_blocks = c.batch * c.heads.num_kv_heads * c.num_blocks();
  const size_t layer_bytes = layer_blocks * layout_->block_bytes;
  absl::StatusOr<std::unique_ptr<Arena>> arena = Arena::Create(static_cast<int64_t>(layer_bytes * c.layers));
  if (!arena.ok()) throw std::runtime_error(std::string(arena.status().message()));
  arena_ = *std::move(arena);
  // The arena's pages are contiguous: blocks are laid one after the other, as a session's appends leave them.
  for (size_t i = 0; i < layer_blocks * c.layers; ++i) {
    blocks_.push_back(arena_->page(0) + i * layout_->block_bytes);
  }
  for (int64_t session = 0; session < c.batch; ++session) {
    for (int64_t head = 0; head < c.heads.num_kv_heads; ++head) {
      for (int64_t b = 0; b < c.num_blocks(); ++b) WriteBlock(0, session, head, b, 0);
    }
  }
  for (int64_t layer = 1; layer < c.layers; ++layer) std::memcpy(block(layer, 0, 0, 0), block(0, 0, 0, 0), layer_bytes);
}

// Writes the tokens from `first_token` on that belong to the block.
void Side::WriteBlock(int64_t layer, int64_t session, int64_t head, int64_t index, int64_t first_token) {
  const int64_t first = std::max(first_token, index * kBlockTokens);
  const int64_t end = std::min(case_.tokens, (index + 1) * kBlockTokens);
  const size_t head_bytes = case_.head_dim * DTypeBytes(case_.dtype());
  const size_t row_bytes = head_bytes * case_.heads.num_kv_heads;
  const size_t offset = (session * case_.tokens + first) * row_bytes + head * head_bytes;
  std::byte* const to = block(layer, session, head, index);
  if (first % kBlockTokens == 0) InitBlock(*layout_, to);
  WriteTokens(*layout_, to, static_cast<int>(first % kBlockTokens), static_cast<int>(end - first),
              {&k_[offset], row_bytes, case_.dtype()}, {&v_[offset], row_bytes, case_.dtype()});
}

void Side::SetThreads(int threads) {
  // The pool's limit on oneTBB's threads is global and the smallest one counts: the old pool goes first.
  pool_.reset();
  pool_ = std::make_unique<WorkerPool>(threads);
  batch_ = std::make_unique<AttentionBatch>(threads);
  turn_ = 0;
}

void Side::Append(int64_t layer) {
  const int64_t first_token = case_.tokens - case_.queries;
  const int64_t first_block = first_token / kBlockTokens;
  const int64_t touched = case_.num_blocks() - first_block;
  const int64_t heads = case_.heads.num_kv_heads;
  const auto write = [&](int64_t task, int) {
    WriteBlock(layer, task / touched / heads, task / touched % heads, first_block + task % touched, first_token);
  };
  // As the engine does: a single token a session is not worth waking a thread for.
  if (case_.queries == 1) {
    WorkerPool::RunInline(case_.batch * heads * touched, write);
  } else {
    pool_->Run(case_.batch * heads * touched, write);
  }
}

void Side::Attend(int64_t layer) {
  batch_->Clear();
  const size_t session_bytes = q_.size() / case_.batch;
  for (int64_t session = 0; session < case_.batch; ++session) {
    AttentionWork work;
    work.shape = case_.shape();
    work.heads = case_.heads;
    work.softmax.softmax_scale = 1.0f / std::sqrt(static_cast<float>(case_.head_dim));
    work.num_queries = case_.queries;
    work.first_position = case_.tokens - case_.queries;
    work.num_keys = case_.tokens;
    work.num_blocks = case_.num_blocks();
    work.blocks = &blocks_[(layer * case_.batch + session) * case_.heads.num_kv_heads * case_.num_blocks()];
    work.q = &q_[session * session_bytes];
    work.out = &out_[session * session_bytes];
    work.q_dtype = work.out_dtype = case_.dtype();
    batch_->Add(work);
  }
  const int tasks = batch_->Plan();
  pool_->Run(tasks, [this](int64_t task, int thread) { batch_->Run(static_cast<int>(task), thread); });
}

void Side::Output(const std::string& path) {
  Append(0);
  Attend(0);
  WriteTensor(path, out_, case_.dtype());
}

std::pair<double, double> Side::Run() {
  const auto next_layer = [this] { return turn_++ % case_.layers; };
  for (double us = 0; us < kWarmUpUs;) {
    us += MicrosecondsOf([&] {
      const int64_t layer = next_layer();
      Append(layer);
      Attend(layer);
    });
  }
  const int64_t layer = next_layer();
  const double append_us = MicrosecondsOf([&] { Append(layer); });
  return {MicrosecondsOf([&] { Attend(layer); }), append_us};
}

bool ReadCase(std::istream& words, Case* c, std::string* data) {
  std::string dtype;
  words >> c->heads.num_q_heads >> c->heads.num_kv_heads >> c->head_dim >> c->batch >> c->tokens >> c->queries >>
      dtype >> c->layers >> *data;
  c->kv = dtype == "f32" ? KvDType::kF32 : KvDType::kBf16;
  return !words.fail() && (dtype == "f32" || dtype == "bf16");
}

std::string Answer(Side* side, const std::string& line) {
  std::istringstream words(line);
  std::string command, form, path;
  words >> command;
  if (command == "prepare") {
    Case c;
    if (!ReadCase(words, &c, &path)) return "error bad case";
    side->Prepare(c, path);
    return "ok";
  }
  if (command == "threads") {
    int threads = 0;
    if (!(words >> threads) || threads < 1) return "error bad number of threads";
    side->SetThreads(threads);
    return "ok blocks";
  }
  words >> form;
  if (command == "output" && words >> path) {
    side->Output(path);
    return "ok";
  }
  if (command == "run") {
    const auto [attend_us, append_us] = side->Run();
    return "ok " + std::to_string(attend_us) + " " + std::to_string(append_us);
  }
  return "error unknown command";
}

}  // namespace
}  // namespace attnd::bench

int main() {
  attnd::bench::Side side;
  std::cout << "ok " << attnd::IsaName() << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    try {
      std::cout << attnd::bench::Answer(&side, line) << std::endl;
    } catch (const std::exception& error) {
      std::cout << "error " << error.what() << std::endl;
      return 1;
    }
  }
  return 0;
}
