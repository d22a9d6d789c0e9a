// How a client connects and how it calls.
#ifndef ATTND_CLIENT_CPP_OPTIONS_H_
#define ATTND_CLIENT_CPP_OPTIONS_H_

#include <cstdint>
#include <stop_token>
#include <string>

#include "absl/time/time.h"

namespace attnd::client {

// UNAVAILABLE (server down, restarting or draining) is retried on calls that are safe to repeat: GetServerInfo,
// GetSession, ListSessions, CloseSession and Attend always; Step only when every segment states its
// start_position, because then a repetition rewrites the same place. CreateSession, RewindSession and streams are
// never retried. Every attempt is a new call; all attempts and pauses together stay within the call's deadline.
struct RetryPolicy {
  int max_attempts = 6;  // 1: no retries
  // Pauses grow by 2 from the first to the largest, each +-20%; a longer delay named by the server wins.
  absl::Duration initial_backoff = absl::Milliseconds(100);
  absl::Duration max_backoff = absl::Seconds(2);
};

struct TlsOptions {
  bool enabled = false;
  std::string root_certificates = {};   // PEM; empty: the system's
  std::string client_certificate = {};  // PEM chain, with client_key, where the server asks for one
  std::string client_key = {};          // PEM
  std::string server_name = {};         // expected in the certificate, when it is not the target's host
};

struct ClientOptions {
  std::string target = "127.0.0.1:50051";  // host:port, or any gRPC target
  TlsOptions tls = {};
  // Sent as "authorization: Bearer ..." with every call. Without TLS it would travel in the clear, so Connect refuses
  // that beyond loopback unless it is allowed explicitly.
  std::string bearer_token = {};
  bool allow_token_without_tls = false;
  // Deadline of every call that names none: a paused or unreachable server is DEADLINE_EXCEEDED after this long,
  // never an endless wait.
  absl::Duration default_timeout = absl::Seconds(30);
  // Both directions; gRPC's own default of 4 MiB would be 170 tokens of a Llama-3-8B layer in float32. A request above
  // it is refused here with both numbers. Equal to the server's --max_message_bytes by default.
  int64_t max_message_bytes = int64_t{64} << 20;
  // Idle and busy connections are probed this often and given up after as long without an answer. The server's
  // smallest tolerated interval is below 10 s.
  absl::Duration keepalive = absl::Seconds(10);
  RetryPolicy retry = {};
  // gRPC gives clients of one process that connect alike one TCP connection; true: this client has its own.
  bool own_connection = false;
  std::string user_agent = {};  // put before gRPC's own
};

struct CallOptions {
  absl::Duration timeout = absl::ZeroDuration();  // zero: the client's default_timeout
  std::stop_token stop = {};                      // requesting a stop cancels the call: CANCELLED
};

}  // namespace attnd::client

#endif  // ATTND_CLIENT_CPP_OPTIONS_H_
