#include "server/flags.h"

#include <cstdlib>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/flag.h"
#include "absl/flags/parse.h"
#include "absl/flags/reflection.h"
#include "absl/flags/usage_config.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "server/version.h"

namespace attnd {

// A count of bytes as a flag: 4GiB, 512MiB, auto.
struct ByteSize {
  int64_t bytes = 0;
};

static bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error) {
  if (text == "auto") {
    size->bytes = 0;
    return true;
  }
  const absl::StatusOr<int64_t> bytes = ParseBytes(text);
  if (!bytes.ok()) {
    *error = std::string(bytes.status().message());
    return false;
  }
  size->bytes = *bytes;
  return true;
}

static std::string AbslUnparseFlag(ByteSize size) { return size.bytes == 0 ? "auto" : FormatBytes(size.bytes); }

}  // namespace attnd

using attnd::ByteSize;
using attnd::Options;

ABSL_FLAG(std::string, listen, Options().listen, "address:port of the gRPC service; port 0 takes a free one");
ABSL_FLAG(std::string, metrics_listen, Options().metrics_listen,
          "address:port of http://.../metrics for Prometheus and of the status page at /; port 0 takes a free one; "
          "empty for neither");
ABSL_FLAG(ByteSize, kv_cache_bytes, ByteSize{Options().kv_cache_bytes},
          "memory for keys and values, such as 4GiB; auto: half of the memory limit of the machine or container, "
          "a quarter where that is below 512MiB");
ABSL_FLAG(int, compute_threads, Options().compute_threads,
          "threads that compute; 0: as many as the CPU quota and affinity allow");
ABSL_FLAG(int64_t, max_sessions, Options().max_sessions, "most sessions open at a time");
ABSL_FLAG(absl::Duration, session_idle_ttl, Options().session_idle_ttl,
          "how long a session without a time to live of its own may stay idle; inf: for ever");
ABSL_FLAG(
    std::string, eviction, Options().eviction,
    "what happens when the cache is full. none: requests that need memory are refused; lru: sessions that have been "
    "idle longest make room, to disk if --spill_dir is given, else they are dropped");
ABSL_FLAG(std::string, spill_dir, Options().spill_dir,
          "directory for sessions that make room (--eviction=lru); their next step brings them back. What a killed "
          "process left there is served again");
ABSL_FLAG(std::string, restore, Options().restore,
          "directory with the sessions that an earlier attnd saved (--snapshot_on_drain): they are served again, under "
          "their ids. Made if it is not there");
ABSL_FLAG(std::string, snapshot_on_drain, Options().snapshot_on_drain,
          "directory to save all sessions in before attnd ends on SIGTERM; may be that of --restore. A second signal "
          "ends the saving");
ABSL_FLAG(int64_t, max_queue_tokens, Options().max_queue_tokens, "most tokens that wait to be computed");
ABSL_FLAG(int64_t, max_queue_requests, Options().max_queue_requests, "most requests that wait to be computed");
ABSL_FLAG(absl::Duration, max_queue_delay, Options().max_queue_delay,
          "work that would wait longer for compute, as far as can be told, is refused at once; inf: none is");
ABSL_FLAG(int64_t, max_streams, Options().max_streams,
          "most StepStream, ExportSession and ImportSession calls open at a time, over all connections");
ABSL_FLAG(int, max_connections, Options().max_connections,
          "most connections open at a time; 0: what the limit of open files leaves, at most 4096");
ABSL_FLAG(int64_t, prefill_chunk_tokens, Options().prefill_chunk_tokens,
          "most tokens of long steps computed in one batch");
ABSL_FLAG(
    absl::Duration, prefill_chunk_time, Options().prefill_chunk_time,
    "about how long they may take in a batch, which is how long a one-token step waits for them (they are never "
    "fewer than 64 / group_size, beside short steps 16 / group_size unless AMX multiplies); inf: as long as it takes");
ABSL_FLAG(ByteSize, max_message_bytes, ByteSize{Options().max_message_bytes},
          "largest request and largest answer; auto: half of --max_inflight_bytes, at most 64MiB");
ABSL_FLAG(
    ByteSize, max_inflight_bytes, ByteSize{Options().max_inflight_bytes},
    "most bytes of requests and their answers at a time, and as many beside of requests that are still arriving; auto: "
    "an eighth of the memory limit");
ABSL_FLAG(absl::Duration, drain_timeout, Options().drain_timeout,
          "after SIGTERM, how long running steps may take to finish");
