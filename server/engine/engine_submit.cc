// How work gets into the queue.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"
#include "server/engine/step_plan.h"

namespace attnd {
namespace {

// Up to this many tokens per segment a step goes into a batch whole, as a decode does: draft trees are short.
constexpr int64_t kDecodeTokens = 8;
// A step that one thread computes in less than this is computed by the thread that brings it when the engine is idle:
// to wake the compute thread, and a transport's thread again for the answer, cost 15 to 25 us of an overhead of 84 to
// 111 us (on two CPUs).
constexpr double kComputeHereUs = 150;
// A stateless call that packs more keys than this takes turns with the prefills.
constexpr int64_t kDecodeKeys = 512;

bool IsPrefill(const StepTask& step) {
  return std::any_of(step.segments.begin(), step.segments.end(),
                     [](const StepSegment& s) { return s.num_tokens > kDecodeTokens; });
}

SegmentRun MakeStatelessRun(const StatelessTask& task, const BlockLayout* layout) {
  SegmentRun run;
  run.num_tokens = task.num_queries;
  run.layout = layout;
  run.heads = task.heads;
  run.softmax = task.softmax;
  run.mask = task.mask;
  run.zero_empty_rows = task.zero_empty_rows;
  run.q = {task.q, task.q_dtype, task.heads.num_q_heads, task.shape.head_dim};
  if (task.num_keys > 0) {
    run.k = {task.k, task.k_dtype, task.heads.num_kv_heads, task.shape.head_dim};
    run.v = {task.v, task.v_dtype, task.heads.num_kv_heads, task.shape.value_dim};
  }
  run.kv_rows = run.num_keys = task.num_keys;
  run.first_position = task.first_position;
  return run;
}

BackwardWork MakeBackwardWork(const BackwardTask& task) {
  BackwardWork work;
  work.heads = task.heads;
  work.head_dim = task.shape.head_dim;
  work.value_dim = task.shape.value_dim;
  work.softmax = task.softmax;
  work.mask = task.mask;
  work.num_queries = task.num_queries;
  work.num_keys = task.num_keys;
  work.first_position = task.first_position;
  work.q = {task.q, task.q_dtype};
  work.k = {task.k, task.k_dtype};
  work.v = {task.v, task.v_dtype};
  work.d_out = {task.d_out, task.d_out_dtype};
  work.d_q = task.d_q;
  work.d_k = task.d_k;
  work.d_v = task.d_v;
  return work;
}

}  // namespace

void EngineImpl::Reject(const absl::Status& status) {
  if (status.code() != absl::StatusCode::kResourceExhausted && status.code() != absl::StatusCode::kUnavailable) return;
  observer_->OnRejected(GetErrorDetails(status).reason);
}

void EngineImpl::Enqueue(std::unique_ptr<Job> job, int64_t scratch_bytes) {
  job->id = next_job_id_++;
  job->arrival = absl::Now();
  Scheduler::Item item;
  item.id = job->id;
  item.tokens = job->tokens;
  item.prefill = job->prefill;
  item.deadline = job->deadline;
  item.scratch_bytes = scratch_bytes;
  for (SegmentRun& run : job->runs) {
    if (run.session == nullptr || !run.status.ok()) continue;
    run.in_lane = true;
    run.session->pending++;
    item.lanes.push_back(run.session->sequence);
    if (run.session->stored != nullptr) AwaitRestore(run.session, job.get());
  }
  item.held = job->awaited > 0;
  scheduler_.Add(std::move(item));
  jobs_.emplace(job->id, std::move(job));
  stat_queue_depth_ = scheduler_.queued_items();
  stat_queue_tokens_ = scheduler_.queued_tokens();
  if (!busy_) work_cv_.Signal();
}

// Not behind queued steps, and not on disk.
bool EngineImpl::CanChangeNow(const Session& session) const {
  return session.pending == 0 && session.stored == nullptr;
}

bool EngineImpl::MayComputeHere(const Job& job) const {
  if (busy_ || stopping_ || !creates_.empty() || scheduler_.size() > 0 || options_.compute_hook) return false;
  double us = 0;
  for (const SegmentRun& run : job.runs) {
    if (run.session == nullptr || !run.status.ok()) continue;
    if (run.session->stored != nullptr) return false;
    const int64_t length = run.session->cache.length(job.step.layer), keys = length + run.num_tokens;
    us += EstimateAttendUs(run.layout->shape, run.heads, run.num_tokens,
                           VisibleKeys(run.softmax, length, run.num_tokens, keys));
  }
  return us < kComputeHereUs;
}

// Takes the job if the step is to be computed; leaves it, with its runs' statuses, when every segment has failed.
absl::Status EngineImpl::AdmitStep(std::unique_ptr<Job>* job, std::optional<Afterwards>* here) {
  const StepTask& step = (*job)->step;
  absl::Status status = ValidateStepForm(step);
  if (!status.ok()) return status;
  std::vector<SegmentRun>& runs = (*job)->runs;
  runs.resize(step.segments.size());
  absl::MutexLock lock(&mutex_);
  for (size_t i = 0; i < runs.size(); i++) {
    absl::StatusOr<SessionPtr> session = FindSession(step.segments[i].session_id);
    if (session.ok()) {
      runs[i].session = *std::move(session);
    } else {
      runs[i].status = session.status();
    }
  }
  status = ValidateStepShapes(step, options_.kv_cache_bytes, absl::MakeSpan(runs));
  if (!status.ok()) return status;
  (*job)->tokens = runs.back().first_token + runs.back().num_tokens;
  (*job)->prefill = IsPrefill(step);
  status = LetStepIn(job->get());
  if (!status.ok() || (*job)->AllFailed()) return status;
  const bool compute_here = !(*job)->prefill && MayComputeHere(**job);
  if (compute_here) busy_ = true;
  Enqueue(std::move(*job), 0);
  if (compute_here) FormBatch(&here->emplace());
  return absl::OkStatus();
}

void EngineImpl::Submit(StepTask task) {
  auto job = std::make_unique<Job>();
  job->kind = Job::Kind::kStep;
  job->deadline = task.deadline;
  job->cancel = task.cancel;
  job->step = std::move(task);
  std::optional<Afterwards> here;
  const absl::Status status = AdmitStep(&job, &here);
  if (here.has_value()) return ComputeHere(*std::move(here));
  if (job == nullptr) return;
  Reject(status);
  StepOutcome outcome;
  outcome.status = status;
  if (status.ok()) {
    for (const SegmentRun& run : job->runs) {
      Reject(run.status);
      outcome.segments.push_back({run.status, 0, 0});
    }
  }
  job->step.done(std::move(outcome));
}

absl::Status EngineImpl::AdmitStateless(std::unique_ptr<Job>* job, const StatelessTask& task, int64_t scratch,
                                        absl::string_view what) {
  if (scratch > options_.max_attend_bytes) {
    return MakeError(absl::StatusCode::kResourceExhausted, "TOO_MANY_TOKENS",
                     absl::StrCat("the call needs ", scratch, " bytes of scratch memory for ", what, ", the limit is ",
                                  options_.max_attend_bytes),
                     {{"requested", absl::StrCat(scratch)}, {"limit", absl::StrCat(options_.max_attend_bytes)}});
  }
  (*job)->tokens = task.num_queries;
  (*job)->deadline = task.deadline;
  (*job)->cancel = task.cancel;
  (*job)->prefill = task.num_queries > kDecodeTokens || task.num_keys > kDecodeKeys;
  absl::MutexLock lock(&mutex_);
  absl::Status status = CheckAccepting((*job)->tokens);
  if (status.ok()) status = CheckDelay((*job)->prefill);
  if (status.ok()) Enqueue(std::move(*job), scratch);
  return status;
}

void EngineImpl::SubmitAttend(AttendTask task) {
  auto job = std::make_unique<Job>();
  job->kind = Job::Kind::kAttend;
  const BlockLayout& layout = job->stateless_layout.emplace(task.shape);
  SegmentRun& run = job->runs.emplace_back(MakeStatelessRun(task, &layout));
  run.out = task.out;
  run.out_dtype = task.out_dtype;
  run.lse = task.lse;
  run.weights = task.weights;
  const int64_t blocks = (task.num_keys + kBlockTokens - 1) / kBlockTokens * task.heads.num_kv_heads;
  const int64_t scratch = blocks * static_cast<int64_t>(layout.block_bytes);
  job->attend = std::move(task);
  const absl::Status status = AdmitStateless(&job, job->attend, scratch, "its keys and values");
  if (job == nullptr) return;
  Reject(status);
  job->attend.done(status, absl::ZeroDuration(), absl::ZeroDuration());
}

void EngineImpl::SubmitBackward(BackwardTask task) {
  auto job = std::make_unique<Job>();
  job->kind = Job::Kind::kBackward;
  const BlockLayout& layout = job->stateless_layout.emplace(task.shape);
  SegmentRun& run = job->runs.emplace_back(MakeStatelessRun(task, &layout));
  run.backward = &job->backward_run;
  job->backward_run.work = MakeBackwardWork(task);
  job->backward_run.d_out = {task.d_out, task.d_out_dtype, task.heads.num_q_heads, task.shape.value_dim};
  job->backward_run.d_sinks = task.d_sinks;
  const int64_t scratch = BackwardMemoryBytes(job->backward_run.work);
  job->backward = std::move(task);
  const absl::Status status = AdmitStateless(&job, job->backward, scratch, "the sums of its rows and keys");
  if (job == nullptr) return;
  Reject(status);
  job->backward.done(status, absl::ZeroDuration(), absl::ZeroDuration());
}

}  // namespace attnd
