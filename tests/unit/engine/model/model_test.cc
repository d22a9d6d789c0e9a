// Random operations on an engine beside a plain model of it. ATTND_MODEL_SEED and ATTND_MODEL_OPERATIONS repeat a run,
// or make a longer one.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <random>

#include "tests/unit/engine/engine_harness.h"
#include "tests/unit/engine/model/driver.h"
#include "tests/unit/engine/model/scratch.h"

namespace attnd {
namespace {

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* const text = getenv(name);
  return text == nullptr ? otherwise : strtoull(text, nullptr, 10);
}

void Print(const ModelTotals& totals, double seconds) {
  std::printf("%lld operations in %lld runs, %.1f s, %.0f a second\n", static_cast<long long>(totals.operations),
              static_cast<long long>(totals.runs), seconds, static_cast<double>(totals.operations) / seconds);
  std::printf("  restarts %lld, files damaged %lld, rows checked %lld, twins asked %lld\n",
              static_cast<long long>(totals.restarts), static_cast<long long>(totals.damaged),
              static_cast<long long>(totals.means_checked), static_cast<long long>(totals.twins_asked));
  std::printf("  made to fail: allocations %lld, reads %lld, writes %lld, removals %lld\n",
              static_cast<long long>(totals.failed_allocations), static_cast<long long>(totals.failed_reads),
              static_cast<long long>(totals.failed_writes), static_cast<long long>(totals.failed_removals));
  for (const auto& [what, count] : totals.outcomes) {
    std::printf("  %-28s %lld\n", what.c_str(), static_cast<long long>(count));
  }
}

TEST(EngineModel, RandomOperationsAndFailuresLeaveExactlyWhatThePlainModelHas) {
  const bool is_slow = kThreadSanitizer || kHoldsFreedMemory;
  const int64_t operations = static_cast<int64_t>(FromEnvironment("ATTND_MODEL_OPERATIONS", is_slow ? 20000 : 300000));
  uint64_t seed = FromEnvironment("ATTND_MODEL_SEED", std::random_device()());
  Twins twins;
  ModelTotals totals;
  const auto begin = std::chrono::steady_clock::now();
  std::string failure;
  while (totals.operations < operations && failure.empty()) {
    const ScratchDirectory directory;
    std::printf("ATTND_MODEL_SEED=%llu\n", static_cast<unsigned long long>(seed));
    std::fflush(stdout);
    Choices choices(seed);
    ModelDriver driver(&choices, directory.path(), &twins, &totals);
    failure = driver.Run(20000);
    if (!failure.empty()) ADD_FAILURE() << "ATTND_MODEL_SEED=" << seed << ": " << failure;
    seed++;
  }
  Print(totals, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
}

}  // namespace
}  // namespace attnd