ABSL_FLAG(std::string, tls_cert, "", "file of the server's certificate chain (PEM); serves TLS");
ABSL_FLAG(std::string, tls_key, "", "file of the private key (PEM)");
ABSL_FLAG(std::string, tls_client_ca, "", "file of the authorities (PEM) whose clients alone are let in");
ABSL_FLAG(std::string, auth_tokens_file, "",
          "file with a bearer token a line; calls without one of them are UNAUTHENTICATED");
ABSL_FLAG(bool, print_config, false, "print what is in force, as a flagfile, and exit");
ABSL_FLAG(bool, metrics_reference, false, "print a table of all metrics and exit");

namespace attnd {
namespace {

// In the order of --help and --print_config.
constexpr absl::string_view kFlagNames[] = {
    "listen",
    "metrics_listen",
    "kv_cache_bytes",
    "compute_threads",
    "max_sessions",
    "session_idle_ttl",
    "eviction",
    "spill_dir",
    "restore",
    "snapshot_on_drain",
    "max_queue_tokens",
    "max_queue_requests",
    "max_queue_delay",
    "max_streams",
    "max_connections",
    "max_message_bytes",
    "max_inflight_bytes",
    "prefill_chunk_tokens",
    "prefill_chunk_time",
    "drain_timeout",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "auth_tokens_file",
};

std::string EnvironmentName(absl::string_view flag) { return absl::StrCat("ATTND_", absl::AsciiStrToUpper(flag)); }

void ReadEnvironment() {
  for (const absl::string_view name : kFlagNames) {
    const std::string variable = EnvironmentName(name);
    const char* value = std::getenv(variable.c_str());
    std::string error;
    if (value == nullptr || absl::FindCommandLineFlag(name)->ParseFrom(value, &error)) continue;
    std::cerr << "attnd: environment variable " << variable << "='" << value << "': " << error << "\n";
    std::exit(1);
  }
}

void PrintHelp() {
  std::cout
      << "attnd " << kVersion << ": the key/value cache of transformers, and their attention, as a service\n\n"
      << "usage: attnd [--FLAG=VALUE]...\n\n"
      << "Every flag can be given as environment variable ATTND_FLAG (upper case) instead, or in a file with one\n"
      << "--FLAG=VALUE a line (--flagfile=FILE). SIGTERM drains: running steps finish, then attnd ends.\n\n";
  for (const absl::string_view name : kFlagNames) {
    const absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
    const std::string default_value = flag->DefaultValue();
    std::cout << "  --" << name << "=" << (default_value.empty() ? "\"\"" : default_value) << "\n      " << flag->Help()
              << "\n";
  }
  for (const char* name : {"print_config", "metrics_reference"}) {
    std::cout << "  --" << name << "\n      " << absl::FindCommandLineFlag(name)->Help() << "\n";
  }
  std::cout << "  --flagfile=FILE[,FILE...]\n      files that hold flags\n"
            << "  --version\n      print the version and exit\n";
}

Options OptionsFromFlags() {
  Options options;
  options.listen = absl::GetFlag(FLAGS_listen);
  options.metrics_listen = absl::GetFlag(FLAGS_metrics_listen);
  options.kv_cache_bytes = absl::GetFlag(FLAGS_kv_cache_bytes).bytes;
  options.compute_threads = absl::GetFlag(FLAGS_compute_threads);
  options.max_sessions = absl::GetFlag(FLAGS_max_sessions);
  options.session_idle_ttl = absl::GetFlag(FLAGS_session_idle_ttl);
  options.eviction = absl::GetFlag(FLAGS_eviction);
  options.spill_dir = absl::GetFlag(FLAGS_spill_dir);
  options.restore = absl::GetFlag(FLAGS_restore);
  options.snapshot_on_drain = absl::GetFlag(FLAGS_snapshot_on_drain);
  options.max_queue_tokens = absl::GetFlag(FLAGS_max_queue_tokens);
  options.max_queue_requests = absl::GetFlag(FLAGS_max_queue_requests);
  options.max_queue_delay = absl::GetFlag(FLAGS_max_queue_delay);
  options.max_streams = absl::GetFlag(FLAGS_max_streams);
  options.max_connections = absl::GetFlag(FLAGS_max_connections);
  options.prefill_chunk_tokens = absl::GetFlag(FLAGS_prefill_chunk_tokens);
  options.prefill_chunk_time = absl::GetFlag(FLAGS_prefill_chunk_time);
  options.max_message_bytes = absl::GetFlag(FLAGS_max_message_bytes).bytes;
  options.max_inflight_bytes = absl::GetFlag(FLAGS_max_inflight_bytes).bytes;
  options.drain_timeout = absl::GetFlag(FLAGS_drain_timeout);
  options.tls_cert = absl::GetFlag(FLAGS_tls_cert);
  options.tls_key = absl::GetFlag(FLAGS_tls_key);
  options.tls_client_ca = absl::GetFlag(FLAGS_tls_client_ca);
  options.auth_tokens_file = absl::GetFlag(FLAGS_auth_tokens_file);
  return options;
}

// "--name" or "-name", as abseil takes them.
bool Asks(int argc, char** argv, std::initializer_list<absl::string_view> names) {
  for (int i = 1; i < argc; ++i) {
    for (const absl::string_view name : names) {
      if (argv[i] == name) return true;
    }
  }
  return false;
}

// Abseil follows a flagfile that names itself until memory ends, so a flagfile may not name any.
void RefuseNestedFlagfiles(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    if (!absl::ConsumePrefix(&argument, "-")) continue;
    absl::ConsumePrefix(&argument, "-");
    if (!absl::ConsumePrefix(&argument, "flagfile")) continue;
    if (argument.empty() && i + 1 < argc) {
      argument = argv[i + 1];
    } else if (!absl::ConsumePrefix(&argument, "=")) {
      continue;
    }
    for (const absl::string_view path : absl::StrSplit(argument, ',')) {
      std::ifstream file{std::string(path)};
      for (std::string line; std::getline(file, line);) {
        const absl::string_view flag = absl::StripAsciiWhitespace(line);
        if (!absl::StartsWith(flag, "--flagfile") && !absl::StartsWith(flag, "-flagfile")) continue;
        std::cerr << "attnd: flagfile '" << path << "' names another flagfile ('" << flag << "')\n";
        std::exit(1);
      }
    }
  }
}

}  // namespace

