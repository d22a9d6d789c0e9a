// What attnd can be told, in one struct: flags and their ATTND_ environment twins fill it, tests fill it by hand.
#ifndef ATTND_SERVER_OPTIONS_H_
#define ATTND_SERVER_OPTIONS_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace attnd {

struct Options {
  std::string listen = "127.0.0.1:50051";
  std::string metrics_listen = "127.0.0.1:9464";
  int64_t kv_cache_bytes = 0;  // 0: half of the memory limit, a quarter below 512 MiB
  int compute_threads = 0;     // 0: as many as the process may use
  int64_t max_sessions = 10000;
  absl::Duration session_idle_ttl = absl::Minutes(10);
  std::string eviction = "none";  // or "lru"
  std::string spill_dir;          // empty: none, as below
  std::string restore;
  std::string snapshot_on_drain;
  int64_t max_queue_tokens = 65536;
  int64_t max_queue_requests = 4096;
  absl::Duration max_queue_delay = absl::Seconds(5);
  int64_t max_streams = 4096;
  int max_connections = 0;  // 0: what the limit of open files leaves, at most 4096
  int64_t prefill_chunk_tokens = 256;
  absl::Duration prefill_chunk_time = absl::Milliseconds(5);
  int64_t max_message_bytes = 0;   // 0: half of max_inflight_bytes, at most 64 MiB
  int64_t max_inflight_bytes = 0;  // 0: an eighth of the memory limit, at least two messages that were asked for
  absl::Duration drain_timeout = absl::Seconds(30);
  std::string tls_cert;
  std::string tls_key;
  std::string tls_client_ca;
  std::string auth_tokens_file;

  // Tests only; see EngineOptions.
  bool poison_cache = false;
  std::function<absl::Status()> compute_hook;
};

// Replaces what is left open (zeros) by this machine's values. INVALID_ARGUMENT, naming the flag and its value, when a
// value is out of its range.
absl::StatusOr<Options> ResolveOptions(Options options);

// "4GiB", "512 MiB", "1.5G", "1000000": a count of bytes with an optional binary (KiB = 1024) or decimal (kB = 1000)
// unit; a bare K, M, G or T is binary.
absl::StatusOr<int64_t> ParseBytes(absl::string_view text);
std::string FormatBytes(int64_t bytes);  // "4GiB" where exact, otherwise plain digits

}  // namespace attnd

#endif  // ATTND_SERVER_OPTIONS_H_
