// The engine behind engine.h. One mutex guards everything but tensors and blocks; it is held for bookkeeping only,
// never while something is computed or a completion is called.
//
// Threads: callers'; the compute thread (ComputeLoop: forms batches, computes, commits, completes), in whose place a
// caller computes a short step that it brings while there is nothing else to do; the reaper, which expires idle
// sessions and otherwise sleeps until the next one is due; the spiller and the restorer, which write idle sessions to
// disk and read them back without the mutex, while everything else goes on.
//
// Invariants
//   1. A job is in jobs_ and in scheduler_ from Submit until it is finished; each is finished exactly once.
//   2. A session has at most one started job, and its blocks are freed only when it has none.
//   3. session.pending counts its jobs in jobs_; a session with pending jobs neither expires nor makes room for others.
//   4. Jobs that name a session on disk are on hold (job.awaited) until it is back or lost; jobs that found no memory,
//      until a session has left. So a started job has all its sessions in memory.
#ifndef ATTND_SERVER_ENGINE_ENGINE_IMPL_H_
#define ATTND_SERVER_ENGINE_ENGINE_IMPL_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/any_invocable.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "server/cache/block_pool.h"
#include "server/cache/snapshot.h"
#include "server/cache/snapshot_store.h"
#include "server/engine/batch_runner.h"
#include "server/engine/chunk_budget.h"
#include "server/engine/delay_estimate.h"
#include "server/engine/engine.h"
#include "server/engine/job.h"
#include "server/engine/scheduler.h"
#include "server/engine/session_table.h"

namespace attnd {

class EngineImpl final : public Engine {
 public:
  // `pool` is set up by Engine::Create; `observer` may be null.
  EngineImpl(const EngineOptions& options, EngineObserver* observer, std::unique_ptr<BlockPool> pool);
  ~EngineImpl() override;
  // Of options.spill_dir; a status when it cannot be used. Call before anything else.
  absl::Status OpenSpillStore();

  void CreateSession(SessionConfig config, SessionDone done) override;
  void Submit(StepTask task) override;
  void SubmitAttend(AttendTask task) override;
  void SubmitBackward(BackwardTask task) override;
  void RewindSession(std::string session_id, int64_t length, SessionDone done) override;
  void ForkSession(std::string session_id, std::optional<int64_t> length, SessionDone done) override;
  void ReorderSessions(std::vector<std::string> session_ids, std::vector<int> sources,
                       absl::AnyInvocable<void(absl::StatusOr<std::vector<int64_t>>)> done) override;
  void ExportSession(std::string session_id, ExportDone done) override;
  std::unique_ptr<SessionImport> ImportSession(std::optional<SessionConfig> expected) override;
  absl::StatusOr<SessionInfo> GetSession(absl::string_view session_id) override;
  std::vector<SessionInfo> ListSessions(uint64_t after, int limit) override;
  absl::StatusOr<bool> CloseSession(absl::string_view session_id) override;
  CapacityEstimate Estimate(const SessionConfig& config) override;
  EngineStats stats() const override;
  const EngineOptions& options() const override { return options_; }
  bool Drain(absl::Time deadline) override;
  absl::StatusOr<SavedSessions> RestoreSessions(const std::string& directory) override;
  absl::Status PrepareToSave(const std::string& directory) override;
  absl::StatusOr<SavedSessions> SaveSessions(const std::string& directory, absl::FunctionRef<bool()> stop) override;

 private:
  using SessionPtr = std::shared_ptr<Session>;

  // What is to be done once the mutex is released: completions to call and sessions whose blocks are to be freed.
  struct Afterwards {
    std::vector<absl::AnyInvocable<void()>> calls;
    std::vector<SessionPtr> release;
  };
  // A batch on its way: the jobs in it and their parts.
  struct Plan {
    std::vector<Job*> jobs;
    std::vector<bool> is_last;  // by job: nothing is left of it afterwards
    std::vector<ChunkWork> chunks;
    int64_t tokens = 0;
    int64_t prefill_tokens = 0, decodes = 0;
  };
  struct QueuedSpill {
    SessionPtr session;
    int64_t bytes = 0;  // its part of spilling_bytes_
  };
  enum class Room { kMade, kComing, kNone };
  struct PendingCreate {
    std::shared_ptr<const SessionModel> model;
    SessionDone done;
    SessionPtr imported;  // null: to be created
  };

