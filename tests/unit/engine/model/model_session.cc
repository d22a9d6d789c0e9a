#include "tests/unit/engine/model/model_session.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kernels/block_layout.h"
#include "tests/unit/engine/model/choices.h"

namespace attnd {
namespace {

int64_t BlockCount(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

uint64_t RowSeed(int layer, ModelToken token) { return (uint64_t{token} << 8 | static_cast<uint64_t>(layer)) << 16; }

// Small whole numbers: their sums are exact.
float ValueOf(uint64_t row_seed, int element) {
  return static_cast<float>(static_cast<int>(Mix(row_seed + element) >> 60)) - 4.0f;
}

float FractionOf(uint64_t hash) { return (static_cast<float>(hash >> 56) - 128.0f) / 64.0f; }

ModelKind MakeKind(int layers, HeadCounts heads, KvShape shape, bool is_mean) {
  ModelKind kind;
  kind.config.num_layers = layers;
  kind.config.heads = heads;
  kind.config.shape = shape;
  kind.config.softmax_scale = 0.5f;
  kind.config.ttl = absl::InfiniteDuration();
  kind.block_bytes = static_cast<int64_t>(BlockLayout(shape).block_bytes);
  kind.is_mean = is_mean;
  // INT8: the largest value is 11, in steps of 11 / 127.
  kind.tolerance = shape.dtype == KvDType::kInt8 ? 0.05f : 1e-4f;
  return kind;
}

std::vector<ModelKind> MakeKinds() {
  std::vector<ModelKind> kinds = {
      MakeKind(1, {1, 1}, {1, 1, KvDType::kF32}, true),  MakeKind(2, {4, 2}, {4, 2, KvDType::kF32}, false),
      MakeKind(1, {2, 1}, {4, 4, KvDType::kBf16}, true), MakeKind(1, {2, 2}, {8, 4, KvDType::kInt8}, true),
      MakeKind(2, {1, 1}, {1, 1, KvDType::kF32}, true),  MakeKind(3, {2, 1}, {4, 4, KvDType::kBf16}, false),
      MakeKind(1, {1, 1}, {1, 1, KvDType::kF32}, true),  MakeKind(1, {1, 1}, {1, 1, KvDType::kF32}, true),
      MakeKind(2, {2, 1}, {8, 4, KvDType::kInt8}, false)};
  kinds[4].config.layer_windows = {70, 0};
  kinds[5].config.layer_windows = {0, 64, 3};
  kinds[6].config.reserve_tokens = 130;
  kinds[7].config.max_tokens = 100;
  kinds[8].config.reserve_tokens = 64;
  kinds[8].config.layer_windows = {0, 65};
  for (size_t i = 0; i < kinds.size(); i++) kinds[i].index = static_cast<int>(i);
  return kinds;
}

}  // namespace

absl::Span<const ModelKind> ModelKinds() {
  static const std::vector<ModelKind>& kinds = *new std::vector<ModelKind>(MakeKinds());
  return kinds;
}

std::vector<float> KeysOf(const ModelKind& kind, int layer, absl::Span<const ModelToken> tokens) {
  const int row = kind.config.heads.num_kv_heads * kind.config.shape.head_dim;
  std::vector<float> out(tokens.size() * row);
  if (kind.is_mean) return out;
  auto next = out.begin();
  for (const ModelToken token : tokens) {
    for (int i = 0; i < row; i++) *next++ = FractionOf(Mix(RowSeed(layer, token) + 0x8000 + i));
  }
  return out;
}

std::vector<float> ValuesOf(const ModelKind& kind, int layer, absl::Span<const ModelToken> tokens) {
  const int row = kind.config.heads.num_kv_heads * kind.config.shape.value_dim;
  std::vector<float> out(tokens.size() * row);
  auto next = out.begin();
  for (const ModelToken token : tokens) {
    for (int i = 0; i < row; i++) *next++ = ValueOf(RowSeed(layer, token), i);
  }
  return out;
}

std::vector<float> QueriesOf(const ModelKind& kind, uint64_t seed, int64_t rows) {
  std::vector<float> out(rows * kind.config.heads.num_q_heads * kind.config.shape.head_dim);
  for (size_t i = 0; i < out.size(); i++) out[i] = FractionOf(Mix((seed << 20) + i));
  return out;
}

int64_t ModelSession::longest() const {
  int64_t longest = 0;
  for (const ModelLayer& layer : layers) longest = std::max(longest, layer.length());
  return longest;
}

int64_t ModelSession::FreshBlocks(int layer, int64_t start, int64_t num_tokens, bool at_most) const {
  const ModelLayer& l = layers[layer];
  const bool in_place = !at_most && start == l.length() && start % kBlockTokens != 0 &&
                        (on_disk || l.blocks[start / kBlockTokens].use_count() == 1);
  const int64_t first = in_place ? BlockCount(start) : start / kBlockTokens;
  return (BlockCount(start + num_tokens) - first) * kind->config.heads.num_kv_heads;
}

int64_t ModelSession::HeldBytes() const {
  int64_t blocks = 0;
  for (const ModelLayer& l : layers) blocks += BlockCount(l.length()) - l.first_token / kBlockTokens;
  return blocks * kind->config.heads.num_kv_heads * kind->block_bytes;
}

int64_t ModelSession::ReservedBytes() const {
  return BlockCount(reserve_tokens) * static_cast<int64_t>(layers.size()) * kind->config.heads.num_kv_heads *
         kind->block_bytes;
}

bool ModelSession::OwnsBlocks() const {
  for (const ModelLayer& l : layers) {
    for (const auto& block : l.blocks) {
      if (block.use_count() == 1) return true;
    }
  }
  return false;
}

bool ModelSession::Holds(int layer, int64_t position) const {
  const int64_t window = kind->window(layer);
  return window == 0 || std::max<int64_t>(0, position - window + 1) >= layers[layer].first_token;
}

std::string ModelSession::WhyNotCut(int64_t length) const {
  if (length < 0 || length > longest()) return "BAD_POSITION";
  for (size_t i = 0; i < layers.size() && length > 0; i++) {
    if (length < layers[i].length() && !Holds(static_cast<int>(i), length)) return "TOKENS_FREED";
  }
  return "";
}

void ModelSession::Append(int layer, int64_t start, absl::Span<const ModelToken> tokens) {
  ModelLayer& l = layers[layer];
  const int64_t end = start + static_cast<int64_t>(tokens.size());
  const int64_t fresh =
      FreshBlocks(layer, start, static_cast<int64_t>(tokens.size()), false) / kind->config.heads.num_kv_heads;
  l.blocks.resize(BlockCount(end) - fresh);
  for (int64_t i = 0; i < fresh; i++) l.blocks.push_back(std::make_shared<ModelBlock>());
  if (start == 0) l.first_token = 0;
  l.tokens.resize(start);
  l.tokens.insert(l.tokens.end(), tokens.begin(), tokens.end());
  const int64_t window = kind->window(layer);
  if (window > 0) FreeBefore(&l, std::max<int64_t>(0, start - window + 1));
}

void ModelSession::FreeBefore(ModelLayer* layer, int64_t position) {
  for (int64_t i = layer->first_token / kBlockTokens; i < position / kBlockTokens; i++) layer->blocks[i] = nullptr;
  layer->first_token = std::max(layer->first_token, position / kBlockTokens * kBlockTokens);
}

void ModelSession::Cut(int64_t length) {
  for (ModelLayer& l : layers) {
    if (length >= l.length()) continue;
    l.tokens.resize(length);
    l.blocks.resize(BlockCount(length));
    if (length == 0) l.first_token = 0;
  }
}

void ModelSession::ShareFrom(const ModelSession& from, int64_t length) {
  layers = from.layers;
  for (ModelLayer& l : layers) {
    if (length >= l.length()) continue;
    l.tokens.resize(length);
    l.blocks.resize(BlockCount(length));
    if (length == 0) l.first_token = 0;
  }
}

void ModelSession::MoveToDisk() {
  on_disk = true;
  for (ModelLayer& l : layers) l.blocks.clear();
}

void ModelSession::MoveToMemory() {
  on_disk = damaged = false;
  for (ModelLayer& l : layers) {
    l.blocks.assign(BlockCount(l.length()), nullptr);
    for (int64_t i = l.first_token / kBlockTokens; i < BlockCount(l.length()); i++) {
      l.blocks[i] = std::make_shared<ModelBlock>();
    }
  }
}

bool ModelSession::IsLike(const ModelSession& other) const {
  if (kind != other.kind || reserve_tokens != other.reserve_tokens) return false;
  for (size_t i = 0; i < layers.size(); i++) {
    const ModelLayer &a = layers[i], &b = other.layers[i];
    if (a.tokens != b.tokens || a.first_token != b.first_token) return false;
  }
  return true;
}

void ModelSession::CountBlocks(uint64_t number, int64_t* used_bytes, int64_t* shared_bytes) const {
  const int64_t bytes = kind->block_bytes * kind->config.heads.num_kv_heads;
  for (const ModelLayer& l : layers) {
    for (const auto& block : l.blocks) {
      if (block == nullptr || block->counted == number) continue;
      block->counted = number;
      *used_bytes += bytes;
      if (block.use_count() > 1) *shared_bytes += bytes;
    }
  }
}

bool ModelSession::SeesSomething(int layer, int64_t start, int64_t rows) const {
  const int64_t length = layers[layer].length(), window = kind->window(layer);
  // The last row's window begins last.
  const int64_t last = start + rows - 1;
  return length > 0 && (window == 0 || std::max<int64_t>(0, last - window + 1) < length);
}

std::string ModelSession::CheckMeans(int layer, int64_t start, int64_t rows, absl::Span<const float> out) const {
  const ModelLayer& l = layers[layer];
  const int kv_heads = kind->config.heads.num_kv_heads, q_heads = kind->config.heads.num_q_heads;
  const int dim = kind->config.shape.value_dim, group = q_heads / kv_heads;
  const int64_t window = kind->window(layer);
  for (int h = 0; h < kv_heads; h++) {
    for (int d = 0; d < dim; d++) {
      double sum = 0;
      int64_t begin = 0, end = 0;  // what is summed
      for (int64_t row = 0; row < rows; row++) {
        const int64_t position = start + row;
        const auto value = [&](int64_t at) { return ValueOf(RowSeed(layer, l.tokens[at]), h * dim + d); };
        for (; end < std::min(position + 1, l.length()); end++) sum += value(end);
        for (; window > 0 && begin < position - window + 1; begin++) sum -= value(begin);
        const float expected = static_cast<float>(sum / static_cast<double>(end - begin));
        for (int q = h * group; q < (h + 1) * group; q++) {
          const float got = out[(row * q_heads + q) * dim + d];
          if (std::abs(got - expected) <= kind->tolerance) continue;  // a NaN is not
          return absl::StrCat("row ", row, " (position ", position, "), head ", q, ", element ", d, ": ", got,
                              ", expected ", expected);
        }
      }
    }
  }
  return "";
}

}  // namespace attnd
