// absl::Mutex::Lock of the executable's own, before the shared library's. Apart from call_counts.cc, which serves tests
// without Abseil.
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/synchronization/mutex.h"
#include "tests/unit/call_counts.h"

#define ATTND_STRING(name) ATTND_QUOTED(name)
#define ATTND_QUOTED(name) #name

namespace attnd::testing {
namespace {

constinit std::atomic<int64_t> locks{0};

// Mangled by hand: a member function of a class in an inline namespace whose name is the release's.
void* HiddenLock() {
  const std::string inline_namespace = ATTND_STRING(ABSL_OPTION_INLINE_NAMESPACE_NAME);
  const std::string nested = ABSL_OPTION_USE_INLINE_NAMESPACE == 1
                                 ? std::to_string(inline_namespace.size()) + inline_namespace
                                 : std::string();
  return dlsym(RTLD_NEXT, ("_ZN4absl" + nested + "5Mutex4LockEv").c_str());
}

}  // namespace

int64_t AbslLocks() { return locks; }

}  // namespace attnd::testing

void absl::Mutex::Lock() {
  static const auto hidden = reinterpret_cast<void (*)(absl::Mutex*)>(attnd::testing::HiddenLock());
  attnd::testing::locks.fetch_add(1, std::memory_order_relaxed);
  hidden(this);
}
