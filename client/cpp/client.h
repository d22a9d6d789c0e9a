// attnd's C++ client.
//
//   absl::StatusOr<attnd::Client> client = attnd::Client::Connect({.target = "127.0.0.1:50051"});
//   absl::StatusOr<attnd::ClientSession> session = client->CreateSession(
//       {.num_layers = 32, .num_q_heads = 32, .num_kv_heads = 8, .head_dim = 128});
//   absl::Status status = session->Step(/*layer=*/0, q, k, v, out);  // spans of float
//
// Every call has a deadline (ClientOptions::default_timeout unless the call names another) and is retried only where
// that is safe (RetryPolicy). Errors: the gRPC code with the server's sentence; reason, metadata and retry delay by
// GetErrorDetails(). Every call can return, beside what it names itself,
//   UNAVAILABLE (no server, or one that drains) · DEADLINE_EXCEEDED · CANCELLED (CallOptions::stop) ·
//   UNAUTHENTICATED, PERMISSION_DENIED (bearer token) · RESOURCE_EXHAUSTED with MESSAGE_TOO_LARGE (the request is
//   above ClientOptions::max_message_bytes; nothing was sent).
//
// Installed as "attnd/client.h" (CMake: find_package(attnd), target attnd::client). The public headers include each
// other by their bare names, so that they are the same files there as here.
#ifndef ATTND_CLIENT_CPP_CLIENT_H_
#define ATTND_CLIENT_CPP_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "errors.h"
#include "options.h"
#include "requests.h"
#include "session.h"
#include "step_stream.h"
#include "types.h"

namespace attnd::client {

namespace internal {
class Transport;
}

// Takes the pieces of a snapshot, in order; total_bytes is what all of them will be together. An error ends the export.
using SnapshotSink = std::function<absl::Status(std::string_view piece, int64_t total_bytes)>;
// Gives a snapshot's bytes, cut anywhere; "" at the end. An error ends the import.
using SnapshotSource = std::function<absl::StatusOr<std::string>()>;

// A connection to one server. Cheap to copy: copies share the connection. Thread-safe.
class Client {
 public:
  // Does not wait for the server: the connection is made by the first call and remade by later ones when it breaks.
  // INVALID_ARGUMENT: a limit or a timeout that is not positive, TLS material without tls.enabled, or a bearer token
  // that would travel in the clear.
  static absl::StatusOr<Client> Connect(ClientOptions options);

  // With a config, the answer also says how many tokens of such a session fit.
  absl::StatusOr<ServerInfo> GetServerInfo(const SessionConfig* config = nullptr, const CallOptions& call = {}) const;

  // What grpc.health.v1 says of the whole server, or of one service such as "attnd.v1.Attention": true while it takes
  // work, false while it drains. Needs no token. NOT_FOUND: no such service · UNIMPLEMENTED: no health service.
  absl::StatusOr<bool> IsServing(const std::string& service = {}, const CallOptions& call = {}) const;

  // INVALID_ARGUMENT with BAD_CONFIG · RESOURCE_EXHAUSTED with SESSION_LIMIT, or CACHE_FULL when reserve_tokens do
  // not fit. Never retried: a lost answer would leave a session behind (until its time to live ends).
  absl::StatusOr<Session> CreateSession(const SessionConfig& config, const CallOptions& call = {}) const;

  // A handle to a session that exists already. NOT_FOUND: see IsSessionLost.
  absl::StatusOr<Session> OpenSession(const std::string& session_id, const CallOptions& call = {}) const;

  // NOT_FOUND with NEVER_EXISTED, EXPIRED, EVICTED or CLOSED.
  absl::StatusOr<SessionInfo> GetSession(const std::string& session_id, const CallOptions& call = {}) const;

  // Sessions in the order of their creation. page_size 0 means 100, the most is 1000; the token is the one of the
  // page before, or empty.
  absl::StatusOr<SessionPage> ListSessions(int page_size = 0, const std::string& page_token = {},
                                           const CallOptions& call = {}) const;

  // True: it was open. False: it was closed, expired or evicted before, which is no error. NOT_FOUND with
  // NEVER_EXISTED for an id that never was.
  absl::StatusOr<bool> CloseSession(const std::string& session_id, const CallOptions& call = {}) const;

  // Cuts every layer that is longer to `length` tokens. INVALID_ARGUMENT with BAD_POSITION: negative, or beyond the
  // longest layer · FAILED_PRECONDITION with TOKENS_FREED and `first_token`: a layer's window has passed tokens that
  // the next one would see · NOT_FOUND as GetSession.
  absl::StatusOr<SessionInfo> RewindSession(const std::string& session_id, int64_t length,
                                            const CallOptions& call = {}) const;

  // The session's state as bytes for ImportSession, here or at another server. OK: `sink` has all of them. The session
  // may be stepped meanwhile; the snapshot is of one moment. Never retried. The timeout is the longest wait for a
  // piece, however long all of them take: DEADLINE_EXCEEDED. NOT_FOUND: see IsSessionLost · DATA_LOSS: a session that
  // the server cannot read back, or an answer that ended early · RESOURCE_EXHAUSTED with STREAM_LIMIT · what the sink
  // returned.
  absl::Status ExportSession(const std::string& session_id, const SnapshotSink& sink,
                             const CallOptions& call = {}) const;

