#include "server/options.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "server/acceptor.h"
#include "server/engine/cpu_limit.h"

namespace attnd {
namespace {

constexpr int64_t kKiB = 1024, kMiB = kKiB * 1024, kGiB = kMiB * 1024, kTiB = kGiB * 1024;
constexpr int64_t kSmallestCache = kMiB;
constexpr int64_t kLargestCache = 960 * kGiB;  // 32-bit block ids reach 1 TiB of pages, holes included
constexpr int64_t kSmallestMessage = 64 * kKiB;
constexpr int64_t kDefaultMessage = 64 * kMiB;
constexpr int64_t kLargestMessage = std::numeric_limits<int32_t>::max();  // gRPC's limits are of type int

struct Unit {
  absl::string_view name;
  int64_t bytes;
};
constexpr Unit kUnits[] = {
    {"", 1},
    {"B", 1},
    {"KIB", kKiB},
    {"K", kKiB},
    {"KB", 1000},
    {"MIB", kMiB},
    {"M", kMiB},
    {"MB", 1000 * 1000},
    {"GIB", kGiB},
    {"G", kGiB},
    {"GB", 1000 * 1000 * 1000},
    {"TIB", kTiB},
    {"T", kTiB},
    {"TB", int64_t{1000} * 1000 * 1000 * 1000},
};

template <typename T>
absl::Status CheckRange(absl::string_view flag, T value, T low, T high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, " is ", value, ", but must be ", low, "..", high));
}

absl::Status CheckPositive(absl::string_view flag, absl::Duration value) {
  if (value > absl::ZeroDuration()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag, " is ", absl::FormatDuration(value), ", but must be > 0"));
}

absl::Status CheckConnections(int value) {
  if (value >= 1 && value <= MostConnections()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--max_connections is ", value, ", but must be 1..", MostConnections(),
                                                 ": what the limit of open files (ulimit -n) leaves"));
}

// gRPC takes the rest of a port that is too large, and 443 for none.
absl::Status CheckListen(absl::string_view listen) {
  if (listen.empty()) return absl::InvalidArgumentError("--listen is empty");
  if (absl::StartsWith(listen, "unix:")) return absl::OkStatus();
  const size_t colon = listen.rfind(':');
  int port = -1;
  if (colon != absl::string_view::npos && absl::SimpleAtoi(listen.substr(colon + 1), &port) && port >= 0 &&
      port <= 65535) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("--listen is '", listen, "', but must be ADDRESS:PORT with a port of 0..65535"));
}

absl::Status CheckEviction(const Options& o) {
  if (o.eviction != "none" && o.eviction != "lru") {
    return absl::InvalidArgumentError(absl::StrCat("--eviction is '", o.eviction, "', but must be none or lru"));
  }
  if (!o.spill_dir.empty() && o.eviction != "lru") {
    return absl::InvalidArgumentError(absl::StrCat("--spill_dir is '", o.spill_dir, "', which needs --eviction=lru"));
  }
  for (const auto& [name, directory] :
       {std::pair{"restore", &o.restore}, std::pair{"snapshot_on_drain", &o.snapshot_on_drain}}) {
    if (o.spill_dir.empty() || *directory != o.spill_dir) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--spill_dir and --", name, " are both '", o.spill_dir, "', but must be different directories"));
  }
  return absl::OkStatus();
}

