#include "client/cpp/session.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cpp/client.h"
#include "client/cpp/internal/status.h"

namespace attnd::client {
namespace {

absl::Status BadShape(const std::string& message) {
  return internal::ClientError(absl::StatusCode::kInvalidArgument, "BAD_SHAPE", message);
}

// Rows of a tensor, or what is wrong with it.
absl::StatusOr<int64_t> CountTokens(const char* name, const TensorView& tensor, int heads, int dim) {
  const int64_t row = int64_t{heads} * dim;
  const int64_t size = static_cast<int64_t>(tensor.size());
  if (row > 0 && size % row == 0) return size / row;
  return BadShape(absl::StrCat(name, " has ", size, " elements, not a multiple of ", heads, " heads x ", dim));
}

}  // namespace

Session::Session(const Client& client, std::string id, SessionConfig config)
    : client_(std::make_unique<Client>(client)), id_(std::move(id)), config_(std::move(config)) {}

Session::Session(Session&&) noexcept = default;

Session& Session::operator=(Session&& other) noexcept {
  if (this != &other) {
    CloseQuietly();
    client_ = std::move(other.client_);
    id_ = std::move(other.id_);
    config_ = std::move(other.config_);
    close_on_destroy_ = other.close_on_destroy_;
  }
  return *this;
}

Session::~Session() { CloseQuietly(); }

void Session::CloseQuietly() {
  if (client_ == nullptr || !close_on_destroy_) return;
  // What fails here ends with the session's time to live.
  client_->CloseSession(id_, {.timeout = absl::Seconds(5), .stop = {}}).IgnoreError();
}

const std::string& Session::id() const { return id_; }
const SessionConfig& Session::config() const { return config_; }

absl::StatusOr<StepRequest> Session::MakeStep(int layer, TensorView q, TensorView k, TensorView v,
                                              const StepOptions& options) const {
  absl::StatusOr<int64_t> of_q = CountTokens("q", q, config_.num_q_heads, config_.head_dim);
  absl::StatusOr<int64_t> of_k = CountTokens("k", k, config_.num_kv_heads, config_.head_dim);
  absl::StatusOr<int64_t> of_v = CountTokens("v", v, config_.num_kv_heads, config_.value_dim_or_default());
  for (const auto* count : {&of_q, &of_k, &of_v}) {
    if (!count->ok()) return count->status();
  }
  if (*of_k != *of_v) return BadShape(absl::StrCat("k has ", *of_k, " tokens and v has ", *of_v));
  if (*of_q != 0 && *of_k != 0 && *of_q != *of_k) {
    return BadShape(absl::StrCat("q has ", *of_q, " tokens and k and v have ", *of_k));
  }
  const int64_t tokens = *of_q != 0 ? *of_q : *of_k;
  if (tokens == 0) return BadShape("a step needs at least 1 token and has 0");
  StepRequest request;
  request.layer = layer;
  request.segments.push_back({id_, tokens, options.start_position, options.rewind, options.mask});
  request.q = q;
  request.k = k;
  request.v = v;
  request.empty_rows = options.empty_rows;
  request.return_lse = options.return_lse;
  request.out_dtype = options.out_dtype;
  return request;
}

absl::StatusOr<StepResult> Session::Step(int layer, TensorView q, TensorView k, TensorView v,
                                         const StepOptions& options) const {
  absl::StatusOr<StepRequest> request = MakeStep(layer, q, k, v, options);
  if (!request.ok()) return request.status();
  return client_->Step(*request, options.call);
}

absl::Status Session::StepInto(int layer, TensorView q, TensorView k, TensorView v, DType out_dtype, void* out,
                               size_t out_elements, const StepOptions& options) const {
  absl::StatusOr<StepRequest> request = MakeStep(layer, q, k, v, options);
  if (!request.ok()) return request.status();
  // Checked before sending: a step that was appended cannot be taken back for want of room.
  const int64_t expected =
      q.empty() ? 0 : request->segments[0].num_tokens * config_.num_q_heads * config_.value_dim_or_default();
  if (static_cast<int64_t>(out_elements) != expected) {
    return BadShape(absl::StrCat("out has ", out_elements, " elements and the answer has ", expected));
  }
  request->out_dtype = out_dtype;
  absl::StatusOr<StepResult> result = client_->Step(*request, options.call);
  if (!result.ok()) return result.status();
  if (result->out.data.size() != out_elements * DTypeBytes(out_dtype) || result->out.dtype != out_dtype) {
    return absl::InternalError(absl::StrCat("the server answered ", result->out.size(), " elements of ",
                                            Name(result->out.dtype), " where ", out_elements, " of ", Name(out_dtype),
                                            " were asked for"));
  }
  if (out_elements > 0) std::memcpy(out, result->out.data.data(), result->out.data.size());
  return absl::OkStatus();
}

absl::Status Session::Step(int layer, TensorView q, TensorView k, TensorView v, std::span<float> out,
                           const StepOptions& options) const {
  return StepInto(layer, q, k, v, DType::kF32, out.data(), out.size(), options);
}

absl::Status Session::Step(int layer, TensorView q, TensorView k, TensorView v, std::span<BFloat16> out,
                           const StepOptions& options) const {
  return StepInto(layer, q, k, v, DType::kBf16, out.data(), out.size(), options);
}

absl::Status Session::Step(int layer, TensorView q, TensorView k, TensorView v, std::span<Float16> out,
                           const StepOptions& options) const {
  return StepInto(layer, q, k, v, DType::kF16, out.data(), out.size(), options);
}

absl::StatusOr<SessionInfo> Session::Get(const CallOptions& call) const { return client_->GetSession(id_, call); }

absl::StatusOr<SessionInfo> Session::Rewind(int64_t length, const CallOptions& call) const {
  return client_->RewindSession(id_, length, call);
}

absl::Status Session::Export(const SnapshotSink& sink, const CallOptions& call) const {
  return client_->ExportSession(id_, sink, call);
}

absl::StatusOr<Session> Session::Fork(std::optional<int64_t> length, const CallOptions& call) const {
  return client_->ForkSession(id_, length, call);
}

absl::StatusOr<bool> Session::Close(const CallOptions& call) { return client_->CloseSession(id_, call); }

}  // namespace attnd::client
