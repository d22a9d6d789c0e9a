// What each call may have ended with, and what its success did to the model.
#include <algorithm>
#include <cstring>

#include "absl/algorithm/container.h"
#include "kernels/block_layout.h"
#include "server/engine/errors.h"
#include "tests/unit/engine/model/driver.h"

namespace attnd {
namespace {

constexpr char kClosed[] = "CLOSED", kEvicted[] = "EVICTED", kLost[] = "SPILL_DAMAGED";
constexpr int64_t kMaxTokens = int64_t{1} << 30;
// After a failed write to disk, no other session goes there for a while.
constexpr int64_t kFaultOperations = 300;

int64_t BlockCount(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

// Whether a later call of the turn closes the session.
bool IsClosedLater(absl::Span<const std::unique_ptr<EngineCall>> calls, size_t index, const std::string& id) {
  for (size_t i = index + 1; i < calls.size(); i++) {
    if (calls[i]->kind == EngineCall::Kind::kClose && calls[i]->session_id == id) return true;
  }
  return false;
}

}  // namespace

bool ModelDriver::Allowed(const Turn& turn, size_t index, const std::string& id, const std::string& expected,
                          const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  ModelSession* const session = Find(id);
  const Faults::Counts now = faults_.counts(), before = turn.faults_before;
  if (now.io() > io_faults_) {  // perhaps between two turns
    io_faults_ = now.io();
    last_io_fault_ = operations_;
  }
  const bool io_failed = io_faults_ > 0 && operations_ - last_io_fault_ < kFaultOperations;
  // A damaged file is found whenever it is read; nothing that it held is served.
  if (session != nullptr && session->damaged && session->on_disk && reason == expected) {
    constexpr absl::string_view kWhenItIsBack[] = {"",          "BAD_POSITION", "TOKENS_FREED",
                                                   "EMPTY_ROW", "TOO_LONG",     "BAD_CONFIG"};
    const bool was_back = absl::c_linear_search(kWhenItIsBack, reason);
    if (was_back) Fail("session ", id, " whose file is damaged gave '", reason, "'");
    return !was_back;
  }
  if (reason == expected) return true;
  if (reason == "CACHE_FULL" || reason == "TOO_MANY_TOKENS") {
    if (turn.is_short || now.allocations > before.allocations || (room_ == Room::kSpill && io_failed)) return true;
  }
  if (session == nullptr) {
    // It went in this turn, and the call was refused when it was made.
    return !turn.alone() && (expected == kLost || expected == kEvicted) &&
           (reason == "BAD_SHAPE" || reason == "TOO_MANY_TOKENS" || reason == "SESSION_LIMIT");
  }
  // Of a reorder's rows, that one.
  if ((reason == kEvicted || absl::IsDataLoss(status)) && ReasonOf(engine_->GetSession(id).status()) != reason) {
    return false;
  }
  if (reason == kEvicted && room_ == Room::kDrop && !turn.alone() && session->reserve_tokens == 0) {
    Forget(id, kEvicted);
    return true;
  }
  if (reason == kClosed && IsClosedLater(turn.calls, index, id)) return true;
  const bool may_be_read = session->on_disk || room_ == Room::kSpill;
  if (absl::IsDataLoss(status) && may_be_read && (session->damaged || now.reads > before.reads)) {
    Forget(id, kLost);
    return true;
  }
  return absl::IsInternal(status) && reason == kLost && may_be_read && now.removals > before.removals;
}

void ModelDriver::Check(const Turn& turn, size_t index) {
  const EngineCall& call = *turn.calls[index];
  for (const std::string& id : call.Names()) {
    if (ModelSession* const session = Find(id); session != nullptr) session->used_until = turns_;
  }
  switch (call.kind) {
    case Kind::kStep:
      return CheckStep(turn, index);
    case Kind::kExport:
      return CheckExport(turn, index);
    case Kind::kCreate:
    case Kind::kImport:
    case Kind::kFork:
      return CheckCreated(turn, index);
    case Kind::kRewind:
    case Kind::kReorder:
      return CheckMove(turn, index);
    case Kind::kClose:
      return CheckClose(turn, index);
  }
}

std::string ModelDriver::ExpectedOfSegment(const EngineCall& call, size_t index) const {
  const SegmentCall& segment = call.segments[index];
  const ModelSession* const session = Find(segment.session_id);
  if (session == nullptr) return WhyGone(segment.session_id);
  if (call.layer >= static_cast<int>(session->layers.size())) return "BAD_SHAPE";
  const int64_t max_tokens = session->kind->config.max_tokens, length = session->layers[call.layer].length();
  const int64_t n = segment.num_tokens;
  if (!call.appends) {
    const int64_t start = segment.start.value_or(length - n);
    if (start < 0 || start > kMaxTokens) return "BAD_POSITION";
    if (!session->Holds(call.layer, start)) return "TOKENS_FREED";
    return session->SeesSomething(call.layer, start, n) ? "" : "EMPTY_ROW";
  }
  const int64_t bytes = BlockCount(n) * session->kind->config.heads.num_kv_heads * session->kind->block_bytes;
  if ((max_tokens > 0 && n > max_tokens) || bytes > options_.kv_cache_bytes) return "TOO_MANY_TOKENS";
  const int64_t start = segment.start.value_or(length);
  if (start < 0 || start > length) return "BAD_POSITION";
  if (start < length && start != length - n && !segment.rewind) return "BAD_POSITION";
  if (start > 0 && !session->Holds(call.layer, start)) return "TOKENS_FREED";
  return max_tokens > 0 && start + n > max_tokens ? "TOO_MANY_TOKENS" : "";
}

void ModelDriver::CheckStep(const Turn& turn, size_t index) {
  const EngineCall& call = *turn.calls[index];
  if (!call.status.ok() || call.outcome.segments.size() != call.segments.size()) {
    return Fail("the step as a whole failed: ", call.status.ToString());
  }
  int64_t row = 0;
  for (size_t i = 0; i < call.segments.size(); i++) {
    CheckSegment(turn, index, i, row);
    row += call.segments[i].num_tokens;
  }
}

void ModelDriver::CheckSegment(const Turn& turn, size_t index, size_t i, int64_t first_row) {
  const EngineCall& call = *turn.calls[index];
  const SegmentCall& segment = call.segments[i];
  const SegmentOutcome& outcome = call.outcome.segments[i];
  const std::string expected = ExpectedOfSegment(call, i);
  if (!Allowed(turn, index, segment.session_id, expected, outcome.status)) {
    return Fail("segment ", i, " ended with '", ReasonOf(outcome.status), "' (", outcome.status.message(),
                "), expected '", expected, "'");
  }
  ModelSession* const session = Find(segment.session_id);
  if (session == nullptr) return;
  if (!outcome.status.ok()) {
    const int64_t floats = int64_t{call.of->config.heads.num_q_heads} * call.of->config.shape.value_dim;
    const float row = call.out.empty() ? 0 : call.out[first_row * floats];
    if (row != 0) Fail("rows of the failed segment ", i, " are not 0 but ", row);
    return;
  }
  session->used_since = turns_;
  if (session->on_disk) session->MoveToMemory();
  const int64_t length = session->layers[call.layer].length(), n = segment.num_tokens;
  const int64_t start = segment.start.value_or(call.appends ? length : length - n);
  if (call.appends) session->Append(call.layer, start, segment.tokens);
  if (outcome.start_position != start || outcome.length != session->layers[call.layer].length()) {
    return Fail("segment ", i, " was at ", outcome.start_position, " and ended at ", outcome.length, ", expected ",
                start, " and ", session->layers[call.layer].length());
  }
  if (call.attends) CheckAnswer(call, *session, start, n, first_row);
}

void ModelDriver::CheckAnswer(const EngineCall& call, const ModelSession& session, int64_t start, int64_t rows,
                              int64_t first_row) {
  const int64_t row = int64_t{call.of->config.heads.num_q_heads} * call.of->config.shape.value_dim;
  const absl::Span<const float> out = absl::MakeSpan(call.out).subspan(first_row * row, rows * row);
  if (session.kind->is_mean) {
    totals_->means_checked += rows;
    const std::string wrong = session.CheckMeans(call.layer, start, rows, out);
    if (!wrong.empty()) Fail("session ", session.id, " answers wrong: ", wrong);
  }
  // The twin's queries are those of one segment; and it is asked for a part of the steps only.
  if (call.segments.size() > 1 || (session.kind->is_mean && call.query_seed % 8 != 0)) return;
  if (call.appends && call.query_seed % 4 != 0) return;
  std::string error;
  totals_->twins_asked++;
  const std::vector<float> twin = twins_->Ask(session, call.layer, start, rows, call.query_seed, &error);
  if (!error.empty()) return Fail("the twin: ", error);
  for (size_t i = 0; i < twin.size(); i++) {
    if (std::memcmp(&twin[i], &out[i], sizeof(float)) == 0) continue;
    return Fail("session ", session.id, " differs from its twin at element ", i, ": ", out[i], ", not ", twin[i]);
  }
}

void ModelDriver::CheckCreated(const Turn& turn, size_t index) {
  const EngineCall& call = *turn.calls[index];
  const bool is_fork = call.kind == Kind::kFork;
  ModelSession* const parent = is_fork ? Find(call.session_id) : nullptr;
  std::string expected;
  if (is_fork) {
    expected =
        parent == nullptr ? WhyGone(call.session_id) : parent->WhyNotCut(call.length.value_or(parent->longest()));
  }
  const std::string reason = ReasonOf(call.status);
  // Others of the turn may have been served before it, or after.
  const int64_t others = static_cast<int64_t>(turn.calls.size()) - 1;
  const bool may_be_full = turn.sessions_before + others >= options_.max_sessions;
  // A parent that comes back from disk may take the room of others first.
  const bool parent_comes = room_ == Room::kDrop && parent != nullptr && parent->on_disk;
  const bool must_be_full = turn.alone() && may_be_full && !parent_comes;
  if (expected.empty() && (must_be_full || (may_be_full && reason == "SESSION_LIMIT"))) expected = "SESSION_LIMIT";
  const bool is_import = call.kind == Kind::kImport;
  if (is_import && expected.empty() && call.is_damaged) expected = "BAD_SNAPSHOT";
  if (is_import && call.is_damaged && reason == "BAD_SNAPSHOT") return;  // perhaps before anything else was looked at
  if (!is_fork && expected.empty() && BytesNeeded(turn, call) > options_.kv_cache_bytes) {
    expected = is_import ? "TOO_MANY_TOKENS" : "CACHE_FULL";
  }
  if (!Allowed(turn, index, call.session_id, expected, call.status)) {
    return Fail("ended with '", reason, "' (", call.status.message(), "), expected '", expected, "'");
  }
  if (!call.status.ok()) return;
  const ModelKind* const kind = is_fork ? parent->kind : is_import ? call.imported->kind : call.of;
  auto created = std::make_shared<ModelSession>(kind, call.info.session_id);
  if (is_import) {
    created->reserve_tokens = call.imported->reserve_tokens;
    created->layers = call.imported->layers;
    created->MoveToMemory();
  }
  if (is_fork) {
    if (parent->on_disk) parent->MoveToMemory();
    created->reserve_tokens = 0;
    created->ShareFrom(*parent, call.length.value_or(parent->longest()));
  }
  created->used_since = created->used_until = turns_;
  if (is_fork) parent->used_since = turns_;
  sessions_.push_back(std::move(created));
}

std::string ModelDriver::ExpectedOfReorder(const EngineCall& call) const {
  const int count = static_cast<int>(call.rows.size());
  for (int i = 0; i < count; i++) {
    if (call.sources[i] >= count) return "BAD_SHAPE";
    if (std::find(call.rows.begin(), call.rows.begin() + i, call.rows[i]) != call.rows.begin() + i) {
      return "DUPLICATE_SESSION";
    }
  }
  for (const std::string& id : call.rows) {
    if (Find(id) == nullptr) return WhyGone(id);
  }
  const SessionConfig& first = Find(call.rows[0])->kind->config;
  for (int i = 0; i < count; i++) {
    const SessionConfig& config = Find(call.rows[i])->kind->config;
    if (!(config.shape == first.shape) || config.num_layers != first.num_layers ||
        config.heads.num_kv_heads != first.heads.num_kv_heads || config.heads.num_q_heads != first.heads.num_q_heads ||
        config.layer_windows != first.layer_windows) {
      return "BAD_CONFIG";
    }
    const int64_t length = Find(call.rows[call.sources[i]])->longest();
    if (config.max_tokens > 0 && length > config.max_tokens) return "TOO_LONG";
  }
  return "";
}

void ModelDriver::CheckMove(const Turn& turn, size_t index) {
  const EngineCall& call = *turn.calls[index];
  std::string expected;
  if (call.kind == Kind::kReorder) {
    expected = ExpectedOfReorder(call);
  } else {
    const ModelSession* const session = Find(call.session_id);
    expected = session == nullptr ? WhyGone(call.session_id) : session->WhyNotCut(*call.length);
  }
  // Any of the rows may be why it failed.
  bool allowed = false;
  for (const std::string& id : call.Names()) {
    allowed = Allowed(turn, index, id, expected, call.status);
    if (allowed) break;
  }
  if (!allowed) {
    return Fail("ended with '", ReasonOf(call.status), "' (", call.status.message(), "), expected '", expected, "'");
  }
  if (!call.status.ok()) return;
  std::vector<SessionPtr> before;
  for (const std::string& id : call.Names()) {
    ModelSession* const session = Find(id);
    if (session->on_disk) session->MoveToMemory();
    before.push_back(std::make_shared<ModelSession>(*session));
  }
  if (call.kind == Kind::kRewind) before.clear(), Find(call.session_id)->Cut(*call.length);
  for (size_t i = 0; i < call.rows.size(); i++) {
    ModelSession* const row = Find(call.rows[i]);
    row->layers = before[call.sources[i]]->layers;
    if (call.lengths.size() != call.rows.size() || call.lengths[i] != row->longest())
      Fail("row ", i, " has another length");
  }
  for (const std::string& id : call.Names()) Find(id)->used_since = turns_;
}

void ModelDriver::CheckExport(const Turn& turn, size_t index) {
  EngineCall& call = *turn.calls[index];
  ModelSession* const session = Find(call.session_id);
  const std::string expected = session == nullptr ? WhyGone(call.session_id) : "";
  if (!Allowed(turn, index, call.session_id, expected, call.status)) {
    return Fail("ended with '", ReasonOf(call.status), "' (", call.status.message(), "), expected '", expected, "'");
  }
  if (!call.status.ok()) return;
  if (session->on_disk) session->MoveToMemory();
  session->used_since = turns_;
  exports_.push_back({std::move(call.exported), std::make_shared<const ModelSession>(*session)});
}

void ModelDriver::CheckClose(const Turn& turn, size_t index) {
  const EngineCall& call = *turn.calls[index];
  const bool is_open = Find(call.session_id) != nullptr;
  if (is_open && call.status.ok() && !call.was_open && room_ == Room::kDrop && !turn.alone()) {
    return Forget(call.session_id, kEvicted);
  }
  const std::string expected = is_open || WhyGone(call.session_id) != "NEVER_EXISTED" ? "" : "NEVER_EXISTED";
  if (ReasonOf(call.status) != expected)
    return Fail("ended with ", call.status.ToString(), ", expected '", expected, "'");
  if (call.status.ok() && call.was_open != is_open) return Fail("the session was ", is_open ? "open" : "closed");
  if (is_open) Forget(call.session_id, kClosed);
}

}  // namespace attnd
