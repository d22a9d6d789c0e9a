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

struct AnswerBytes {
  size_t out = 0, lse = 0, weights = 0;
  int64_t sum() const { return static_cast<int64_t>(out + lse + weights); }
};

// REQUIRES: the request was validated, so that no product wraps.
AnswerBytes BytesOfAnswer(const v1::AttendRequest& request, const AttendTask& task) {
  const size_t rows = static_cast<size_t>(task.num_queries) * task.heads.num_q_heads;
  AnswerBytes bytes;
  bytes.out = rows * task.shape.value_dim * DTypeBytes(task.out_dtype);
  if (request.return_lse()) bytes.lse = rows * sizeof(float);
  if (request.return_weights()) bytes.weights = rows * task.num_keys * sizeof(float);
  return bytes;
}

void AllocateAnswer(const AnswerBytes& bytes, AttendTask* task, v1::AttendResponse* response) {
  task->out = reinterpret_cast<std::byte*>(AddTensor(task->out_dtype, bytes.out, response->mutable_out()));
  if (bytes.lse > 0) {
    task->lse = reinterpret_cast<float*>(AddTensor(DType::kF32, bytes.lse, response->mutable_lse()));
  }
  if (bytes.weights > 0) {
    task->weights = reinterpret_cast<float*>(AddTensor(DType::kF32, bytes.weights, response->mutable_weights()));
  }
}

// Zeros, which the engine adds to.
float* AddGradient(int64_t floats, v1::Tensor* tensor) {
  return reinterpret_cast<float*>(AddTensor(DType::kF32, floats * sizeof(float), tensor));
}

}  // namespace

void AttendCall::Handle() {
  AttendTask task;
  absl::Status status = FillAttendTask(request(), state().max_answer_bytes, &task);
  if (!status.ok()) return FinishWith(status);
  const AnswerBytes bytes = BytesOfAnswer(request(), task);
  if (status = ReserveAnswer(bytes.sum()); !status.ok()) return FinishWith(status);
  AllocateAnswer(bytes, &task, &response());
  task.deadline = deadline();
  task.cancel = cancel();
  task.done = [this](absl::Status result, absl::Duration, absl::Duration) { FinishWith(result); };
  engine().SubmitAttend(std::move(task));
}

void AttendBackwardCall::Handle() {
  BackwardTask task;
  absl::Status status = FillBackwardTask(request(), state().max_answer_bytes, &task);
  if (!status.ok()) return FinishWith(status);
  const int64_t q_rows = task.num_queries * task.heads.num_q_heads, k_rows = task.num_keys * task.heads.num_kv_heads;
  const int64_t d_q = q_rows * task.shape.head_dim, d_k = k_rows * task.shape.head_dim;
  const int64_t d_v = k_rows * task.shape.value_dim, d_sinks = request().softmax().sinks_size();
  status = ReserveAnswer((d_q + d_k + d_v + d_sinks) * static_cast<int64_t>(sizeof(float)));
  if (!status.ok()) return FinishWith(status);
  task.d_q = AddGradient(d_q, response().mutable_d_q());
  task.d_k = AddGradient(d_k, response().mutable_d_k());
  task.d_v = AddGradient(d_v, response().mutable_d_v());
  if (d_sinks > 0) {
    response().mutable_d_sinks()->Resize(static_cast<int>(d_sinks), 0.0f);
    task.d_sinks = response().mutable_d_sinks()->mutable_data();
  }
  task.deadline = deadline();
  task.cancel = cancel();
  task.done = [this](absl::Status result, absl::Duration, absl::Duration) { FinishWith(result); };
  engine().SubmitBackward(std::move(task));
}

void StepCall::Handle() {
  StepTask task;
  absl::Status status = PrepareStep(engine(), request(), state().max_answer_bytes, &response(), &task);
  if (!status.ok()) return FinishWith(status);
  task.deadline = deadline();
  task.cancel = cancel();
  task.reserve_answer = [this](int64_t bytes) { return ReserveAnswer(bytes); };
  task.done = [this](StepOutcome outcome) {
    absl::Status result = FillStepResponse(outcome, *state().observer, &response());
    FinishWith(result);
  };
  engine().Submit(std::move(task));
}

}  // namespace attnd
