// Runs an engine and a model of it side by side: makes random calls, and checks each answer and what the engine says of
// itself against what the model expects.
//
// Calls come in turns. Those of one turn are made without waiting for each other's answers; when all have come they are
// checked in the order in which they were made. A turn of one call has one right outcome, but for what other threads do
// (sessions go to disk by themselves); larger ones, where memory is short, have several.
#ifndef ATTND_TESTS_UNIT_ENGINE_MODEL_DRIVER_H_
#define ATTND_TESTS_UNIT_ENGINE_MODEL_DRIVER_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/engine.h"
#include "tests/unit/engine/model/choices.h"
#include "tests/unit/engine/model/engine_call.h"
#include "tests/unit/engine/model/faults.h"
#include "tests/unit/engine/model/model_session.h"
#include "tests/unit/engine/model/twin.h"

namespace attnd {

// Of several runs, to be printed.
struct ModelTotals {
  int64_t operations = 0, runs = 0, restarts = 0, damaged = 0, twins_asked = 0, means_checked = 0;
  int64_t failed_allocations = 0, failed_reads = 0, failed_writes = 0, failed_removals = 0;
  std::map<std::string, int64_t> outcomes;  // "step", "step CACHE_FULL", "spilled", ...
};

class ModelDriver : private EngineObserver {
 public:
  // `directory` is there, empty, and the driver's alone.
  ModelDriver(Choices* choices, std::string directory, Twins* twins, ModelTotals* totals);
  ~ModelDriver() override;

  // Makes about so many calls, or as many as the choices last for, and closes everything. What is wrong, or "".
  std::string Run(int64_t operations);

 private:
  using Kind = EngineCall::Kind;
  using SessionPtr = std::shared_ptr<ModelSession>;
  enum class Room { kNone, kDrop, kSpill };  // what the engine does when memory is short

  // What is known of a turn before it is made.
  struct Turn {
    std::vector<std::unique_ptr<EngineCall>> calls;
    bool is_short = false;         // its calls may need more memory than can be had
    bool takes_room = false;       // they may need more than is free
    int64_t sessions_before = 0;   // open ones
    Faults::Counts faults_before;  // that have happened
    bool alone() const { return calls.size() == 1; }
  };

  // A session as it was when its export began, and what came of it.
  struct HeldExport {
    std::unique_ptr<SessionExport> pieces;
    std::shared_ptr<const ModelSession> session;  // holds its blocks, as the export does
  };
  struct Snapshot {
    std::string bytes;
    std::shared_ptr<const ModelSession> session;  // holds none
  };

  // life (driver.cc)
  void Start();
  void TakeTurn();
  void Settle();
  void Restart();
  void DamageAFile();
  void ReadAnExport();
  void End();

  // choosing (driver_choose.cc)
  std::unique_ptr<EngineCall> ChooseCall();
  void ChooseStep(EngineCall* call);
  void ChooseReorder(EngineCall* call);
  void ChooseImport(EngineCall* call);
  std::string ChooseId();
  SessionPtr ChooseSession();
  std::vector<ModelToken> NewTokens(int64_t count);
  int64_t ChooseCount();
  void LookAhead(Turn* turn);
  int64_t BytesNeeded(const Turn& turn, const EngineCall& call) const;

  // checking (driver_check.cc)
  void Check(const Turn& turn, size_t index);
  void CheckStep(const Turn& turn, size_t index);
  void CheckSegment(const Turn& turn, size_t index, size_t segment, int64_t first_row);
  void CheckCreated(const Turn& turn, size_t index);
  void CheckMove(const Turn& turn, size_t index);
  void CheckClose(const Turn& turn, size_t index);
  void CheckExport(const Turn& turn, size_t index);
  void CheckAnswer(const EngineCall& call, const ModelSession& session, int64_t start, int64_t rows, int64_t first_row);
  // Whether a call that names this session, and is expected to end with `expected`, may have ended with this.
  // Takes over what it says of the session: that it is gone.
  bool Allowed(const Turn& turn, size_t index, const std::string& id, const std::string& expected,
               const absl::Status& status);
  std::string ExpectedOfSegment(const EngineCall& call, size_t segment) const;
  std::string ExpectedOfReorder(const EngineCall& call) const;

  // state (driver_state.cc)
  void Compare(const Turn& turn);
  void CompareSession(const std::string& id);
  void CompareMemory();
  void FindEvicted(const Turn& turn);
  void Forget(const std::string& id, const std::string& reason);
  bool WaitFor(const std::function<bool()>& condition);
  int CountFiles() const;

  ModelSession* Find(const std::string& id) const;
  std::string WhyGone(const std::string& id) const;  // "": it is open
  template <typename... Parts>
  void Fail(const Parts&... parts) {
    if (failure_.empty()) failure_ = absl::StrCat(parts...);
  }
  std::string Report() const;

  void OnEvicted(Eviction eviction) override { (eviction == Eviction::kDropped ? dropped_ : spilled_)++; }
  void OnSnapshot(SnapshotOp op, int64_t, absl::Duration) override {
    if (op == SnapshotOp::kRestore) restored_++;
  }

  Choices* const choices_;
  const std::string directory_;
  Twins* const twins_;
  ModelTotals* const totals_;

  EngineOptions options_;
  Room room_ = Room::kNone;
  std::string save_directory_;
  Faults faults_;
  std::unique_ptr<Engine> engine_;

  std::vector<SessionPtr> sessions_;         // open ones
  std::map<std::string, std::string> gone_;  // why, by id
  std::vector<std::string> gone_ids_;
  std::deque<HeldExport> exports_;
  std::deque<Snapshot> snapshots_;
  uint64_t turns_ = 0;
  uint64_t counted_ = 0;  // see CountBlocks
  uint32_t next_token_ = 1;
  int64_t io_faults_ = 0;
  int64_t last_io_fault_ = 0;  // the operation in which it was found
  int64_t operations_ = 0;
  std::string failure_;
  std::deque<std::string> history_;  // the last calls and their outcomes

  std::atomic<int64_t> dropped_{0}, spilled_{0}, restored_{0};
};

}  // namespace attnd

#endif  // ATTND_TESTS_UNIT_ENGINE_MODEL_DRIVER_H_
