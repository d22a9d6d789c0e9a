// The pure parts of attnctl: flags, estimates, problems as JSON, the metrics page.
#include <gtest/gtest.h>

#include <cmath>

#include "absl/strings/match.h"
#include "client/attnctl/estimate.h"
#include "client/attnctl/problem.h"
#include "client/tool/flags.h"
#include "client/tool/metrics_page.h"

namespace attnd::attnctl {
namespace {

using tool::FetchPage;
using tool::FlagSet;
using tool::SelectSamples;

// ---- flags

struct FlagsTest : ::testing::Test {
  FlagsTest() : flags("attnctl test", "For tests.") {
    flags.Int("count", &count, 1, 10, "a number");
    flags.String("name", &name, "a text");
    flags.Switch("fast", &fast, "a switch");
    flags.Seconds("wait", &wait, "a duration");
    flags.Choice("kind", &kind, {"a", "b"}, "a choice");
  }
  std::string Error(const std::vector<std::string>& arguments) {
    return std::string(flags.Parse(arguments, nullptr).message());
  }
  FlagSet flags;
  int64_t count = 1;
  std::string name, kind = "a";
  bool fast = false;
  absl::Duration wait = absl::Seconds(1);
};

TEST_F(FlagsTest, AllWaysOfWritingThem) {
  std::vector<std::string> rest;
  ASSERT_TRUE(
      flags.Parse({"--count=3", "--name", "x y", "file", "--fast", "-", "--wait=250ms", "--kind=b"}, &rest).ok());
  EXPECT_EQ(count, 3);
  EXPECT_EQ(name, "x y");
  EXPECT_TRUE(fast);
  EXPECT_EQ(wait, absl::Milliseconds(250));
  EXPECT_EQ(kind, "b");
  EXPECT_EQ(rest, (std::vector<std::string>{"file", "-"}));
}

TEST_F(FlagsTest, MistakesNameWhatIsWrong) {
  EXPECT_EQ(Error({"--cuont=3"}), "unknown flag '--cuont=3'");
  EXPECT_EQ(Error({"-x"}), "unknown flag '-x'");
  EXPECT_EQ(Error({"--count=3x"}), "--count: '3x' is not a whole number");
  EXPECT_EQ(Error({"--count=11"}), "--count: 11 is not in 1..10");
  EXPECT_EQ(Error({"--count"}), "--count needs a value");
  EXPECT_EQ(Error({"--wait=soon"}), "--wait: 'soon' is not a positive duration such as 30s or 500ms");
  EXPECT_EQ(Error({"--kind=c"}), "--kind: 'c' is not one of a, b");
  EXPECT_EQ(Error({"--fast=maybe"}), "--fast: 'maybe' is neither true nor false");
  EXPECT_EQ(Error({"file"}), "unexpected argument 'file'");
}

TEST_F(FlagsTest, HelpWinsOverWhatFollows) {
  ASSERT_TRUE(flags.Parse({"--help", "--nonsense"}, nullptr).ok());
  EXPECT_TRUE(flags.help_wanted());
  EXPECT_TRUE(absl::StrContains(flags.Help(), "--kind=a|b"));
}

// ---- estimate

TEST(Estimate, Llama3In16Bits) {
  const client::SessionConfig config = {
      .num_layers = 32, .num_q_heads = 32, .num_kv_heads = 8, .head_dim = 128, .kv_dtype = client::KvDType::kBf16};
  const Estimate e = EstimateCost(config, 4096, 3, client::DType::kBf16);
  EXPECT_EQ(e.bytes_per_token, 128 << 10);
  EXPECT_EQ(e.session_bytes, int64_t{512} << 20);
  EXPECT_EQ(e.total_bytes, int64_t{1536} << 20);
  EXPECT_EQ(e.request_bytes, 384 << 10);
  EXPECT_EQ(e.answer_bytes, 256 << 10);
  // One token more takes a block more of every kv head.
  EXPECT_EQ(EstimateCost(config, 4097, 1, client::DType::kBf16).session_bytes - e.session_bytes,
            int64_t{32} * 8 * 64 * 2 * (128 + 128));
}

TEST(Estimate, UnequalAndOddDims) {
  client::SessionConfig config = {.num_q_heads = 6, .num_kv_heads = 3, .head_dim = 7, .value_dim = 5};
  EXPECT_EQ(EstimateCost(config, 1, 1, client::DType::kF32).block_bytes, 64 * 4 * 12);
  EXPECT_EQ(EstimateCost(config, 1, 1, client::DType::kF32).request_bytes, 4 * (6 * 7 + 3 * 12));
  config.kv_dtype = client::KvDType::kBf16;
  EXPECT_EQ(EstimateCost(config, 1, 1, client::DType::kF32).block_bytes, 64 * 2 * (8 + 5));  // K in pairs
  config.kv_dtype = client::KvDType::kF16;
  EXPECT_EQ(EstimateCost(config, 1, 1, client::DType::kF32).block_bytes, 64 * 2 * (7 + 5));
  config.kv_dtype = client::KvDType::kInt8;
  EXPECT_EQ(EstimateCost(config, 1, 1, client::DType::kF32).block_bytes, 64 * (8 + 5 + 8));  // K in quads, scales
}

// ---- problems

std::string ProblemError(const std::string& json) { return std::string(ParseProblem(json).status().message()); }

TEST(Problem, OneHead) {
  const absl::StatusOr<Problem> p =
      ParseProblem(R"({"name":"x","q":[[0,1]],"k":[[0,1],[2,3]],"v":[[2],[8]],"scale":0,"causal":true,
                       "mask":[[true,false]],"window":3,"softcap":2.5,"query_offset":1,"empty_rows":"zero","kv":"bf16"})");
  ASSERT_TRUE(p.ok()) << p.status();
  const client::AttendRequest r = p->Request();
  EXPECT_EQ(r.num_queries, 1);
  EXPECT_EQ(r.num_keys, 2);
  EXPECT_EQ(r.head_dim, 2);
  EXPECT_EQ(r.value_dim, 1);
  EXPECT_EQ(r.k.size(), 4u);
  EXPECT_EQ(r.softmax.softmax_scale, 0.0f);  // given as zero is not the same as left out
  EXPECT_EQ(r.softmax.causal, true);
  EXPECT_EQ(r.softmax.window, 3);
  EXPECT_EQ(r.query_offset, 1);
  EXPECT_TRUE(r.mask.Get(0, 0));
  EXPECT_FALSE(r.mask.Get(0, 1));
  EXPECT_EQ(r.empty_rows, client::EmptyRows::kZero);
  EXPECT_EQ(r.kv_dtype, client::KvDType::kBf16);
}

TEST(Problem, WhatIsLeftOutStaysUnset) {
  const absl::StatusOr<Problem> p = ParseProblem(R"({"q":[[["nan"],[1]]],"k":[[["inf"]]],"v":[[[8,9]]]})");
  ASSERT_TRUE(p.ok()) << p.status();
  const client::AttendRequest r = p->Request();
  EXPECT_FALSE(r.softmax.softmax_scale.has_value());
  EXPECT_FALSE(r.softmax.causal.has_value());
  EXPECT_FALSE(r.query_offset.has_value());
  EXPECT_EQ(r.num_q_heads, 2);
  EXPECT_EQ(r.num_kv_heads, 1);
  EXPECT_TRUE(std::isnan(p->q[0]));
  EXPECT_TRUE(std::isinf(p->k[0]));
}

TEST(Problem, MistakesNameTheValue) {
  const std::string rest = R"(,"k":[[0],[0]],"v":[[2],[8]]})";
  EXPECT_EQ(ProblemError(R"({"k":[[0]],"v":[[1]]})"), "'q' is missing");
  EXPECT_EQ(ProblemError(R"({"q":[["x"]])" + rest), "q[0][0] is \"x\", not a number");
  EXPECT_EQ(ProblemError(R"({"q":[[0],[0,1]])" + rest), "q[1] has 2 values and the rows before it have 1");
  EXPECT_EQ(ProblemError(R"({"q":[[1e39]])" + rest), "q[0][0] is 1e+39, beyond the range of f32");
  EXPECT_EQ(ProblemError(R"({"q":[])" + rest), "q has no rows");
  EXPECT_EQ(ProblemError(R"({"q":[[0]],"scael":1)" + rest), "unknown key 'scael'");
  EXPECT_EQ(ProblemError(R"({"q":[[0]],"window":1.5)" + rest), "window is 1.5, not a whole number");
  EXPECT_EQ(ProblemError(R"({"q":[[0]],"mask":[[1]])" + rest), "mask[0][0] is 1, not true or false");
  EXPECT_EQ(ProblemError(R"({"q":[[0,0]])" + rest), "q has rows of 2 and k of 1");
  EXPECT_EQ(ProblemError(R"({"q":[[0]],"k":[[0],[0],[0]],"v":[[2],[8]]})"), "k has 3 rows and v has 2");
  EXPECT_TRUE(absl::StartsWith(ProblemError("{\"q\":"), "not JSON: "));
  EXPECT_FALSE(ProblemError("[1]").empty());
}

TEST(Problem, AnswersNestAsTheProblemDid) {
  Problem problem = *ParseProblem(R"({"q":[[0],[0]],"k":[[0],[0]],"v":[[2],[8]]})");
  client::AttendResult result;
  const float out[] = {0.1f, -2};
  result.out.data.assign(reinterpret_cast<const char*>(out), sizeof(out));
  result.weights = {1, 0, 0.5, 0.5};
  result.lse = {-INFINITY, 0};
  EXPECT_EQ(FormatAnswer(problem, result), R"({"out":[[0.1],[-2]],"weights":[[1,0],[0.5,0.5]],"lse":["-inf",0]})");
  problem.with_heads = true;
  EXPECT_EQ(FormatAnswer(problem, result),
            R"({"out":[[[0.1]],[[-2]]],"weights":[[[1,0],[0.5,0.5]]],"lse":[["-inf"],[0]]})");
}

// ---- metrics

TEST(Metrics, SamplesAreSelectedByPrefix) {
  const std::string page = "# HELP attnd_kv_cache_used_bytes x\nattnd_kv_cache_used_bytes 0\nattnd_ready 1\n";
  EXPECT_EQ(SelectSamples(page, {"attnd_kv_cache_"}), std::vector<std::string>{"attnd_kv_cache_used_bytes 0"});
}

TEST(Metrics, BadUrlsAreRefused) {
  EXPECT_TRUE(absl::IsInvalidArgument(FetchPage("https://x/metrics", absl::Seconds(1)).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(FetchPage("http:///metrics", absl::Seconds(1)).status()));
  EXPECT_TRUE(absl::IsUnavailable(FetchPage("http://127.0.0.1:1/metrics", absl::Seconds(1)).status()));
}

}  // namespace
}  // namespace attnd::attnctl
