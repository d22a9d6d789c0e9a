#include "tests/bench/served.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "tests/bench/report.h"

namespace attnd::bench {

void CheckOk(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "attnd_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}

std::vector<float> TensorOf(const Case& c, int64_t tokens, int heads) {
  std::vector<float> values(static_cast<size_t>(tokens * heads * c.shape.head_dim));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 61) / 30 - 1;
  return values;
}

client::Session CreateSession(const Case& c, const Client& client) {
  client::SessionConfig config;
  config.num_q_heads = c.shape.num_q_heads;
  config.num_kv_heads = c.shape.num_kv_heads;
  config.head_dim = c.shape.head_dim;
  config.kv_dtype = *client::ParseKvDType(KvName(c.kv));
  absl::StatusOr<client::Session> session = client.CreateSession(config);
  CheckOk(session.status());
  return *std::move(session);
}

void Fill(const Case& c, const client::Session& session, int64_t tokens) {
  constexpr int64_t kTokens = 512;  // a message holds so many of any shape
  for (int64_t first = 0; first < tokens; first += kTokens) {
    const std::vector<float> rows = TensorOf(c, std::min(kTokens, tokens - first), c.shape.num_kv_heads);
    CheckOk(session.Step(0, {}, rows, rows).status());
  }
}

std::unique_ptr<ServingProcess> SpawnAttnd(const Case& c, int64_t kv_cache_bytes,
                                           const std::vector<std::string>& more_flags) {
  const std::string attnd = std::filesystem::read_symlink("/proc/self/exe").replace_filename("attnd");
  std::vector<std::string> flags = {"--listen=127.0.0.1:0", "--metrics_listen=127.0.0.1:0",
                                    "--kv_cache_bytes=" + std::to_string(kv_cache_bytes),
                                    "--compute_threads=" + std::to_string(c.threads)};
  flags.insert(flags.end(), more_flags.begin(), more_flags.end());
  return ServingProcess::Spawn(attnd, flags);
}

int RunServed(const std::string& mode, const Options& options, const std::function<bool(const Case&)>& run) {
  PrintHeading(options.json);
  bool all = true;
  const bool possible =
      ForEachCase(mode, options, [&](const Case& c) { all = RunInChild([&] { return run(c); }) && all; });
  return all && possible ? 0 : 1;
}

}  // namespace attnd::bench