  // A new session from such bytes, all or nothing. expected: num_layers, heads, dims and kv_dtype that it must have.
  // Never retried. The timeout is the longest wait for the server to take some bytes, or to answer.
  // INVALID_ARGUMENT with BAD_SNAPSHOT (damaged, incomplete, another format) or BAD_CONFIG · RESOURCE_EXHAUSTED with
  // SESSION_LIMIT, CACHE_FULL, TOO_MANY_TOKENS or STREAM_LIMIT · what the source returned.
  absl::StatusOr<Session> ImportSession(const SnapshotSource& source, const SessionConfig* expected = nullptr,
                                        const CallOptions& call = {}) const;

  // A new session that begins with the first `length` tokens of each layer (unset: all; of a shorter layer, all),
  // behind the queued steps of the one that it is made from. Nothing is copied: both share their blocks until one
  // writes. It has the same configuration, but reserves nothing. Errors as RewindSession · RESOURCE_EXHAUSTED with
  // SESSION_LIMIT. Never retried: a lost answer would leave a session behind.
  absl::StatusOr<Session> ForkSession(const std::string& session_id, std::optional<int64_t> length = {},
                                      const CallOptions& call = {}) const;

  // Beam search: session_ids[i] takes the tokens that session_ids[sources[i]] has, all at once, without copying and
  // behind the queued steps of all of them. A source may be named several times. Answers the length of each session's
  // longest layer. INVALID_ARGUMENT with BAD_SHAPE (lists of unequal length, a source out of range), DUPLICATE_SESSION
  // or BAD_CONFIG (configurations that differ in more than max_tokens, ttl and reserve_tokens) · FAILED_PRECONDITION
  // with TOO_LONG (beyond the taker's max_tokens) · NOT_FOUND as GetSession. After an error every session is as before.
  // Never retried: done twice, it is another order.
  absl::StatusOr<std::vector<int64_t>> ReorderSessions(const std::vector<std::string>& session_ids,
                                                       const std::vector<int>& sources,
                                                       const CallOptions& call = {}) const;

  // Stateless attention. INVALID_ARGUMENT with BAD_SHAPE, NOT_FINITE, EMPTY_ROW or SCORE_OVERFLOW ·
  // RESOURCE_EXHAUSTED with QUEUE_FULL.
  absl::StatusOr<AttendResult> Attend(const AttendRequest& request, const CallOptions& call = {}) const;

  // Its gradients with respect to q, k, v and the sinks. INVALID_ARGUMENT with BAD_SHAPE, NOT_FINITE, EMPTY_ROW or
  // GRADIENT_OVERFLOW · RESOURCE_EXHAUSTED with QUEUE_FULL.
  absl::StatusOr<AttendGradients> AttendBackward(const AttendBackwardRequest& request,
                                                 const CallOptions& call = {}) const;

  // One layer of one or more sessions. With one segment its error is the call's; with more, each SegmentResult has
  // its own. INVALID_ARGUMENT as Attend · NOT_FOUND: the session is lost (IsSessionLost) · FAILED_PRECONDITION with
  // BAD_POSITION and the layer's `length` · RESOURCE_EXHAUSTED with CACHE_FULL, QUEUE_FULL or TOO_MANY_TOKENS.
  // A step that failed left every session as it was, except that the answer of one which timed out or lost its
  // connection may have been on its way: state start_position, and sending it again is safe.
  absl::StatusOr<StepResult> Step(const StepRequest& request, const CallOptions& call = {}) const;

  // The same three without waiting: `done` is called exactly once with the answer, on a thread of gRPC's (or on this
  // one, when nothing was sent), and must not block. Never retried. REQUIRES: a copy of this Client outlives the call.
  void CreateSessionAsync(const SessionConfig& config, const CallOptions& call,
                          std::function<void(absl::StatusOr<Session>)> done) const;
  void StepAsync(const StepRequest& request, const CallOptions& call,
                 std::function<void(absl::StatusOr<StepResult>)> done) const;
  void CloseSessionAsync(const std::string& session_id, const CallOptions& call,
                         std::function<void(absl::StatusOr<bool>)> done) const;

  // Pipelined steps. Returns at once; a connection that cannot be made shows in the first answer.
  std::unique_ptr<StepStream> OpenStepStream(const StepStreamOptions& options = {}) const;

  const ClientOptions& options() const;

 private:
  friend class Session;
  absl::StatusOr<Session> Opened(absl::StatusOr<SessionInfo> info) const;
  explicit Client(std::shared_ptr<internal::Transport> transport) : transport_(std::move(transport)) {}

  std::shared_ptr<internal::Transport> transport_;
};

}  // namespace attnd::client

namespace attnd {
using client::Client;
}

#endif  // ATTND_CLIENT_CPP_CLIENT_H_
