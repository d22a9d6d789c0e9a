#include "server/engine/step_plan.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/engine/errors.h"
#include "server/engine/window.h"

namespace attnd {
namespace {

using absl::StrCat;

constexpr absl::Duration kCacheRetryDelay = absl::Milliseconds(500);

absl::Status BadShape(const std::string& message) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SHAPE", message);
}

absl::Status BadPosition(const std::string& message, int64_t length) {
  return MakeError(absl::StatusCode::kFailedPrecondition, "BAD_POSITION",
                   StrCat(message, "; the layer's length is ", length), {{"length", StrCat(length)}});
}

absl::Status TooManyTokens(const std::string& message, int64_t requested, int64_t limit) {
  return MakeError(absl::StatusCode::kResourceExhausted, "TOO_MANY_TOKENS", message,
                   {{"requested", StrCat(requested)}, {"limit", StrCat(limit)}});
}

// Everything is far from overflowing: tokens <= 2^30, heads <= 4096, dim <= 256.
absl::Status CheckBytes(absl::string_view name, int64_t tokens, const TensorView& view, size_t bytes) {
  const size_t expected = static_cast<size_t>(tokens) * view.row_bytes();
  if (bytes == expected) return absl::OkStatus();
  return BadShape(StrCat(name, " of ", tokens, " tokens, ", view.heads, " heads and ", view.dim, " elements of ",
                         DTypeBytes(view.dtype), " bytes has ", expected, " bytes, got ", bytes));
}

// The segment alone, before anything is known of the layer's length.
absl::Status CheckSegment(const StepTask& step, const StepSegment& segment, const Session& session, int64_t capacity) {
  const SessionConfig& config = session.model->config;
  if (step.layer < 0 || step.layer >= config.num_layers) {
    return BadShape(StrCat("layer ", step.layer, " of a session of ", config.num_layers, " layers"));
  }
  if (step.k_bytes == 0) return absl::OkStatus();
  if (config.max_tokens > 0 && segment.num_tokens > config.max_tokens) {
    return TooManyTokens(StrCat(segment.num_tokens, " tokens in a session of at most ", config.max_tokens),
                         segment.num_tokens, config.max_tokens);
  }
  const int64_t bytes = session.cache.BlocksFor(segment.num_tokens) * static_cast<int64_t>(session.cache.block_bytes());
  if (bytes > capacity) {
    return TooManyTokens(
        StrCat(segment.num_tokens, " tokens of one layer need ", bytes, " bytes of cache, which has ", capacity), bytes,
        capacity);
  }
  return absl::OkStatus();
}

void FillRun(const StepTask& step, const StepSegment& segment, SegmentRun* run) {
  const SessionModel& model = *run->session->model;
  const SessionConfig& config = model.config;
  run->layout = &model.layout;
  run->heads = config.heads;
  run->softmax.softmax_scale = config.softmax_scale;
  run->softmax.softcap = config.softcap;
  run->softmax.causal = config.causal;
  run->softmax.window = WindowOf(config, step.layer);
  run->softmax.alibi_slopes = config.alibi_slopes.empty() ? nullptr : config.alibi_slopes.data();
  run->softmax.sinks = config.sinks.empty() ? nullptr : config.sinks.data();
  run->mask = segment.mask;
  run->mask.columns = segment.num_tokens;
  run->zero_empty_rows = step.zero_empty_rows;
  run->out_dtype = step.out_dtype;
  const auto view = [&](const std::byte* data, size_t bytes, DType dtype, int heads, int dim) {
    TensorView v{bytes > 0 ? data : nullptr, dtype, heads, dim};
    if (v.data != nullptr) v.data += run->first_token * v.row_bytes();
    return v;
  };
  run->q = view(step.q, step.q_bytes, step.q_dtype, config.heads.num_q_heads, config.shape.head_dim);
  run->k = view(step.k, step.k_bytes, step.k_dtype, config.heads.num_kv_heads, config.shape.head_dim);
  run->v = view(step.v, step.v_bytes, step.v_dtype, config.heads.num_kv_heads, config.shape.value_dim);
  run->kv_rows = run->k.data != nullptr ? segment.num_tokens : 0;
}

std::string DescribeHeads(const SessionConfig& c) {
  return StrCat(c.heads.num_q_heads, "/", c.heads.num_kv_heads, " heads of ", c.shape.head_dim, "/", c.shape.value_dim);
}

bool SameRows(const SessionConfig& a, const SessionConfig& b) {
  return a.heads.num_q_heads == b.heads.num_q_heads && a.heads.num_kv_heads == b.heads.num_kv_heads &&
         a.shape.head_dim == b.shape.head_dim && a.shape.value_dim == b.shape.value_dim;
}

}  // namespace

