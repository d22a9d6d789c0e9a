// Operations on an engine beside a plain model of it, as the bytes say (tests/unit/engine/model).
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>

#include "absl/types/span.h"
#include "tests/unit/engine/model/choices.h"
#include "tests/unit/engine/model/driver.h"
#include "tests/unit/engine/model/scratch.h"
#include "tests/unit/engine/model/twin.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static attnd::Twins& twins = *new attnd::Twins;
  const attnd::ScratchDirectory directory;
  attnd::ModelTotals totals;
  attnd::Choices choices(absl::MakeConstSpan(data, size));
  attnd::ModelDriver driver(&choices, directory.path(), &twins, &totals);
  const std::string failure = driver.Run(std::numeric_limits<int64_t>::max());
  if (failure.empty()) return 0;
  std::fprintf(stderr, "%s\n", failure.c_str());
  std::abort();
}
