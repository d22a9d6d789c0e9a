// The demo finds what is wrong, and its float64 attention is the reference's.
#include "client/attnctl/demo.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "client/attnctl/commands.h"
#include "client/tool/float64_head.h"
#include "kernels/reference.h"
#include "tests/unit/client/fake_server.h"

namespace attnd::attnctl {
namespace {

struct HeadCase {
  int head_dim, value_dim, queries, keys;
};

class Float64HeadTest : public ::testing::TestWithParam<HeadCase> {};

// Sizes around the vectors' 8 lanes and the 4 rows that are computed together.
INSTANTIATE_TEST_SUITE_P(Sizes, Float64HeadTest,
                         ::testing::Values(HeadCase{1, 1, 1, 1}, HeadCase{7, 9, 3, 8}, HeadCase{8, 8, 4, 9},
                                           HeadCase{128, 128, 5, 65}, HeadCase{17, 256, 9, 31},
                                           HeadCase{256, 3, 2, 7}));

TEST_P(Float64HeadTest, EqualsTheReference) {
  const auto [head_dim, value_dim, queries, keys] = GetParam();
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> q(queries * head_dim), k(keys * head_dim), v(keys * value_dim);
  for (auto* tensor : {&q, &k, &v}) std::generate(tensor->begin(), tensor->end(), [&] { return normal(random); });
  const double scale = 1 / std::sqrt(static_cast<double>(head_dim));
  ReferenceInput in;
  in.heads = {1, 1};
  in.head_dim = head_dim;
  in.value_dim = value_dim;
  in.softmax.softmax_scale = static_cast<float>(scale);
  in.softmax.causal = false;
  in.q.assign(q.begin(), q.end());
  in.k.assign(k.begin(), k.end());
  in.v.assign(v.begin(), v.end());
  const ReferenceOutput expected = ReferenceAttention(in);
  tool::Float64Head head(head_dim, value_dim, keys, k, v);
  std::vector<double> out(queries * value_dim, NAN);
  head.Attend(in.q, queries, keys, in.softmax.softmax_scale, out);
  for (size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected.out[i], 1e-12) << i;
}

class DemoTest : public ::testing::Test {
 protected:
  int Run(std::vector<std::string> more = {}) {
    std::vector<std::string> arguments = {"--server=" + server_.target(),
                                          "--sessions=3",
                                          "--layers=2",
                                          "--q_heads=4",
                                          "--kv_heads=2",
                                          "--head_dim=16",
                                          "--prefill=70",
                                          "--decode=66"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    return RunDemo(arguments);
  }
  FakeServer server_;
};

TEST_F(DemoTest, SucceedsAgainstARightServer) {
  EXPECT_EQ(Run(), kDone);
  EXPECT_EQ(Run({"--stream", "--value_dim=24"}), kDone);
}

TEST_F(DemoTest, OneWrongElementFails) {
  for (int step : {1, 6, 7, 200}) {  // in a prefill and in a decode
    server_.faults().corrupt_steps = step;
    EXPECT_EQ(Run(), kFailed) << step;
  }
}

TEST_F(DemoTest, AFailingStepFails) {
  server_.faults().error = {absl::StatusCode::kInternal, "", "as told", {}};
  server_.faults().lose_answers = 1;
  EXPECT_EQ(Run(), kFailed);
}

TEST_F(DemoTest, AFullQueueIsWaitedFor) {
  server_.faults().error = {absl::StatusCode::kResourceExhausted, "QUEUE_FULL", "full", absl::Milliseconds(1)};
  server_.faults().lose_answers = 5;
  EXPECT_EQ(Run(), kDone);
}

TEST(Demo, NoServerFails) { EXPECT_EQ(RunDemo({"--server=127.0.0.1:1"}), kFailed); }

TEST(Demo, MistakesAreUsageErrors) {
  EXPECT_EQ(RunDemo({"--sesions=3"}), kUsage);
  EXPECT_EQ(RunDemo({"--q_heads=6", "--kv_heads=4"}), kUsage);
}

}  // namespace
}  // namespace attnd::attnctl