absl::Status Check(const Options& o) {
  constexpr int64_t kMany = int64_t{1} << 40;
  if (absl::Status status = CheckListen(o.listen); !status.ok()) return status;
  if (o.tls_cert.empty() != o.tls_key.empty()) {
    return absl::InvalidArgumentError("--tls_cert and --tls_key are needed together");
  }
  if (!o.tls_client_ca.empty() && o.tls_cert.empty()) {
    return absl::InvalidArgumentError("--tls_client_ca needs --tls_cert and --tls_key");
  }
  absl::Status status = CheckRange("kv_cache_bytes", o.kv_cache_bytes, kSmallestCache, kLargestCache);
  if (status.ok()) status = CheckRange("compute_threads", o.compute_threads, 1, 1024);
  if (status.ok()) status = CheckRange("max_sessions", o.max_sessions, int64_t{1}, kMany);
  if (status.ok()) status = CheckPositive("session_idle_ttl", o.session_idle_ttl);
  if (status.ok()) status = CheckEviction(o);
  if (status.ok()) status = CheckRange("max_queue_tokens", o.max_queue_tokens, int64_t{1}, kMany);
  if (status.ok()) status = CheckRange("max_queue_requests", o.max_queue_requests, int64_t{1}, kMany);
  if (status.ok()) status = CheckPositive("max_queue_delay", o.max_queue_delay);
  if (status.ok()) status = CheckRange("max_streams", o.max_streams, int64_t{1}, kMany);
  if (status.ok()) status = CheckConnections(o.max_connections);
  if (status.ok()) status = CheckRange("prefill_chunk_tokens", o.prefill_chunk_tokens, int64_t{1}, kMany);
  if (status.ok()) status = CheckPositive("prefill_chunk_time", o.prefill_chunk_time);
  if (status.ok()) status = CheckRange("max_message_bytes", o.max_message_bytes, kSmallestMessage, kLargestMessage);
  if (status.ok()) status = CheckRange("max_inflight_bytes", o.max_inflight_bytes, o.max_message_bytes, kMany);
  if (status.ok() && o.drain_timeout < absl::ZeroDuration()) {
    status = absl::InvalidArgumentError("--drain_timeout is negative");
  }
  return status;
}

}  // namespace

absl::StatusOr<Options> ResolveOptions(Options options) {
  // Where nothing is known about memory, what a small machine has.
  const int64_t known_limit = MemoryLimit();
  const int64_t memory_limit = known_limit > 0 ? known_limit : 4 * kGiB;
  if (options.kv_cache_bytes == 0) {
    // Beside it: an eighth of it for stateless calls, an eighth of the limit each for requests that are in flight and
    // that arrive, and about 96 MiB for everything else, which leaves less where the limit is small.
    const int64_t share = memory_limit < 512 * kMiB ? memory_limit / 4 : memory_limit / 2;
    options.kv_cache_bytes = std::clamp(share / kMiB * kMiB, kSmallestCache, kLargestCache);
  }
  if (options.max_connections == 0) options.max_connections = DefaultMaxConnections();
  if (options.compute_threads == 0) options.compute_threads = CpuLimit();
  if (options.max_inflight_bytes == 0) {
    options.max_inflight_bytes =
        std::max({memory_limit / 8 / kMiB * kMiB, 2 * options.max_message_bytes, 2 * kSmallestMessage});
  }
  if (options.max_message_bytes == 0) {
    options.max_message_bytes = std::clamp(options.max_inflight_bytes / 2, kSmallestMessage, kDefaultMessage);
  }
  if (absl::Status status = Check(options); !status.ok()) return status;
  return options;
}

absl::StatusOr<int64_t> ParseBytes(absl::string_view text) {
  const absl::string_view trimmed = absl::StripAsciiWhitespace(text);
  const size_t digits = std::min(trimmed.find_first_not_of("0123456789."), trimmed.size());
  const std::string unit_name = absl::AsciiStrToUpper(absl::StripLeadingAsciiWhitespace(trimmed.substr(digits)));
  const auto* unit = std::find_if(std::begin(kUnits), std::end(kUnits),
                                  [&](const Unit& candidate) { return candidate.name == unit_name; });
  double count = 0;
  if (digits == 0 || unit == std::end(kUnits) || !absl::SimpleAtod(trimmed.substr(0, digits), &count)) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not a number of bytes such as 4GiB or 536870912"));
  }
  int64_t whole = 0;
  if (absl::SimpleAtoi(trimmed.substr(0, digits), &whole)) {
    if (!__builtin_mul_overflow(whole, unit->bytes, &whole)) return whole;
  } else if (count * static_cast<double>(unit->bytes) < 9e18) {
    return static_cast<int64_t>(std::llround(count * static_cast<double>(unit->bytes)));
  }
  return absl::InvalidArgumentError(absl::StrCat("'", text, "' is more bytes than can be counted"));
}

std::string FormatBytes(int64_t bytes) {
  for (const auto& [name, size] : {Unit{"TiB", kTiB}, Unit{"GiB", kGiB}, Unit{"MiB", kMiB}, Unit{"KiB", kKiB}}) {
    if (bytes >= size && bytes % size == 0) return absl::StrCat(bytes / size, name);
  }
  return absl::StrCat(bytes);
}

}  // namespace attnd
