// A StepRequest as a task of the engine, and the engine's outcome as a StepResponse: what Step and StepStream share.
// Stateless and thread-safe.
#ifndef ATTND_SERVER_RPC_STEP_TASK_H_
#define ATTND_SERVER_RPC_STEP_TASK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "attnd/v1/attnd.pb.h"
#include "server/engine/engine.h"
#include "server/rpc/rpc_observer.h"

namespace attnd {

// Validates, and fills everything of the task but its deadline, cancel and done. The task points into `request` and
// writes into `response`; both must live until it is done.
absl::Status PrepareStep(Engine& engine, const v1::StepRequest& request, int64_t max_answer_bytes,
                         v1::StepResponse* response, StepTask* task);

// Returns the error of the step as a whole, that of its only segment included; otherwise OK, and each segment of the
// response carries its own status. Segments' errors are told to the observer; the error returned is not.
absl::Status FillStepResponse(const StepOutcome& outcome, RpcObserver& observer, v1::StepResponse* response);

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_STEP_TASK_H_
