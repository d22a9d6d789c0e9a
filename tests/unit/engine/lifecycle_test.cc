// Life of sessions: ids, positions, atomic appends, closing (scenarios S01 to S12, S21, C01, C06, D05, K09).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

#include "tests/unit/engine/engine_harness.h"

namespace attnd {
namespace {

using ::testing::ElementsAre;
using ::testing::FloatEq;
using ::testing::HasSubstr;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr const char kUnknownId[] = "0123456789abcdef0123456789abcdef";
// Bytes of one block of the tiny shape: 64 tokens of K and V, one float each.
constexpr int64_t kTinyBlock = 512;

TEST(Lifecycle, S01UnknownClosedAndMalformedIds) {
  Harness h;
  EXPECT_EQ(h.Mean(kUnknownId, {1}).reason(), "NEVER_EXISTED");
  EXPECT_EQ(h.Mean(kUnknownId, {1}).status.code(), absl::StatusCode::kNotFound);
  for (const std::string& id : {std::string(), std::string(10240, 'a'), std::string("a\n\"b"), std::string(32, 'G'),
                                std::string(31, 'a'), std::string(33, 'a'), std::string(32, '\0')}) {
    EXPECT_EQ(h.Mean(id, {1}).status.code(), absl::StatusCode::kInvalidArgument) << id.size();
    EXPECT_EQ(h.Mean(id, {1}).reason(), "BAD_SESSION_ID");
    EXPECT_EQ(h.engine->GetSession(id).status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(h.engine->CloseSession(id).status().code(), absl::StatusCode::kInvalidArgument);
  }
  const std::string id = h.Create();
  EXPECT_THAT(h.Mean(id, {1}).out, ElementsAre(1));
  EXPECT_THAT(h.engine->CloseSession(id).value(), true);
  EXPECT_EQ(h.Mean(id, {1}).reason(), "CLOSED");
  EXPECT_EQ(h.engine->CloseSession(id).value(), false);
  EXPECT_EQ(h.engine->CloseSession(kUnknownId).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(h.used_bytes(), 0);
  EXPECT_EQ(h.engine->stats().sessions_active, 0);
}

TEST(Lifecycle, S08FailedStepsLeaveNoTrace) {
  Harness h;
  const std::string id = h.Create();
  EXPECT_THAT(h.Mean(id, {1, 2, 3}).out, ElementsAre(1, 1.5, 2));
  const int64_t used = h.used_bytes();
  const StepAnswer bad = h.Mean(id, {50, 50, kNan, 50});
  EXPECT_EQ(bad.reason(), "NOT_FINITE");
  EXPECT_THAT(std::string(bad.status.message()), HasSubstr("v row 2, head 0, element 0"));
  EXPECT_THAT(bad.out, ElementsAre(0, 0, 0, 0));
  EXPECT_EQ(h.Length(id), 3);
  EXPECT_EQ(h.used_bytes(), used);
  EXPECT_THAT(h.Mean(id, {6}).out, ElementsAre(3));
}

}  // namespace
}  // namespace attnd
