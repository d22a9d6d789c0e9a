// What a session is, in plain memory: the tokens of its layers, and which blocks it would hold. Its keys, values and
// answers follow from the tokens alone.
#ifndef ATTND_TESTS_UNIT_ENGINE_MODEL_MODEL_SESSION_H_
#define ATTND_TESTS_UNIT_ENGINE_MODEL_MODEL_SESSION_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "server/engine/engine.h"

namespace attnd {

// A sort of session. Those of one sort can be in one step and in one reorder.
struct ModelKind {
  int index = 0;
  SessionConfig config;
  int64_t block_bytes = 0;
  // All keys are 0: an answer is the mean of the values that its row sees, up to `tolerance`.
  bool is_mean = false;
  float tolerance = 0;

  int64_t window(int layer) const { return config.layer_windows.empty() ? 0 : config.layer_windows[layer]; }
};
absl::Span<const ModelKind> ModelKinds();

using ModelToken = uint32_t;

// Rows of these tokens, as a step brings them; layers differ.
std::vector<float> KeysOf(const ModelKind& kind, int layer, absl::Span<const ModelToken> tokens);
std::vector<float> ValuesOf(const ModelKind& kind, int layer, absl::Span<const ModelToken> tokens);
std::vector<float> QueriesOf(const ModelKind& kind, uint64_t seed, int64_t rows);

struct ModelBlock {
  uint64_t counted = 0;  // see CountBlocks
};

struct ModelLayer {
  std::vector<ModelToken> tokens;
  int64_t first_token = 0;
  std::vector<std::shared_ptr<ModelBlock>> blocks;  // null: freed; none while the session is on disk
  int64_t length() const { return static_cast<int64_t>(tokens.size()); }
};

class ModelSession {
 public:
  ModelSession(const ModelKind* kind, std::string id)
      : kind(kind), id(std::move(id)), reserve_tokens(kind->config.reserve_tokens), layers(kind->config.num_layers) {}

  const ModelKind* const kind;
  const std::string id;
  int64_t reserve_tokens;  // 0: a fork
  std::vector<ModelLayer> layers;
  // The turn in which it was used last, at least and at most: some calls that fail do not count.
  uint64_t used_since = 0, used_until = 0;
  bool on_disk = false;
  bool damaged = false;         // its file is
  int64_t outstanding = 0;      // bytes that it has reserved and does not hold, as the engine said last
  bool had_own_blocks = false;  // before the present turn

  int64_t longest() const;
  // Blocks of all heads. Those that an append would take; at most: if the last one is shared.
  int64_t FreshBlocks(int layer, int64_t start, int64_t num_tokens, bool at_most) const;
  int64_t HeldBytes() const;  // of its blocks, were it in memory and alone
  int64_t ReservedBytes() const;
  bool OwnsBlocks() const;  // it has some that nobody shares
  // A row at `position` of the layer sees no token that was freed.
  bool Holds(int layer, int64_t position) const;
  // "BAD_POSITION", "TOKENS_FREED", or "".
  std::string WhyNotCut(int64_t length) const;

  void Append(int layer, int64_t start, absl::Span<const ModelToken> tokens);
  void Cut(int64_t length);
  void ShareFrom(const ModelSession& from, int64_t length);
  void MoveToDisk();
  void MoveToMemory();
  // Adds the bytes of the blocks that were not counted yet under this number, and those with several references.
  void CountBlocks(uint64_t number, int64_t* used_bytes, int64_t* shared_bytes) const;

  // Same kind, tokens and reservation.
  bool IsLike(const ModelSession& other) const;
  // What the rows at [start, start + rows) see; false where one sees nothing.
  bool SeesSomething(int layer, int64_t start, int64_t rows) const;
  // Compares answers of those rows with the means of what they see; what is wrong, or "".
  std::string CheckMeans(int layer, int64_t start, int64_t rows, absl::Span<const float> out) const;

 private:
  void FreeBefore(ModelLayer* layer, int64_t position);
};

}  // namespace attnd

#endif  // ATTND_TESTS_UNIT_ENGINE_MODEL_MODEL_SESSION_H_