CommandLine ParseCommandLine(int argc, char** argv) {
  CommandLine command_line;
  // abseil's own --help ends with status 1 and lists its internals.
  if (Asks(argc, argv, {"--help", "-help", "-h"})) {
    PrintHelp();
    command_line.action = CommandLine::Action::kNothing;
    return command_line;
  }
  if (Asks(argc, argv, {"--version", "-version"})) {
    std::cout << "attnd " << kVersion << "\n";
    command_line.action = CommandLine::Action::kNothing;
    return command_line;
  }
  ReadEnvironment();
  RefuseNestedFlagfiles(argc, argv);
  const std::vector<char*> positional = absl::ParseCommandLine(argc, argv);
  if (positional.size() > 1) {
    std::cerr << "attnd: unexpected argument '" << positional[1] << "' (flags are --FLAG=VALUE; see --help)\n";
    std::exit(1);
  }
  command_line.options = OptionsFromFlags();
  if (absl::GetFlag(FLAGS_print_config)) command_line.action = CommandLine::Action::kPrintConfig;
  if (absl::GetFlag(FLAGS_metrics_reference)) command_line.action = CommandLine::Action::kPrintMetricsReference;
  return command_line;
}

void PrintConfig(const Options& o, std::ostream& out) {
  const auto line = [&out](absl::string_view name, const auto& value) { out << "--" << name << "=" << value << "\n"; };
  line("listen", o.listen);
  line("metrics_listen", o.metrics_listen);
  line("kv_cache_bytes", FormatBytes(o.kv_cache_bytes));
  line("compute_threads", o.compute_threads);
  line("max_sessions", o.max_sessions);
  line("session_idle_ttl", absl::FormatDuration(o.session_idle_ttl));
  line("eviction", o.eviction);
  line("spill_dir", o.spill_dir);
  line("restore", o.restore);
  line("snapshot_on_drain", o.snapshot_on_drain);
  line("max_queue_tokens", o.max_queue_tokens);
  line("max_queue_requests", o.max_queue_requests);
  line("max_queue_delay", absl::FormatDuration(o.max_queue_delay));
  line("max_streams", o.max_streams);
  line("max_connections", o.max_connections);
  line("prefill_chunk_tokens", o.prefill_chunk_tokens);
  line("prefill_chunk_time", absl::FormatDuration(o.prefill_chunk_time));
  line("max_message_bytes", FormatBytes(o.max_message_bytes));
  line("max_inflight_bytes", FormatBytes(o.max_inflight_bytes));
  line("drain_timeout", absl::FormatDuration(o.drain_timeout));
  line("tls_cert", o.tls_cert);
  line("tls_key", o.tls_key);
  line("tls_client_ca", o.tls_client_ca);
  line("auth_tokens_file", o.auth_tokens_file);
}

}  // namespace attnd
