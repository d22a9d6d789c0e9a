#include "client/attnctl/estimate.h"

namespace attnd::attnctl {
namespace {

int64_t BlockBytes(const client::SessionConfig& config) {
  const int64_t head_dim = config.head_dim;
  const int64_t value_dim = config.value_dim_or_default();
  switch (config.kv_dtype) {
    case client::KvDType::kF32:
      return kBlockTokens * 4 * (head_dim + value_dim);
    // K is stored in pairs along head_dim, so an odd one is padded.
    case client::KvDType::kBf16:
      return kBlockTokens * 2 * ((head_dim + 1) / 2 * 2 + value_dim);
    case client::KvDType::kF16:
      return kBlockTokens * 2 * (head_dim + value_dim);
    // K in quads, and an f32 scale per token for K and for V.
    case client::KvDType::kInt8:
      return kBlockTokens * ((head_dim + 3) / 4 * 4 + value_dim + 8);
  }
  return 0;
}

}  // namespace

Estimate EstimateCost(const client::SessionConfig& config, int64_t tokens, int64_t sessions, client::DType wire) {
  const int64_t head_dim = config.head_dim;
  const int64_t value_dim = config.value_dim_or_default();
  const int64_t heads = int64_t{config.num_layers} * config.num_kv_heads;
  const int64_t wire_bytes = static_cast<int64_t>(client::DTypeBytes(wire)) * config.num_layers;
  Estimate estimate;
  estimate.block_bytes = BlockBytes(config);
  estimate.bytes_per_token = heads * estimate.block_bytes / kBlockTokens;
  estimate.blocks_per_session = heads * ((tokens + kBlockTokens - 1) / kBlockTokens);
  estimate.session_bytes = estimate.blocks_per_session * estimate.block_bytes;
  estimate.total_bytes = estimate.session_bytes * sessions;
  estimate.request_bytes = wire_bytes * (config.num_q_heads * head_dim + config.num_kv_heads * (head_dim + value_dim));
  estimate.answer_bytes = wire_bytes * config.num_q_heads * value_dim;
  return estimate;
}

}  // namespace attnd::attnctl
