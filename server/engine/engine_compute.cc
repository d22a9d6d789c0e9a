// Forms a batch of what is queued, computes it, commits it and answers.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"
#include "server/engine/step_plan.h"
#include "server/engine/window.h"

namespace attnd {
namespace {

absl::Status CancelledError() {
  return MakeError(absl::StatusCode::kCancelled, "CANCELLED", "the caller went away; nothing was appended");
}

absl::Status DeadlineError() {
  return MakeError(absl::StatusCode::kDeadlineExceeded, "DEADLINE_EXCEEDED",
                   "the deadline passed before the answer was ready; nothing was appended");
}

absl::Status UnavailableError() {
  return MakeError(absl::StatusCode::kUnavailable, "DRAINING", "the server is shutting down; nothing was appended");
}

absl::Duration Since(absl::Time from, absl::Time to) { return std::max(absl::ZeroDuration(), to - from); }

// Rows of failed segments are zeros: never another session's numbers, never what memory held before.
void ZeroFailedRows(const Job& job) {
  for (const SegmentRun& run : job.runs) {
    if (run.status.ok() || run.out == nullptr) continue;
    std::memset(run.out, 0, run.num_tokens * run.out_row_bytes());
    if (run.lse != nullptr) std::fill_n(run.lse, run.num_tokens * run.heads.num_q_heads, 0.0f);
  }
}

size_t StatelessScratchBytes(const Job& job) {
  const SegmentRun& run = job.runs[0];
  if (run.backward != nullptr) return BackwardMemoryBytes(run.backward->work);
  return (run.num_keys + kBlockTokens - 1) / kBlockTokens * run.heads.num_kv_heads * run.layout->block_bytes;
}

void PrepareScratch(Job* job) {
  const size_t bytes = StatelessScratchBytes(*job);
  if (bytes == 0) return;
  SegmentRun& run = job->runs[0];
  if (run.backward != nullptr) {
    // Zeros, and those of large memory are the kernel's: they come as the threads first touch it.
    job->scratch.reset(static_cast<std::byte*>(std::calloc(bytes, 1)));
    if (job->scratch != nullptr) UseMemory(job->scratch.get(), &run.backward->work);
  } else {
    constexpr size_t kAlign = 64;
    job->scratch.reset(static_cast<std::byte*>(std::aligned_alloc(kAlign, (bytes + kAlign - 1) / kAlign * kAlign)));
    run.scratch = job->scratch.get();
  }
  if (job->scratch == nullptr) {
    run.status = MakeError(absl::StatusCode::kResourceExhausted, "CACHE_FULL",
                           absl::StrCat("no memory for ", bytes, " bytes of scratch"), {}, absl::Milliseconds(500));
  }
}

// Memory for answers and of stateless calls, when the job's first chunk comes up.
void PrepareBuffers(Job* job) {
  const bool stateless = job->kind == Job::Kind::kAttend || job->kind == Job::Kind::kBackward;
  if (stateless && job->scratch == nullptr) return PrepareScratch(job);
  if (job->kind != Job::Kind::kStep || job->step.q_bytes == 0 || job->step.allocate == nullptr) return;
  const SegmentRun* shape = nullptr;  // all have the same heads and dims
  for (const SegmentRun& run : job->runs) {
    if (run.layout != nullptr) shape = &run;
  }
  const int64_t heads = shape->heads.num_q_heads;
  const StepTask::Buffers buffers =
      job->step.allocate(job->tokens * shape->out_row_bytes(), job->step.return_lse ? job->tokens * heads : 0);
  job->step.allocate = nullptr;
  const size_t row_bytes = shape->out_row_bytes();
  for (SegmentRun& run : job->runs) {
    run.out = buffers.out + run.first_token * row_bytes;
    if (job->step.return_lse) run.lse = buffers.lse + run.first_token * heads;
    if (run.layout == nullptr) {  // failed at the door; its rows are zeroed all the same
      run.layout = shape->layout;
      run.heads = shape->heads;
      run.out_dtype = shape->out_dtype;
    }
  }
}

// Of a job that starts now, in microseconds of one thread.
Scheduler::Cost CostOf(const Job& job) {
  Scheduler::Cost cost;
  for (const SegmentRun& run : job.runs) {
    if (!run.status.ok()) continue;
    int64_t keys = run.num_keys;  // of a stateless call; a session's run is staged later
    if (run.session != nullptr) {
      if (run.session->gone != GoneReason::kNone) continue;
      keys = run.session->cache.length(job.step.layer);
    }
    // The call has all its keys from the start, and a causal row sees those up to its own.
    if (run.session == nullptr && run.softmax.causal) keys = std::clamp<int64_t>(run.first_position, 0, keys);
    const int64_t window = run.softmax.window;
    cost.history = std::max(cost.history, window > 0 ? std::min(window, keys) : keys);
    cost.work_per_key = EstimateUsPerKey(run);
    // With 64 rows a chunk's products take about as long as they must. A backward call has tiles of 64.
    constexpr int kMinRows = 64;
    const int least_rows = run.backward != nullptr ? kMinRows : LeastRows(run.layout->shape);
    const int group = run.heads.group_size();
    cost.min_tokens = (kMinRows + group - 1) / group;
    cost.least_tokens = (least_rows + group - 1) / group;
  }
  return cost;
}

}  // namespace

void EngineImpl::ComputeLoop() {
  std::vector<PendingCreate> creates;
  Afterwards after;
  bool computed = false;
  while (WaitForWork(computed, &creates, &after)) {
    computed = true;
    if (!creates.empty()) PrepareAndCreate(std::exchange(creates, {}));
    RunBatch(std::exchange(after, Afterwards()));
  }
}

// False when the engine stops.
bool EngineImpl::WaitForWork(bool computed, std::vector<PendingCreate>* creates, Afterwards* after) {
  absl::MutexLock lock(&mutex_);
  if (computed) busy_ = false;
  while (!stopping_ && (busy_ || (creates_.empty() && !scheduler_.has_ready()))) work_cv_.Wait(&mutex_);
  if (stopping_) return false;
  busy_ = true;
  creates->swap(creates_);
  FormBatch(after);
  return true;
}

void EngineImpl::RunBatch(Afterwards after) {
  RunAfterwards(std::exchange(after, Afterwards()));  // of what was dropped while the batch was formed
  if (!plan_.jobs.empty()) {
    const absl::Time begin = absl::Now();
    Compute();
    {
      absl::MutexLock lock(&mutex_);
      EndBatch(Since(begin, absl::Now()), &after);
    }
    RunAfterwards(std::move(after));
  }
}

void EngineImpl::ComputeHere(Afterwards after) {
  RunBatch(std::move(after));
  absl::MutexLock lock(&mutex_);
  busy_ = false;
  if (!creates_.empty() || scheduler_.has_ready()) work_cv_.Signal();
}

void EngineImpl::FormBatch(Afterwards* after) {
  plan_.jobs.clear();
  plan_.is_last.clear();
  plan_.chunks.clear();
  plan_.tokens = plan_.prefill_tokens = plan_.decodes = 0;
  const absl::Time now = absl::Now();
  const auto job_of = [this](uint64_t id) ABSL_NO_THREAD_SAFETY_ANALYSIS { return jobs_.find(id)->second.get(); };
  const Scheduler::Batch batch = scheduler_.Form(now, chunk_budget_.us(),
                                                 {.is_cancelled = [&](uint64_t id) { return job_of(id)->cancelled(); },
                                                  .cost = [&](uint64_t id) { return CostOf(*job_of(id)); }});
  for (const Scheduler::Drop& drop : batch.dropped) {
    Job* const job = jobs_.find(drop.id)->second.get();
    FinishJob(job, drop.cancelled ? CancelledError() : DeadlineError(), after);
  }
  for (const Scheduler::Chunk& chunk : batch.chunks) {
    Job* const job = jobs_.find(chunk.id)->second.get();
    if (!job->started && !StartJob(job, now)) continue;
    if (job->AllFailed() || job->kind == Job::Kind::kMove) {
      scheduler_.Finish(job->id);
      FinishJob(job, absl::OkStatus(), after);
      continue;
    }
    job->in_batch = true;
    plan_.jobs.push_back(job);
    plan_.is_last.push_back(chunk.last);
    plan_.tokens += chunk.end - chunk.begin;
    if (job->prefill) {
      plan_.prefill_tokens += chunk.end - chunk.begin;
    } else {
      plan_.decodes++;
    }
    AddChunks(job, chunk.begin, chunk.end);
  }
  stat_queue_depth_ = scheduler_.queued_items();
  stat_queue_tokens_ = scheduler_.queued_tokens();
}

bool EngineImpl::StartJob(Job* job, absl::Time now) {
  job->started = true;
  job->first_compute = now;
  for (size_t i = 0; i < job->runs.size(); i++) {
    SegmentRun& run = job->runs[i];
    if (run.session == nullptr || !run.status.ok()) continue;
    Session& session = *run.session;
    if (session.gone != GoneReason::kNone) {
      run.status = SessionTable::GoneError(session.id, session.gone);
      continue;
    }
    session.running = run.entered = true;
    if (job->kind != Job::Kind::kStep || StageWithRoom(*job, i, &run)) continue;
    HoldForRoom(job);
    return false;
  }
  if (job->kind == Job::Kind::kMove) job->move_status = Move(job);
  return true;
}

// The part [begin, end) of the job's tokens, by runs.
void EngineImpl::AddChunks(Job* job, int64_t begin, int64_t end) {
  for (SegmentRun& run : job->runs) {
    const int64_t first = std::max<int64_t>(0, begin - run.first_token);
    const int64_t last = std::min(run.num_tokens, end - run.first_token);
    if (first < last && run.status.ok()) plan_.chunks.push_back({&run, first, last});
  }
}

void EngineImpl::Compute() {
  for (Job* job : plan_.jobs) PrepareBuffers(job);
  runner_.Run(plan_.chunks);
  observer_->OnBatch(static_cast<int>(plan_.chunks.size()), plan_.tokens, runner_.kv_bytes_read());
}

void EngineImpl::EndBatch(absl::Duration elapsed, Afterwards* after) {
  const absl::Time now = absl::Now();
  const bool others_wait =
      plan_.prefill_tokens > 0 ? scheduler_.ready_decodes() > 0 : scheduler_.prefill_tokens_left() > 0;
  delay_.AddBatch(plan_.prefill_tokens, plan_.decodes, others_wait, elapsed);
  // Decodes wait for memory, prefills for the multipliers: only these tell how fast the next chunks will be.
  if (plan_.prefill_tokens > 0) chunk_budget_.AddBatch(runner_.estimated_us(), elapsed);
  for (size_t i = 0; i < plan_.jobs.size(); i++) {
    Job* const job = plan_.jobs[i];
    job->in_batch = false;
    job->compute_time += elapsed;
    absl::Status status;
    if (plan_.is_last[i] || job->AllFailed()) {
      // The last moment at which it can still leave no trace.
      if (job->cancelled()) status = CancelledError();
      if (status.ok() && job->deadline <= now) status = DeadlineError();
    } else if (abandoned_) {
      status = UnavailableError();
    } else {
      continue;  // a prefill with chunks left
    }
    scheduler_.Finish(job->id);
    FinishJob(job, std::move(status), after);
  }
}

void EngineImpl::FinishJob(Job* job, absl::Status status, Afterwards* after) {
  const absl::Time now = absl::Now();
  std::vector<SegmentOutcome> outcomes;
  for (SegmentRun& run : job->runs) {
    SegmentOutcome outcome;
    outcome.status = run.status;
    if (run.session != nullptr) {
      SessionCache& cache = run.session->cache;
      if (status.ok() && run.status.ok() && job->kind == Job::Kind::kStep) {
        outcome.start_position = run.first_position;
        if (run.staged.active) CommitAndFree(&run);
        outcome.length = cache.length(job->step.layer);
      } else {
        cache.Abort(&run.staged);
      }
    }
    if (run.in_lane) LeaveSession(&run, now, after);
    outcomes.push_back(std::move(outcome));
  }
  status.Update(job->move_status);
  const auto it = jobs_.find(job->id);
  std::unique_ptr<Job> owned = std::move(it->second);
  jobs_.erase(it);
  after->calls.push_back(MakeCompletion(std::move(owned), std::move(status), std::move(outcomes)));
}

void EngineImpl::LeaveSession(SegmentRun* run, absl::Time now, Afterwards* after) {
  Session& session = *run->session;
  session.pending--;
  if (run->entered) session.running = false;
  if (session.gone != GoneReason::kNone) {
    if (run->entered) after->release.push_back(run->session);  // whoever closed it left that to us
  } else if (session.pending == 0) {
    sessions_.Touch(&session, now);
    WakeReaper();
  }
}

void EngineImpl::FailQueued(const absl::Status& status, Afterwards* after) {
  std::vector<Job*> queued;
  for (const auto& [id, job] : jobs_) {
    if (!job->in_batch) queued.push_back(job.get());
  }
  // In the order they came: a stream's answers then fail in order too.
  std::sort(queued.begin(), queued.end(), [](const Job* a, const Job* b) { return a->id < b->id; });
  for (Job* job : queued) {
    scheduler_.Finish(job->id);
    FinishJob(job, status, after);
  }
  for (PendingCreate& create : std::exchange(creates_, {})) {
    if (create.imported != nullptr) {
      imports_--;
      after->release.push_back(std::move(create.imported));
    }
    after->calls.push_back([done = std::move(create.done), status]() mutable { done(status); });
  }
  stat_queue_depth_ = scheduler_.queued_items();
  stat_queue_tokens_ = scheduler_.queued_tokens();
}

void EngineImpl::RunAfterwards(Afterwards after) {
  for (const SessionPtr& session : after.release) ReleaseBlocks(session);
  for (auto& call : after.calls) call();
}

absl::AnyInvocable<void()> EngineImpl::MakeCompletion(std::unique_ptr<Job> job, absl::Status status,
                                                      std::vector<SegmentOutcome> outcomes) {
  return [this, job = std::move(job), status = std::move(status), outcomes = std::move(outcomes)]() mutable {
    CompleteJob(job.get(), std::move(status), std::move(outcomes));
  };
}

void EngineImpl::CompleteJob(Job* job, absl::Status status, std::vector<SegmentOutcome> outcomes) {
  const absl::Time now = absl::Now();
  const absl::Duration queue_time = Since(job->arrival, job->started ? job->first_compute : now);
  if (absl::IsCancelled(status) || absl::IsDeadlineExceeded(status)) {
    using Stage = EngineObserver::CancelStage;
    observer_->OnCancelled(job->started ? Stage::kComputing : Stage::kQueued);
  } else {
    Reject(status);
  }
  switch (job->kind) {
    case Job::Kind::kMove:
      return job->move_done(std::move(status));
    case Job::Kind::kAttend:
      status.Update(job->runs[0].status);
      return job->attend.done(std::move(status), queue_time, job->compute_time);
    case Job::Kind::kBackward:
      status.Update(job->runs[0].status);
      return job->backward.done(std::move(status), queue_time, job->compute_time);
    case Job::Kind::kStep:
      break;
  }
  if (status.ok()) {
    ZeroFailedRows(*job);
    for (const SegmentRun& run : job->runs) Reject(run.status);
    ReportStep(*job, Since(job->arrival, now), queue_time);
  } else {
    outcomes.clear();
  }
  job->step.done({std::move(status), std::move(outcomes), queue_time, job->compute_time});
}

void EngineImpl::ReportStep(const Job& job, absl::Duration total, absl::Duration queue) {
  int64_t tokens = 0;
  bool is_decode = true;
  for (const SegmentRun& run : job.runs) {
    if (run.status.ok()) tokens += run.num_tokens;
    is_decode = is_decode && run.num_tokens == 1;
  }
  if (tokens == 0) return;
  using Phase = EngineObserver::Phase;
  observer_->OnStepDone(is_decode ? Phase::kDecode : Phase::kPrefill, tokens, total, queue, job.compute_time);
}

}  // namespace attnd
