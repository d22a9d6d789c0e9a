#include "server/cache/snapshot.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/unit/cache/snapshot_harness.h"

namespace attnd {
namespace {

constexpr KvDType kDTypes[] = {KvDType::kF32, KvDType::kBf16, KvDType::kF16, KvDType::kInt8};

class SnapshotOfType : public testing::TestWithParam<KvDType> {};
INSTANTIATE_TEST_SUITE_P(Snapshot, SnapshotOfType, testing::ValuesIn(kDTypes));

TEST_P(SnapshotOfType, RestoresSessionsOfEveryLength) {
  for (const int64_t length : {0, 1, 2, 3, 62, 63, 64, 65, 127, 128, 129, 1000}) {
    SCOPED_TRACE(length);
    auto session = MakeSession({{20, 70, GetParam()}, 2, {length}, {}}, length);
    const Restored restored = Restore(session->Snapshot("what the engine knows"), 1000);
    ASSERT_TRUE(restored.status.ok()) << restored.status;
    EXPECT_EQ(restored.header.metadata, "what the engine knows");
    ExpectEqualSessions(session.get(), restored.session.get());
  }
}

TEST_P(SnapshotOfType, RestoresLayersOfUnequalLengthsAndWindows) {
  const TestSpec specs[] = {
      {{1, 1, GetParam()}, 1, {0, 0, 0}, {}},
      {{7, 5, GetParam()}, 3, {0, 100, 0, 64, 1, 0}, {}},
      {{64, 64, GetParam()}, 2, {1000, 1000, 1000}, {0, 896, 960}},
      {{33, 130, GetParam()}, 1, {128, 200, 65, 3}, {128, 192, 64, 0}},  // the first layer has no token left
      {{256, 256, GetParam()}, 4, {700, 10}, {64, 0}},
  };
  for (const TestSpec& spec : specs) {
    SCOPED_TRACE(testing::PrintToString(spec.lengths));
    auto session = MakeSession(spec, 1);
    const Restored restored = Restore(session->Snapshot(), kMaxPieceBytes);
    ASSERT_TRUE(restored.status.ok()) << restored.status;
    ExpectEqualSessions(session.get(), restored.session.get());
    EXPECT_EQ(restored.session->Snapshot(), session->Snapshot());
  }
}

}  // namespace
}  // namespace attnd
