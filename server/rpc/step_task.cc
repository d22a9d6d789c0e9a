#include "server/rpc/step_task.h"

#include <string>

#include "server/engine/errors.h"
#include "server/rpc/convert.h"
#include "server/rpc/status_map.h"
#include "server/rpc/validate.h"

namespace attnd {
namespace {

StepTask::Buffers AllocateAnswer(v1::StepResponse* response, DType out_dtype, size_t out_bytes, size_t lse_floats) {
  StepTask::Buffers buffers;
  v1::Tensor* out = response->mutable_out();
  out->set_dtype(ToProto(out_dtype));
  out->mutable_data()->resize(out_bytes);  // zeros: what a failed segment's rows hold
  buffers.out = reinterpret_cast<std::byte*>(out->mutable_data()->data());
  if (lse_floats > 0) {
    v1::Tensor* lse = response->mutable_lse();
    lse->set_dtype(v1::DTYPE_F32);
    lse->mutable_data()->resize(lse_floats * sizeof(float));
    buffers.lse = reinterpret_cast<float*>(lse->mutable_data()->data());
  }
  return buffers;
}

}  // namespace

absl::Status PrepareStep(Engine& engine, const v1::StepRequest& request, int64_t max_answer_bytes,
                         v1::StepResponse* response, StepTask* task) {
  response->set_request_id(request.request_id());
  if (absl::Status status = FillStepTask(request, task); !status.ok()) return status;
  if (StepAnswerMayExceed(*task, max_answer_bytes)) {
    // An unknown session is left to the engine, whose answer tells what became of it.
    const absl::StatusOr<SessionInfo> info = engine.GetSession(task->segments[0].session_id);
    absl::Status status = info.ok() ? CheckStepAnswer(*task, info->config, max_answer_bytes) : absl::OkStatus();
    if (!status.ok()) return status;
  }
  task->allocate = [response, out_dtype = task->out_dtype](size_t out_bytes, size_t lse_floats) {
    return AllocateAnswer(response, out_dtype, out_bytes, lse_floats);
  };
  return absl::OkStatus();
}

absl::Status FillStepResponse(const StepOutcome& outcome, RpcObserver& observer, v1::StepResponse* response) {
  if (!outcome.status.ok()) return outcome.status;
  if (outcome.segments.size() == 1 && !outcome.segments[0].status.ok()) return outcome.segments[0].status;
  for (const SegmentOutcome& segment : outcome.segments) {
    v1::SegmentResult* result = response->add_segments();
    result->set_start_position(segment.start_position);
    result->set_length(segment.length);
    if (segment.status.ok()) continue;
    FillStepStatus(segment.status, result->mutable_status());
    const std::string reason = GetErrorDetails(segment.status).reason;
    if (!reason.empty()) observer.OnError(reason);
  }
  response->mutable_timing()->set_queue_ns(absl::ToInt64Nanoseconds(outcome.queue_time));
  response->mutable_timing()->set_compute_ns(absl::ToInt64Nanoseconds(outcome.compute_time));
  return absl::OkStatus();
}

}  // namespace attnd
