#include "tests/unit/engine/model/driver.h"

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <utility>

#include "absl/strings/str_join.h"
#include "absl/time/clock.h"

namespace attnd {
namespace {

namespace fs = std::filesystem;

constexpr absl::Duration kHang = absl::Seconds(60);
constexpr int kErrors[] = {ENOSPC, EIO, EDQUOT, EMFILE};

}  // namespace

ModelDriver::ModelDriver(Choices* choices, std::string directory, Twins* twins, ModelTotals* totals)
    : choices_(choices), directory_(std::move(directory)), twins_(twins), totals_(totals) {}

ModelDriver::~ModelDriver() = default;

void ModelDriver::Start() {
  constexpr Room kRooms[] = {Room::kNone, Room::kDrop, Room::kSpill, Room::kSpill};
  room_ = kRooms[choices_->Below(4)];
  options_.kv_cache_bytes = 512 * (16 + int64_t{choices_->Byte()});
  options_.max_sessions = 8 + choices_->Below(16);
  options_.session_idle_ttl = absl::InfiniteDuration();
  options_.evict_lru = room_ != Room::kNone;
  if (room_ == Room::kSpill) options_.spill_dir = directory_ + "/spill";
  save_directory_ = directory_ + "/saved";
  options_.poison_cache = true;
  options_.spill_retry_delay = absl::Milliseconds(1);
  options_.fail_allocation = [this] { return faults_.OnAllocation(); };
  options_.fail_io = [this](const char* call) { return faults_.OnIo(call); };
  auto engine = Engine::Create(options_, this);
  if (!engine.ok()) return Fail("the engine does not start: ", engine.status().ToString());
  engine_ = *std::move(engine);
}

std::string ModelDriver::Run(int64_t operations) {
  Start();
  totals_->runs++;
  while (failure_.empty() && operations_ < operations && !choices_->exhausted()) {
    const int what = choices_->Byte();
    if (what < 240) {
      TakeTurn();
    } else if (what < 243) {
      faults_.FailAllocation(choices_->Below(4));
    } else if (what < 247) {
      const int skip = choices_->Below(16);
      if (room_ == Room::kSpill) faults_.FailIo(skip, kErrors[skip % 4]);
    } else if (what < 249) {
      DamageAFile();
    } else if (what < 252 || exports_.size() > 3) {
      ReadAnExport();
    } else if (what < 254) {
      Settle();
    } else if (choices_->OneIn(16)) {
      Restart();
    }
  }
  if (failure_.empty()) End();
  totals_->operations += operations_;
  const Faults::Counts faults = faults_.counts();
  totals_->failed_allocations += faults.allocations;
  totals_->failed_reads += faults.reads;
  totals_->failed_writes += faults.writes;
  totals_->failed_removals += faults.removals;
  totals_->outcomes["dropped"] += dropped_;
  totals_->outcomes["spilled"] += spilled_;
  totals_->outcomes["restored"] += restored_;
  return failure_.empty() ? "" : Report();
}

void ModelDriver::TakeTurn() {
  Turn turn;
  const int how = choices_->Byte();
  const int count = how % 8 == 7 ? 2 + how / 8 % 6 : 1;
  for (int i = 0; i < count; i++) {
    std::unique_ptr<EngineCall> call = ChooseCall();
    if (call->kind != Kind::kStep || !call->segments.empty()) turn.calls.push_back(std::move(call));
  }
  if (turn.calls.empty()) return;
  turns_++;
  LookAhead(&turn);
  for (const auto& call : turn.calls) Make(engine_.get(), call.get());
  for (const auto& call : turn.calls) {
    if (call->done.WaitForNotificationWithTimeout(kHang)) continue;
    Fail("no answer: ", call->Describe());
    engine_.reset();  // answers all of them
    return;
  }
  for (size_t i = 0; i < turn.calls.size(); i++) {
    const EngineCall& call = *turn.calls[i];
    absl::Status status = call.status;
    for (const SegmentOutcome& segment : call.outcome.segments) status.Update(segment.status);
    history_.push_back(absl::StrCat(operations_++, i > 0 ? "+ " : "  ", call.Describe(), ": ", ReasonOf(status)));
    if (history_.size() > 60) history_.pop_front();
    totals_->outcomes[call.Name() + (status.ok() ? "" : " " + ReasonOf(status))]++;
    if (failure_.empty()) Check(turn, i);
  }
  if (failure_.empty()) Compare(turn);
}

void ModelDriver::DamageAFile() {
  const SessionPtr session = ChooseSession();
  const int how = choices_->Below(8), where = choices_->Byte();
  if (session == nullptr || session->damaged) return;
  const auto info = engine_->GetSession(session->id);
  if (!info.ok() || info->spilled_bytes == 0) return;
  fs::path file;
  for (const std::string& directory : {options_.spill_dir, save_directory_}) {
    if (!directory.empty() && fs::exists(directory + "/" + session->id + ".attnd")) {
      file = directory + "/" + session->id + ".attnd";
    }
  }
  if (file.empty()) return Fail("session ", session->id, " is on disk, but its file is not there");
  const int64_t size = static_cast<int64_t>(fs::file_size(file)), at = size * where / 256;
  if (how == 0) {
    fs::remove(file);
  } else if (how == 1) {
    fs::resize_file(file, at);
  } else {
    std::fstream stream(file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekg(at);
    const char byte = static_cast<char>(stream.get());
    stream.seekp(at);
    stream.put(static_cast<char>(byte ^ (1 << how)));
  }
  CompareSession(session->id);
  session->damaged = true;
  totals_->damaged++;
  history_.push_back(absl::StrCat(operations_, "  damage ", session->id.substr(0, 6), " how ", how, " at ", at));
}

// It is of the moment when it began, whatever became of the session since; sessions that are alike give the same bytes.
void ModelDriver::ReadAnExport() {
  if (exports_.empty()) return;
  HeldExport held = std::move(exports_.front());
  exports_.pop_front();
  if (choices_->OneIn(4)) return;  // given up
  auto session = std::make_shared<ModelSession>(*held.session);
  Snapshot snapshot;
  for (;;) {
    const absl::StatusOr<std::string> piece = held.pieces->Next();
    if (!piece.ok()) return Fail("an export ends with ", piece.status().ToString());
    if (piece->empty()) break;
    snapshot.bytes += *piece;
  }
  if (static_cast<int64_t>(snapshot.bytes.size()) != held.pieces->total_bytes()) {
    Fail("an export has ", snapshot.bytes.size(), " bytes, it said ", held.pieces->total_bytes());
  }
  session->MoveToDisk();  // gives its blocks up
  for (const Snapshot& other : snapshots_) {
    if (other.session->IsLike(*session) && other.bytes != snapshot.bytes) {
      Fail("two exports of sessions that are alike, ", other.session->id, " and ", session->id, ", differ");
    }
  }
  snapshot.session = std::move(session);
  snapshots_.push_back(std::move(snapshot));
  if (snapshots_.size() > 4) snapshots_.pop_front();
}

// A later process serves the sessions of this one.
void ModelDriver::Restart() {
  if (faults_.counts().removals > 0) return;  // what stays may be older than its session
  faults_.Disarm();
  exports_.clear();
  history_.push_back(absl::StrCat(operations_, "  restart"));
  totals_->restarts++;
  for (const SessionPtr& session : sessions_) CompareSession(session->id);
  if (!engine_->Drain(absl::Now() + kHang)) return Fail("the engine does not drain");
  const auto saved = engine_->SaveSessions(save_directory_, [] { return false; });
  if (!saved.ok()) return Fail("nothing is saved: ", saved.status().ToString());
  int64_t damaged = 0;
  for (const SessionPtr& session : sessions_) damaged += session->damaged ? 1 : 0;
  if (saved->lost > damaged || saved->saved + saved->lost != static_cast<int64_t>(sessions_.size())) {
    return Fail(saved->saved, " of ", sessions_.size(), " sessions are saved: ", saved->first_error);
  }
  engine_.reset();
  auto engine = Engine::Create(options_, this);
  if (!engine.ok()) return Fail("the engine does not start again: ", engine.status().ToString());
  engine_ = *std::move(engine);
  for (const std::string& directory : {save_directory_, options_.spill_dir}) {
    if (directory.empty()) continue;
    const auto found = engine_->RestoreSessions(directory);
    if (!found.ok()) return Fail("nothing is found: ", found.status().ToString());
  }
  gone_.clear(), gone_ids_.clear();
  for (const SessionPtr& session : std::vector<SessionPtr>(sessions_)) {
    const std::string reason = ReasonOf(engine_->GetSession(session->id).status());
    if (!reason.empty() && session->damaged) {
      Forget(session->id, reason);
      continue;
    }
    session->MoveToDisk();
    session->outstanding = 0;
    CompareSession(session->id);
    if (failure_.empty() && !session->on_disk) Fail("session ", session->id, " is not on disk");
  }
}

void ModelDriver::End() {
  Settle();
  faults_.Disarm();
  exports_.clear();
  while (!sessions_.empty() && failure_.empty()) {
    const std::string id = sessions_.back()->id;
    const absl::StatusOr<bool> closed = engine_->CloseSession(id);
    if (!closed.ok() || !*closed) Fail("session ", id, " cannot be closed: ", closed.status().ToString());
    sessions_.pop_back();
  }
  EngineStats stats;
  const int64_t may_stay = faults_.counts().removals;
  const bool empty = WaitFor([&] {
    stats = engine_->stats();
    return stats.used_bytes == 0 && stats.reserved_bytes == 0 && stats.shared_bytes == 0 && stats.spilled_bytes == 0 &&
           stats.sessions_spilled == 0 && stats.sessions_active == 0 && stats.cache_tokens == 0 &&
           CountFiles() <= may_stay;
  });
  if (!empty) {
    Fail("all are closed, but used ", stats.used_bytes, ", reserved ", stats.reserved_bytes, ", shared ",
         stats.shared_bytes, ", spilled ", stats.spilled_bytes, ", tokens ", stats.cache_tokens, ", files ",
         CountFiles());
  }
}

std::string ModelDriver::Report() const {
  constexpr const char* kRooms[] = {"none", "drop", "spill"};
  return absl::StrCat(failure_, "\nafter operation ", operations_, ", eviction ", kRooms[static_cast<int>(room_)],
                      ", cache of ", options_.kv_cache_bytes, " bytes; the last calls:\n",
                      absl::StrJoin(history_, "\n"));
}

}  // namespace attnd
