#include "server/engine/job.h"

namespace attnd {

AttentionWork SegmentRun::Work(int64_t begin, int64_t end, const std::byte* const* blocks) const {
  AttentionWork work;
  work.shape = layout->shape;
  work.heads = heads;
  work.softmax = softmax;
  work.mask = mask;
  work.mask.first_row += begin;
  work.num_queries = end - begin;
  work.first_position = first_position + begin;
  work.num_keys = kv_rows > 0 ? kv_start + RowsToWrite(end) : num_keys;
  work.num_blocks = (work.num_keys + kBlockTokens - 1) / kBlockTokens;
  work.blocks = blocks;
  work.q = q.row(begin);
  work.q_dtype = q.dtype;
  work.out = out + begin * out_row_bytes();
  work.out_dtype = out_dtype;
  if (lse != nullptr) work.lse = lse + begin * heads.num_q_heads;
  return work;
}

}  // namespace attnd
