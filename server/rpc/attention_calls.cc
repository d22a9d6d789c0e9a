#include "server/rpc/attention_calls.h"

#include <utility>

#include "server/rpc/convert.h"
#include "server/rpc/step_task.h"
#include "server/rpc/validate.h"

namespace attnd {
namespace {

// Room for a tensor inside the response, which the engine writes straight into.
char* AddTensor(DType dtype, size_t bytes, v1::Tensor* tensor) {
  tensor->set_dtype(ToProto(dtype));
  tensor->mutable_data()->resize(bytes);
  return tensor->mutable_data()->data();
}

// REQUIRES: the request was validated, so that no product wraps.
void AllocateAnswer(const v1::AttendRequest& request, AttendTask* task, v1::AttendResponse* response) {
  const size_t rows = static_cast<size_t>(task->num_queries) * task->heads.num_q_heads;
  const size_t out_bytes = rows * task->shape.value_dim * DTypeBytes(task->out_dtype);
  task->out = reinterpret_cast<std::byte*>(AddTensor(task->out_dtype, out_bytes, response->mutable_out()));
  if (request.return_lse()) {
    task->lse = reinterpret_cast<float*>(AddTensor(DType::kF32, rows * sizeof(float), response->mutable_lse()));
  }
  if (request.return_weights()) {
    const size_t weights_bytes = rows * task->num_keys * sizeof(float);
    task->weights = reinterpret_cast<float*>(AddTensor(DType::kF32, weights_bytes, response->mutable_weights()));
  }
}

}  // namespace

void AttendCall::Handle() {
  AttendTask task;
  absl::Status status = FillAttendTask(request(), state().max_answer_bytes, &task);
  if (!status.ok()) return FinishWith(status);
  AllocateAnswer(request(), &task, &response());
  task.deadline = deadline();
  task.cancel = cancel();
  task.done = [this](absl::Status result, absl::Duration, absl::Duration) { FinishWith(result); };
  engine().SubmitAttend(std::move(task));
}

void StepCall::Handle() {
  StepTask task;
  absl::Status status = PrepareStep(engine(), request(), state().max_answer_bytes, &response(), &task);
  if (!status.ok()) return FinishWith(status);
  task.deadline = deadline();
  task.cancel = cancel();
  task.done = [this](StepOutcome outcome) {
    absl::Status result = FillStepResponse(outcome, *state().observer, &response());
    FinishWith(result);
  };
  engine().Submit(std::move(task));
}

}  // namespace attnd