absl::Status ValidateStepForm(const StepTask& step) {
  if (step.segments.empty()) return BadShape("a step needs at least one segment");
  if (step.q_bytes == 0 && step.k_bytes == 0 && step.v_bytes == 0) {
    return BadShape("a step without q, k and v: nothing to append, nothing to attend");
  }
  if ((step.k_bytes == 0) != (step.v_bytes == 0)) {
    return BadShape(StrCat("k and v come together or not at all: k has ", step.k_bytes, " bytes, v ", step.v_bytes));
  }
  int64_t tokens = 0;
  absl::flat_hash_set<absl::string_view> ids;
  for (size_t i = 0; i < step.segments.size(); i++) {
    const StepSegment& segment = step.segments[i];
    if (segment.num_tokens < 1) return BadShape(StrCat("segment ", i, " has ", segment.num_tokens, " tokens"));
    if (segment.num_tokens > SessionCache::kMaxTokens - tokens) {
      return BadShape(StrCat("more than ", SessionCache::kMaxTokens, " tokens in a step"));
    }
    tokens += segment.num_tokens;
    if (!ids.insert(segment.session_id).second) {
      return MakeError(absl::StatusCode::kInvalidArgument, "DUPLICATE_SESSION",
                       StrCat("segment ", i, " names a session that an earlier segment names"));
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateStepShapes(const StepTask& step, int64_t capacity_bytes, absl::Span<SegmentRun> runs) {
  assert(runs.size() == step.segments.size());
  const SessionConfig* first = nullptr;
  int64_t tokens = 0;
  for (size_t i = 0; i < runs.size(); i++) {
    SegmentRun& run = runs[i];
    run.first_token = tokens;
    run.num_tokens = step.segments[i].num_tokens;
    tokens += run.num_tokens;
    if (run.session == nullptr) continue;
    const SessionConfig& config = run.session->model->config;
    if (first == nullptr) first = &config;
    if (!SameRows(*first, config)) {
      return BadShape(StrCat("the sessions of a step must have the same heads and dims: segment ", i, " has ",
                             DescribeHeads(config), ", an earlier one ", DescribeHeads(*first)));
    }
    run.status.Update(CheckSegment(step, step.segments[i], *run.session, capacity_bytes));
    if (run.status.ok()) FillRun(step, step.segments[i], &run);
  }
  if (first == nullptr) return absl::OkStatus();  // no session to measure by, and every segment has failed
  const auto check = [&](absl::string_view name, size_t bytes, DType dtype, int heads, int dim) {
    return bytes == 0 ? absl::OkStatus() : CheckBytes(name, tokens, TensorView{nullptr, dtype, heads, dim}, bytes);
  };
  absl::Status status = check("q", step.q_bytes, step.q_dtype, first->heads.num_q_heads, first->shape.head_dim);
  status.Update(check("k", step.k_bytes, step.k_dtype, first->heads.num_kv_heads, first->shape.head_dim));
  status.Update(check("v", step.v_bytes, step.v_dtype, first->heads.num_kv_heads, first->shape.value_dim));
  return status;
}

namespace {

// Where a segment that appends starts.
absl::StatusOr<int64_t> AppendStart(const StepSegment& segment, int64_t length) {
  if (!segment.start_position.has_value()) return length;
  const int64_t start = *segment.start_position;
  if (start < 0 || start > length) {
    return BadPosition(StrCat("start_position ", start, " is ", start < 0 ? "negative" : "beyond the end"), length);
  }
  const bool is_replay = start == length - segment.num_tokens;
  if (start < length && !is_replay && !segment.rewind) {
    return BadPosition(StrCat("start_position ", start, " with ", segment.num_tokens,
                              " tokens is neither an append nor a replay, and rewind is not set"),
                       length);
  }
  return start;
}

absl::StatusOr<int64_t> AttendStart(const StepSegment& segment, int64_t length) {
  if (segment.rewind) return BadPosition("rewind needs K and V to put in place of what it cuts", length);
  const int64_t start = segment.start_position.value_or(length - segment.num_tokens);
  if (start < 0 || start > SessionCache::kMaxTokens) {
    return BadPosition(segment.start_position.has_value()
                           ? StrCat("start_position ", start, " is out of range")
                           : StrCat("there are no last ", segment.num_tokens, " tokens to attend from"),
                       length);
  }
  return start;
}

absl::Status WhyNoMemory(const SessionCache& cache, int layer, int64_t start, int64_t num_tokens,
                         const BlockPool& pool) {
  const int64_t block_bytes = static_cast<int64_t>(cache.block_bytes());
  const int64_t total = cache.BlocksWith(layer, start, num_tokens) * block_bytes;
  if (total > pool.capacity_bytes()) {
    return TooManyTokens(StrCat("the session would need ", total, " bytes of cache, which has ", pool.capacity_bytes()),
                         total, pool.capacity_bytes());
  }
  const int64_t needed = cache.BlocksToStage(layer, start, num_tokens) * block_bytes;
  const int64_t available = pool.available_bytes() + cache.reserved_bytes() - cache.used_bytes();
  const bool overwrites = start < cache.length(layer);
  return MakeError(absl::StatusCode::kResourceExhausted, "CACHE_FULL",
                   StrCat("the step needs ", needed, " bytes of cache, ", available, " are available",
                          overwrites ? "; a replay or rewind keeps the old tokens until it is done (RewindSession "
                                       "frees them first)"
                                     : ""),
                   {{"needed_bytes", StrCat(needed)}, {"available_bytes", StrCat(available)}}, kCacheRetryDelay);
}

}  // namespace

absl::Status StageSegment(int layer, const StepSegment& segment, const BlockPool& pool, SegmentRun* run) {
  SessionCache& cache = run->session->cache;
  const int64_t length = cache.length(layer);
  const bool appends = run->kv_rows > 0;
  const absl::StatusOr<int64_t> start = appends ? AppendStart(segment, length) : AttendStart(segment, length);
  if (!start.ok()) return start.status();
  // An append at 0 needs nothing that was there before.
  if (!appends || *start > 0) {
    const absl::Status held = CheckHeld(*run->session, layer, *start);
    if (!held.ok()) return held;
  }
  run->first_position = run->kv_start = *start;
  run->mask.first_key = *start;
  if (!appends) {
    run->num_keys = length;
    run->staged.layer = layer;
    run->staged.first_fresh = std::numeric_limits<int64_t>::max();  // every block is the layer's own
    return absl::OkStatus();
  }
  run->num_keys = *start + segment.num_tokens;
  const int64_t max_tokens = run->session->model->config.max_tokens;
  const int64_t limit = max_tokens > 0 ? std::min(max_tokens, SessionCache::kMaxTokens) : SessionCache::kMaxTokens;
  if (run->num_keys > limit) {
    return TooManyTokens(StrCat("the step ends at ", run->num_keys, " tokens, the session's limit is ", limit),
                         run->num_keys, limit);
  }
  if (cache.Stage(layer, *start, segment.num_tokens, &run->staged)) return absl::OkStatus();
  return WhyNoMemory(cache, layer, *start, segment.num_tokens, pool);
}

}  // namespace attnd
