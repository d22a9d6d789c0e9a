// Validation at the edge: a request either becomes a task of the engine or is refused with a sentence that holds both
// numbers that disagree. Nothing is allocated from a number that the client chose; products of shapes cannot wrap.
// Stateless and thread-safe.
#ifndef ATTND_SERVER_RPC_VALIDATE_H_
#define ATTND_SERVER_RPC_VALIDATE_H_

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attnd/v1/attnd.pb.h"
#include "server/engine/engine.h"

namespace attnd {

inline constexpr int kMaxLayers = 1024;
inline constexpr int kMaxHeads = 1024;
inline constexpr int kMaxSegments = 4096;
inline constexpr int64_t kMaxSessionTokens = int64_t{1} << 30;
inline constexpr int64_t kMaxAttendWeights = int64_t{1} << 24;
inline constexpr size_t kMaxSessionIdBytes = 128;

// ---- requests to tasks. Tasks point into the request, which must outlive them. -----------------------------------

// `max_answer_bytes`: an answer that could not be sent is refused before it is computed.
absl::Status FillAttendTask(const v1::AttendRequest& request, int64_t max_answer_bytes, AttendTask* task);
absl::Status FillBackwardTask(const v1::AttendBackwardRequest& request, int64_t max_answer_bytes, BackwardTask* task);

// Checks all that can be known without the sessions; heads and dims are checked by the engine.
absl::Status FillStepTask(const v1::StepRequest& request, StepTask* task);

// Refuses a step whose answer would be larger than `max_answer_bytes`. `config` is that of the step's sessions.
absl::Status CheckStepAnswer(const StepTask& task, const SessionConfig& config, int64_t max_answer_bytes);
// False when the answer is small whatever the sessions' dims, so that CheckStepAnswer can be left out.
bool StepAnswerMayExceed(const StepTask& task, int64_t max_answer_bytes);

absl::StatusOr<SessionConfig> MakeSessionConfig(const v1::SessionConfig& config);

absl::Status CheckSessionId(absl::string_view session_id);

// The length to fork at, if one is given.
absl::StatusOr<std::optional<int64_t>> CheckFork(const v1::ForkSessionRequest& request);
absl::Status CheckReorder(const v1::ReorderSessionsRequest& request);

struct Page {
  uint64_t after = 0;
  int limit = 0;
};
absl::StatusOr<Page> MakePage(const v1::ListSessionsRequest& request);

// ---- parts, used by the above ------------------------------------------------------------------------------------

absl::Status InvalidArgument(absl::string_view reason, absl::string_view message);

// Refuses (MESSAGE_TOO_LARGE) an answer whose parts together are longer than the limit.
absl::Status CheckAnswerBytes(std::initializer_list<int64_t> parts, int64_t max_answer_bytes);

// Product of the shape and the element size, or -1 when it does not fit 63 bits or a factor is negative.
int64_t ByteProduct(std::initializer_list<int64_t> shape, int64_t element_bytes);

absl::Status CheckDType(absl::string_view name, v1::DType dtype);
absl::Status CheckTensor(absl::string_view name, const v1::Tensor& tensor, std::initializer_list<int64_t> shape);
absl::Status CheckMask(const v1::BitMask& mask, int64_t rows, int64_t columns);
// `reason` is BAD_SHAPE in a stateless call and BAD_CONFIG in a session's configuration.
absl::Status CheckHeads(absl::string_view reason, int64_t num_q_heads, int64_t num_kv_heads);
absl::Status CheckDims(absl::string_view reason, int64_t head_dim, int64_t value_dim);
absl::Status CheckKvDType(absl::string_view reason, v1::KvDType dtype);
absl::Status CheckSoftmax(absl::string_view reason, const v1::SoftmaxOptions& softmax, int num_q_heads);
float SoftmaxScale(const v1::SoftmaxOptions& softmax, int head_dim);

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_VALIDATE_H_