  // Of prepared_shapes_.
  static uint32_t ShapeKey(const KvShape& s) {
    return static_cast<uint32_t>(s.head_dim) << 16 | static_cast<uint32_t>(s.value_dim) << 4 |
           static_cast<uint32_t>(s.dtype);
  }

  // sessions
  absl::StatusOr<SessionPtr> OpenSession(std::shared_ptr<const SessionModel> model)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<SessionInfo> OpenAndDescribe(std::shared_ptr<const SessionModel> model)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckSessionLimit() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void InsertSession(const SessionPtr& session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<SessionPtr> FindSession(absl::string_view id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  SessionInfo Describe(const Session& session) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReleaseBlocks(const SessionPtr& session) ABSL_LOCKS_EXCLUDED(mutex_) { ReleaseCache(&session->cache); }
  void ReleaseCache(SessionCache* cache) ABSL_LOCKS_EXCLUDED(mutex_);
  void WakeReaper() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ReaperLoop() ABSL_LOCKS_EXCLUDED(mutex_);

  // moves (session_moves.cc)
  using Sessions = absl::Span<const SessionPtr>;
  // Calls `move` for the open sessions of these ids, with the mutex held, once no earlier queued job of theirs is left:
  // at once, if there is none. Then `done`, without the mutex. REQUIRES: the ids are distinct.
  void MoveSessions(absl::Span<const std::string> ids, absl::AnyInvocable<absl::Status(Sessions)> move,
                    absl::AnyInvocable<void(absl::Status)> done) ABSL_LOCKS_EXCLUDED(mutex_);
  // The job's turn has come.
  absl::Status Move(Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<SessionPtr> Fork(const Session& parent, std::optional<int64_t> length)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // transfer (transfer.cc)
  class Export;
  class Import;
  // A session that has its memory and its place, but is in no table.
  absl::StatusOr<SessionPtr> PrepareImport(std::shared_ptr<const SessionModel> model, const SnapshotLayout& layout)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void DropImport(const SessionPtr& session) ABSL_LOCKS_EXCLUDED(mutex_);
  void OpenImported(SessionPtr session, SessionDone done) ABSL_LOCKS_EXCLUDED(mutex_);
  SessionInfo InsertImported(const SessionPtr& session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // submission
  absl::Status CheckAccepting(int64_t tokens) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckDelay(bool prefill) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status LetStepIn(Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Enqueue(std::unique_ptr<Job> job, int64_t scratch_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the job if the call is to be computed. `what` is what the scratch memory is for.
  absl::Status AdmitStateless(std::unique_ptr<Job>* job, const StatelessTask& task, int64_t scratch,
                              absl::string_view what) ABSL_LOCKS_EXCLUDED(mutex_);
  // `here` is set when the caller has been given the compute thread's place: it must call ComputeHere with it.
  absl::Status AdmitStep(std::unique_ptr<Job>* job, std::optional<Afterwards>* here) ABSL_LOCKS_EXCLUDED(mutex_);
  bool CanChangeNow(const Session& session) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool MayComputeHere(const Job& job) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Duration QueueRetryDelay() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Reject(const absl::Status& status);

  // room (engine_room.cc)
  // Lets idle sessions go, those that were used last longest ago first, so that `bytes` more of the cache are free:
  // kMade: at least one has gone, try again; kComing: they are being written to disk, hold the job (HoldForRoom) or
  // wait for room_cv_; kNone: nobody can go.
  Room MakeRoom(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool DropSessions(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool SpillSessions(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The end of an error message, or nothing.
  std::string WhyNotSpilled() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // StageSegment, making room if that helps; false: room is on its way, nothing is staged.
  bool StageWithRoom(const Job& job, size_t segment, SegmentRun* run) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void HoldForRoom(Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TellRoomMade() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndWait(uint64_t job_id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // storage (engine_storage.cc, engine_saved.cc)
  void AwaitRestore(const SessionPtr& session, Job* job) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RestoreLoop() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::Status Restore(const SessionPtr& session) ABSL_LOCKS_EXCLUDED(mutex_);
  // `here`: it is in memory, as it turns out: what was writing it has failed.
  absl::Status TakeMemoryToRestore(Session* session, bool* here) ABSL_LOCKS_EXCLUDED(mutex_);
  void EndRestore(const SessionPtr& session, const absl::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);
  void SpillLoop() ABSL_LOCKS_EXCLUDED(mutex_);
  void Spill(const SessionPtr& session) ABSL_LOCKS_EXCLUDED(mutex_);
  // All of the session is written: whether it is to be on disk from now on. Not if it was used meanwhile.
  bool CommitSpill(Session* session, absl::Time idle_since, const SnapshotLayout& layout, int64_t bytes)
      ABSL_LOCKS_EXCLUDED(mutex_);
  // Frees its memory, or if it got no file after all, keeps it here. `wanted`: what CommitSpill said, if it was asked.
  void EndSpill(const SessionPtr& session, const absl::Status& status, std::optional<bool> wanted)
      ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<SnapshotStore*> OpenStore(const std::string& directory) ABSL_LOCKS_EXCLUDED(mutex_);
  struct FoundSession;  // a file of an earlier process, and what its header says
  absl::Status Adopt(FoundSession found) ABSL_LOCKS_EXCLUDED(mutex_);
  void AwaitStorage() ABSL_LOCKS_EXCLUDED(mutex_);
  absl::StatusOr<int64_t> SaveSession(const SessionPtr& session, SnapshotStore* store, absl::FunctionRef<bool()> stop)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void Store(Session* session, StoredSession stored) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::unique_ptr<StoredSession> Unstore(Session* session) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes the session's file with it, if it has one. To be called without the mutex.
  void RemoveStored(const Session& session, std::unique_ptr<StoredSession> stored) ABSL_LOCKS_EXCLUDED(mutex_);

  // compute
  void ComputeLoop() ABSL_LOCKS_EXCLUDED(mutex_);
  // `computed`: the compute thread has set busy_ and is done.
  bool WaitForWork(bool computed, std::vector<PendingCreate>* creates, Afterwards* after) ABSL_LOCKS_EXCLUDED(mutex_);
  // Computes plan_ and ends what is finished. REQUIRES: busy_ was set for the caller.
  void RunBatch(Afterwards after) ABSL_LOCKS_EXCLUDED(mutex_);
  // The same in the compute thread's place, and lets others compute.
  void ComputeHere(Afterwards after) ABSL_LOCKS_EXCLUDED(mutex_);
  void PrepareAndCreate(std::vector<PendingCreate> creates) ABSL_LOCKS_EXCLUDED(mutex_);
  void FormBatch(Afterwards* after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // into plan_
  // False: there is no memory yet for its tokens, and it is on hold.
  bool StartJob(Job* job, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddChunks(Job* job, int64_t begin, int64_t end);  // to plan_
  void Compute() ABSL_LOCKS_EXCLUDED(mutex_);
  void EndBatch(absl::Duration elapsed, Afterwards* after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Commits (status OK) or aborts the job's runs, takes it out of jobs_ and leaves its completion in `after`. The
  // scheduler must have let go of it.
  void FinishJob(Job* job, absl::Status status, Afterwards* after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FailQueued(const absl::Status& status, Afterwards* after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunAfterwards(Afterwards after) ABSL_LOCKS_EXCLUDED(mutex_);
  void LeaveSession(SegmentRun* run, absl::Time now, Afterwards* after) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::AnyInvocable<void()> MakeCompletion(std::unique_ptr<Job> job, absl::Status status,
                                            std::vector<SegmentOutcome> outcomes);
  void CompleteJob(Job* job, absl::Status status, std::vector<SegmentOutcome> outcomes) ABSL_LOCKS_EXCLUDED(mutex_);
  void ReportStep(const Job& job, absl::Duration total, absl::Duration queue);
  bool IsDrained() const ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return jobs_.empty() && creates_.empty() && !busy_; }

  const EngineOptions options_;
  EngineObserver* const observer_;  // never null
  EngineObserver null_observer_;
  const std::unique_ptr<BlockPool> pool_;  // its methods that are not thread-safe: with mutex_ held

  mutable absl::Mutex mutex_;
  absl::CondVar work_cv_;     // signalled when the compute thread waits and there is something to do
  absl::CondVar restore_cv_;  // signalled when a session is to be restored
  absl::CondVar spill_cv_;    // signalled when a session is to be spilled
  absl::CondVar room_cv_;     // signalled when a spill has ended
  absl::CondVar reaper_cv_;   // signalled when a session expires sooner than the reaper would wake
  SessionTable sessions_ ABSL_GUARDED_BY(mutex_);
  Scheduler scheduler_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, std::unique_ptr<Job>> jobs_ ABSL_GUARDED_BY(mutex_);
  std::vector<PendingCreate> creates_ ABSL_GUARDED_BY(mutex_);
  int64_t imports_ ABSL_GUARDED_BY(mutex_) = 0;  // prepared and not yet in the table; they hold places of sessions
  absl::flat_hash_set<uint32_t> prepared_shapes_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_job_id_ ABSL_GUARDED_BY(mutex_) = 1;
  uint64_t next_sequence_ ABSL_GUARDED_BY(mutex_) = 1;
  absl::Time reaper_wakes_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  DelayEstimate delay_ ABSL_GUARDED_BY(mutex_);
  ChunkBudget chunk_budget_ ABSL_GUARDED_BY(mutex_);
  std::deque<SessionPtr> restore_queue_ ABSL_GUARDED_BY(mutex_);
  std::deque<QueuedSpill> spill_queue_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, std::vector<uint64_t>> restore_waiters_ ABSL_GUARDED_BY(mutex_);  // jobs, by sequence
  std::vector<uint64_t> room_waiters_ ABSL_GUARDED_BY(mutex_);                                    // jobs
  int64_t spilling_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // that sessions on their way to disk will free
  int64_t spills_ended_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time spill_again_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // after a failure
  std::string spill_error_ ABSL_GUARDED_BY(mutex_);                        // of the last spill
  absl::flat_hash_map<std::string, std::unique_ptr<SnapshotStore>> stores_ ABSL_GUARDED_BY(mutex_);  // by real path
  SnapshotStore* spill_store_ = nullptr;                                                             // set by Create
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;  // a thread computes, or answers what it computed
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool abandoned_ ABSL_GUARDED_BY(mutex_) = false;  // what is left is to be completed with UNAVAILABLE
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;

  int64_t restoring_ ABSL_GUARDED_BY(mutex_) = 0;  // sessions that are on their way back
  // What is being written, or read, is given up.
  std::atomic<bool> stop_spills_{false}, stop_restores_{false};

  // Copies for stats().
  std::atomic<int64_t> stat_sessions_spilled_{0}, stat_spilled_bytes_{0};
  std::atomic<int64_t> stat_sessions_{0}, stat_queue_depth_{0}, stat_queue_tokens_{0};
  std::atomic<bool> stat_draining_{false};

  // Of the thread that has set busy_.
  BatchRunner runner_;
  Plan plan_;
  std::thread spill_thread_;
  std::thread restore_thread_;
  std::thread reaper_thread_;
  std::thread compute_thread_;
};

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_ENGINE_IMPL_H_
