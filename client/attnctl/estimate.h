// What a model costs in cache memory and in traffic: pure arithmetic from the contract and the block layout.
#ifndef ATTND_CLIENT_ATTNCTL_ESTIMATE_H_
#define ATTND_CLIENT_ATTNCTL_ESTIMATE_H_

#include <cstdint>

#include "client/cpp/types.h"

namespace attnd::attnctl {

inline constexpr int64_t kBlockTokens = 64;  // unit of KV memory, per layer and kv head

struct Estimate {
  int64_t block_bytes = 0;         // one kv head of one layer
  int64_t bytes_per_token = 0;     // all layers and heads
  int64_t blocks_per_session = 0;  // whole blocks
  int64_t session_bytes = 0;       // of those blocks
  int64_t total_bytes = 0;         // all sessions
  int64_t request_bytes = 0;       // Q, K and V of one token in all layers
  int64_t answer_bytes = 0;        // their outputs
};

// `tokens` of context in each of `sessions`; tensors travel as `wire`. REQUIRES: a valid config, tokens >= 1.
Estimate EstimateCost(const client::SessionConfig& config, int64_t tokens, int64_t sessions, client::DType wire);

}  // namespace attnd::attnctl

#endif  // ATTND_CLIENT_ATTNCTL_ESTIMATE_H_
