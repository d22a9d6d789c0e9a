// Which calls are made, and how much memory they need.
#include <algorithm>

#include "kernels/block_layout.h"
#include "tests/unit/engine/model/driver.h"

namespace attnd {
namespace {

int64_t BlockCount(int64_t tokens) { return (tokens + kBlockTokens - 1) / kBlockTokens; }

// Kinds whose rows are alike, and which can be in one step.
bool SameRows(const ModelKind& a, const ModelKind& b) {
  return a.config.shape == b.config.shape && a.config.heads.num_q_heads == b.config.heads.num_q_heads &&
         a.config.heads.num_kv_heads == b.config.heads.num_kv_heads && a.is_mean == b.is_mean;
}

}  // namespace

ModelDriver::SessionPtr ModelDriver::ChooseSession() {
  if (sessions_.empty()) return nullptr;
  return sessions_[choices_->Below(static_cast<int>(sessions_.size()))];
}

// Mostly of an open one.
std::string ModelDriver::ChooseId() {
  const int what = choices_->Below(64);
  if (what == 63) return std::string(32, 'e');
  if ((what == 62 || sessions_.empty()) && !gone_ids_.empty()) {
    return gone_ids_[choices_->Below(static_cast<int>(gone_ids_.size()))];
  }
  const SessionPtr session = ChooseSession();
  return session == nullptr ? std::string(32, 'd') : session->id;
}

int64_t ModelDriver::ChooseCount() {
  const int what = choices_->Below(16);
  if (what < 10) return 1 + what % 4;
  if (what < 13) return 1 + choices_->Below(40);
  if (what < 15) return 60 + choices_->Below(9);  // about a block
  return 100 + choices_->Below(200);
}

std::vector<ModelToken> ModelDriver::NewTokens(int64_t count) {
  std::vector<ModelToken> tokens(count);
  for (ModelToken& token : tokens) token = next_token_++;
  return tokens;
}

std::unique_ptr<EngineCall> ModelDriver::ChooseCall() {
  auto call = std::make_unique<EngineCall>();
  const int what = choices_->Byte();
  if (what >= 243 && what < 246 && !snapshots_.empty()) {
    ChooseImport(call.get());
  } else if (sessions_.size() < 2 || what >= 243) {
    call->kind = Kind::kCreate;
    call->of = &ModelKinds()[choices_->Below(static_cast<int>(ModelKinds().size()))];
  } else if (what < 170) {
    ChooseStep(call.get());
  } else if (what < 190) {
    call->kind = Kind::kFork;
    call->session_id = ChooseId();
  } else if (what < 210) {
    call->kind = Kind::kRewind;
    call->session_id = ChooseId();
  } else if (what < 225) {
    ChooseReorder(call.get());
  } else {
    call->kind = what < 238 ? Kind::kClose : Kind::kExport;
    call->session_id = ChooseId();
  }
  const ModelSession* const session = call->session_id.empty() ? nullptr : Find(call->session_id);
  if (call->kind == Kind::kRewind || (call->kind == Kind::kFork && choices_->OneIn(2))) {
    const int64_t longest = session == nullptr ? 10 : session->longest();
    const int how = choices_->Below(8);
    if (how < 5) {
      call->length = choices_->Below(static_cast<int>(longest) + 1);
    } else if (how == 5) {
      call->length = 0;
    } else {
      call->length = longest - 3 + choices_->Below(5);  // near the end, and beyond it
    }
  }
  return call;
}

void ModelDriver::ChooseStep(EngineCall* call) {
  call->kind = Kind::kStep;
  const int how = choices_->Byte();
  call->appends = how % 8 != 0;
  call->attends = !call->appends || how % 5 != 0;
  call->query_seed = static_cast<uint64_t>(how) << 8 | next_token_;
  const int count = how / 8 % 6 == 0 ? 2 + how % 3 : 1;
  for (int i = 0; i < count; i++) {
    SegmentCall segment;
    segment.session_id = ChooseId();
    const ModelSession* const session = Find(segment.session_id);
    if (session != nullptr) {
      if (call->of != nullptr && !SameRows(*call->of, *session->kind)) continue;
      if (call->of == nullptr) {
        const int layers = static_cast<int>(session->layers.size());
        call->layer = choices_->Below(layers);
        if (choices_->Below(64) == 63) call->layer = layers;
      }
      call->of = session->kind;
    }
    const auto same = [&](const SegmentCall& other) { return other.session_id == segment.session_id; };
    if (std::any_of(call->segments.begin(), call->segments.end(), same)) continue;
    segment.num_tokens = call->appends ? ChooseCount() : 1 + choices_->Below(4);
    const int64_t length = session == nullptr || call->layer >= static_cast<int>(session->layers.size())
                               ? 5
                               : session->layers[call->layer].length();
    const int where = choices_->Below(16);
    if (where == 13) segment.start = length + choices_->Below(4) - 1;
    if (where == 14) segment.start = length - segment.num_tokens;  // a replay
    if (where == 15) segment.start = choices_->Below(static_cast<int>(length) + 1);
    segment.rewind = where >= 14 && call->appends && choices_->OneIn(2);
    if (call->appends) segment.tokens = NewTokens(segment.num_tokens);
    call->segments.push_back(std::move(segment));
  }
  if (call->of == nullptr) call->of = &ModelKinds()[0];
}

void ModelDriver::ChooseReorder(EngineCall* call) {
  call->kind = Kind::kReorder;
  const int count = 1 + choices_->Below(4);
  const SessionPtr first = ChooseSession();
  call->rows.push_back(first->id);
  for (int i = 1; i < count; i++) {
    // Of the same kind, where there are enough.
    const int from = choices_->Below(static_cast<int>(sessions_.size()));
    std::string id = ChooseId();
    for (size_t j = 0; j < sessions_.size(); j++) {
      const SessionPtr& other = sessions_[(from + j) % sessions_.size()];
      if (other->kind != first->kind || choices_->exhausted()) continue;
      id = other->id;
      if (std::find(call->rows.begin(), call->rows.end(), id) == call->rows.end()) break;
    }
    call->rows.push_back(id);
  }
  for (int i = 0; i < count; i++) call->sources.push_back(choices_->Below(count));
  if (choices_->Below(64) == 63) call->sources.back() = count;
}

void ModelDriver::ChooseImport(EngineCall* call) {
  call->kind = Kind::kImport;
  const Snapshot& snapshot = snapshots_[choices_->Below(static_cast<int>(snapshots_.size()))];
  call->imported = snapshot.session;
  call->snapshot = snapshot.bytes;
  call->piece_bytes = 1 + static_cast<size_t>(choices_->Byte()) * 64;
  const int damage = choices_->Below(16);
  if (damage < 8) return;
  const size_t size = call->snapshot.size(), at = size * static_cast<size_t>(choices_->Below(4096)) / 4096;
  call->is_damaged = true;
  if (damage == 8) {
    call->snapshot.resize(at);
  } else if (damage == 9) {
    call->snapshot.insert(at, 1, 'x');
  } else {
    call->snapshot[at] = static_cast<char>(call->snapshot[at] ^ (1 << (damage % 8)));
  }
}

int64_t ModelDriver::BytesNeeded(const Turn& turn, const EngineCall& call) const {
  if (call.kind == Kind::kCreate) {
    return BlockCount(call.of->config.reserve_tokens) * call.of->config.num_layers *
           call.of->config.heads.num_kv_heads * call.of->block_bytes;
  }
  if (call.kind == Kind::kImport) return std::max(call.imported->HeldBytes(), call.imported->ReservedBytes());
  int64_t bytes = 0;
  for (const SegmentCall& segment : call.segments) {
    const ModelSession* const session = Find(segment.session_id);
    if (session == nullptr || !call.appends || call.layer >= static_cast<int>(session->layers.size())) continue;
    const int64_t length = session->layers[call.layer].length(), start = segment.start.value_or(length);
    int64_t blocks = (BlockCount(segment.num_tokens) + 1) * session->kind->config.heads.num_kv_heads;
    if (turn.alone() && start >= 0 && start <= length) {
      // Where something that runs beside it may share the last block, it is copied.
      const bool at_most = room_ == Room::kSpill || call.segments.size() > 1;
      blocks = session->FreshBlocks(call.layer, start, segment.num_tokens, at_most);
    }
    bytes += std::max<int64_t>(0, blocks * session->kind->block_bytes - (turn.alone() ? session->outstanding : 0));
  }
  return bytes;
}

void ModelDriver::LookAhead(Turn* turn) {
  const EngineStats stats = engine_->stats();
  turn->faults_before = faults_.counts();
  turn->sessions_before = static_cast<int64_t>(sessions_.size());
  int64_t needed = 0, staying = 0;
  std::vector<std::string> named;
  for (const auto& call : turn->calls) {
    needed += BytesNeeded(*turn, *call);
    for (std::string& id : call->Names()) named.push_back(std::move(id));
  }
  int64_t coming = 0;  // back from disk
  for (const SessionPtr& session : sessions_) {
    const bool is_named = std::find(named.begin(), named.end(), session->id) != named.end();
    const int64_t held = std::max(session->HeldBytes(), session->reserve_tokens > 0 ? session->ReservedBytes() : 0);
    // It may have gone to disk since the model looked.
    if (is_named && (session->on_disk || room_ == Room::kSpill)) coming += held;
    if (is_named || (session->reserve_tokens > 0 && !session->on_disk)) staying += held;
    if (room_ == Room::kDrop) session->had_own_blocks = session->OwnsBlocks();
  }
  for (const HeldExport& held : exports_) staying += held.session->HeldBytes();
  turn->takes_room = needed + coming > stats.capacity_bytes - stats.reserved_bytes;
  turn->is_short = room_ == Room::kNone ? turn->takes_room : needed + staying > stats.capacity_bytes;
  if (!turn->takes_room) return;
  for (const auto& call : turn->calls) {
    // Nobody waits for room for a reservation while sessions go to disk: the caller is told to come again.
    if (room_ == Room::kSpill && call->kind == Kind::kCreate) turn->is_short = true;
    if (call->kind == Kind::kImport) turn->is_short = true;  // nobody makes room for it
  }
}

}  // namespace attnd
