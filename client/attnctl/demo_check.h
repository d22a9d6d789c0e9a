// Checks the demo's answers against float64.
#ifndef ATTND_CLIENT_ATTNCTL_DEMO_CHECK_H_
#define ATTND_CLIENT_ATTNCTL_DEMO_CHECK_H_

#include <utility>
#include <vector>

#include "client/attnctl/demo.h"

namespace attnd::attnctl {

// One kv head of one layer of one session, and the steps whose answers it checks.
struct CheckTask {
  int64_t session;
  int layer;
  int kv_head;
  std::vector<std::pair<DemoStep, const client::Tensor*>> steps;  // all of `layer`
};

// Compares every output row of the query heads that read the kv head. Thread-safe.
CheckResult RunCheck(const DemoOptions& options, const CheckTask& task);

void Merge(const CheckResult& from, CheckResult* into);

}  // namespace attnd::attnctl

#endif  // ATTND_CLIENT_ATTNCTL_DEMO_CHECK_H_
