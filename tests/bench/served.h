// What modes `rpc` and `serve` share: a real attnd of its own process, and one layer of a session on it.
#ifndef ATTND_TESTS_BENCH_SERVED_H_
#define ATTND_TESTS_BENCH_SERVED_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/cpp/client.h"
#include "tests/bench/cases.h"
#include "tests/bench/rpc.h"

namespace attnd::bench {

// Ends the process when it is not OK, after saying why.
void CheckOk(const absl::Status& status);

// [tokens, heads, head_dim] of the case's shape.
std::vector<float> TensorOf(const Case& c, int64_t tokens, int heads);

// A session of one layer of the case, empty; and `tokens` tokens of K and V for it.
client::Session CreateSession(const Case& c, const Client& client);
void Fill(const Case& c, const client::Session& session, int64_t tokens);

// The attnd that was built beside this program, on free ports; empty when it does not come up.
std::unique_ptr<ServingProcess> SpawnAttnd(const Case& c, int64_t kv_cache_bytes,
                                           const std::vector<std::string>& more_flags = {});

// Runs every case in a process of its own: gRPC cannot be forked once it has started its threads. Returns the mode's
// exit status.
int RunServed(const std::string& mode, const Options& options, const std::function<bool(const Case&)>& run);

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_SERVED_H_
