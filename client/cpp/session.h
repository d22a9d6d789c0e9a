// A handle to one session of the server.
#ifndef ATTND_CLIENT_CPP_SESSION_H_
#define ATTND_CLIENT_CPP_SESSION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "options.h"
#include "requests.h"
#include "types.h"

namespace attnd::client {

class Client;

// Options of one step of a handle.
struct StepOptions {
  std::optional<int64_t> start_position = {};  // see Segment
  bool rewind = false;
  BitMask mask = {};
  EmptyRows empty_rows = EmptyRows::kReject;
  bool return_lse = false;
  std::optional<DType> out_dtype = {};
  CallOptions call = {};
};

// Made by Client::CreateSession, OpenSession and ForkSession. Movable, not copyable. It keeps its connection alive.
// Steps of different layers may run on different threads; those of one layer in the order that the caller wants.
class Session {
 public:
  Session(Session&&) noexcept;
  Session& operator=(Session&&) noexcept;
  // Closes the session if close_on_destroy was set, within 5 s and without saying how that went.
  ~Session();

  const std::string& id() const;
  const SessionConfig& config() const;  // with the server's defaults filled in

  // Appends K and V and attends Q. The number of tokens follows from the sizes: INVALID_ARGUMENT with BAD_SHAPE, both
  // numbers in the message, when they disagree. Other errors as Client::Step.
  //   q: [tokens, num_q_heads, head_dim], absent: append only
  //   k: [tokens, num_kv_heads, head_dim], v: [tokens, num_kv_heads, value_dim], both absent: attend only
  absl::StatusOr<StepResult> Step(int layer, TensorView q, TensorView k, TensorView v,
                                  const StepOptions& options = {}) const;

  // The same into the caller's memory: out is [tokens, num_q_heads, value_dim], and its element type is what the
  // server is asked for.
  absl::Status Step(int layer, TensorView q, TensorView k, TensorView v, std::span<float> out,
                    const StepOptions& options = {}) const;
  absl::Status Step(int layer, TensorView q, TensorView k, TensorView v, std::span<BFloat16> out,
                    const StepOptions& options = {}) const;
  absl::Status Step(int layer, TensorView q, TensorView k, TensorView v, std::span<Float16> out,
                    const StepOptions& options = {}) const;

  // The request of such a step, for Client::Step of several sessions or for a StepStream.
  absl::StatusOr<StepRequest> MakeStep(int layer, TensorView q, TensorView k, TensorView v,
                                       const StepOptions& options = {}) const;

  absl::StatusOr<SessionInfo> Get(const CallOptions& call = {}) const;
  absl::StatusOr<SessionInfo> Rewind(int64_t length, const CallOptions& call = {}) const;
  // See Client::ExportSession.
  absl::Status Export(const std::function<absl::Status(std::string_view piece, int64_t total_bytes)>& sink,
                      const CallOptions& call = {}) const;
  // A session of its own with the first `length` tokens of this one, or all; see Client::ForkSession.
  absl::StatusOr<Session> Fork(std::optional<int64_t> length = {}, const CallOptions& call = {}) const;
  // Idempotent; true: it was open.
  absl::StatusOr<bool> Close(const CallOptions& call = {});

  void set_close_on_destroy(bool close) { close_on_destroy_ = close; }

 private:
  friend class Client;
  Session(const Client& client, std::string id, SessionConfig config);
  absl::Status StepInto(int layer, TensorView q, TensorView k, TensorView v, DType out_dtype, void* out,
                        size_t out_elements, const StepOptions& options) const;
  void CloseQuietly();

  std::unique_ptr<Client> client_;
  std::string id_;
  SessionConfig config_;
  bool close_on_destroy_ = false;
};

}  // namespace attnd::client

namespace attnd {
using ClientSession = client::Session;
}

#endif  // ATTND_CLIENT_CPP_SESSION_H_
