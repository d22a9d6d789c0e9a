// Flags: what they mean, and how mistakes are told.
#include "client/attnload/options.h"

#include <gtest/gtest.h>

#include "absl/strings/match.h"

namespace attnd::attnload {
namespace {

std::string Error(const std::vector<std::string>& arguments) {
  Flags flags;
  absl::Status status = flags.set().Parse(arguments, nullptr);
  if (status.ok()) status = flags.Check();
  EXPECT_FALSE(status.ok());
  return std::string(status.message());
}

TEST(FlagsTest, MistakesNameFlagAndValue) {
  EXPECT_EQ(Error({"--rat=3"}), "unknown flag '--rat=3'");
  EXPECT_EQ(Error({"10"}), "unexpected argument '10'");
  EXPECT_EQ(Error({"--rate=fast"}), "--rate: 'fast' is not a number");
  EXPECT_EQ(Error({"--rate=0"}), "--rate: 0 is not in 1e-06..1e+06");
  EXPECT_EQ(Error({"--rate=nan"}), "--rate: nan is not in 1e-06..1e+06");
  EXPECT_EQ(Error({"--arrivals=burst"}), "--arrivals: 'burst' is not one of poisson, constant, ramp");
  EXPECT_EQ(Error({"--duration=0s"}), "--duration: '0s' is not a positive duration such as 30s or 500ms");
  EXPECT_EQ(Error({"--warmup=-1s"}), "--warmup: '-1s' is not a duration such as 30s or 500ms");
  EXPECT_EQ(Error({"--cancel_rate=1.5"}), "--cancel_rate: 1.5 is not in 0..1");
  EXPECT_EQ(Error({"--prefill_tokens=0"}), "--prefill_tokens: 0 is not in 1..16777216");
  EXPECT_EQ(Error({"--streams=x"}), "--streams: 'x' is not a whole number");
  EXPECT_EQ(Error({"--model=llama4"}), "--model: 'llama4' is not one of llama3-8b, gpt2, smollm2-135m, custom");
  EXPECT_TRUE(absl::StrContains(Error({"--model=custom"}), "--q_heads"));
  EXPECT_TRUE(absl::StrContains(Error({"--q_heads=31"}), "31 is not a multiple of --kv_heads 8"));
}

TEST(FlagsTest, WhatDoesNotGoTogetherIsRefused) {
  EXPECT_TRUE(absl::StrContains(Error({"--find_capacity"}), "--slo_p99"));
  EXPECT_EQ(Error({"--find_capacity", "--slo_p99=1s", "--rate=9", "--max_rate=8"}), "--max_rate: 8 is below --rate 9");
  EXPECT_TRUE(absl::StrContains(Error({"--find_capacity", "--slo_p99=1s", "--arrivals=ramp"}), "--arrivals: ramp"));
  EXPECT_TRUE(absl::StrContains(Error({"--decode_interval=6s", "--session_ttl=10s"}), "--session_ttl: 10s"));
}

TEST(FlagsTest, BecomeALoad) {
  Flags flags;
  ASSERT_TRUE(flags.set()
                  .Parse({"--model=gpt2", "--layers=2", "--kv=int8", "--rate=7", "--arrivals=ramp", "--warmup=0",
                          "--duration=3s", "--decode_interval=5ms", "--seed=9"},
                         nullptr)
                  .ok());
  ASSERT_TRUE(flags.Check().ok());
  const LoadOptions load = flags.Load(int64_t{64} << 20);
  EXPECT_EQ(load.plan.config.num_layers, 2);
  EXPECT_EQ(load.plan.config.num_q_heads, 12);
  EXPECT_EQ(load.plan.config.kv_dtype, client::KvDType::kInt8);
  EXPECT_EQ(load.rate, 7);
  EXPECT_EQ(load.arrivals, ArrivalKind::kRamp);
  EXPECT_EQ(load.warmup, Nanos(0));
  EXPECT_EQ(load.duration, std::chrono::seconds(3));
  EXPECT_EQ(load.decode_interval, std::chrono::milliseconds(5));
  EXPECT_EQ(load.plan.seed, 9u);
}

// A token of Llama-3-8B's layer is (32 + 8 + 8) * 128 * 4 = 24 KiB on the wire.
TEST(FlagsTest, APrefillIsCutToMessages) {
  Flags flags;
  ASSERT_TRUE(flags.set().Parse({"--prefill_tokens=5000", "--prefill_chunk=4000"}, nullptr).ok());
  EXPECT_EQ(flags.Load(int64_t{64} << 20).plan.prefill_chunk, 2730);
  EXPECT_EQ(flags.Load(int64_t{1} << 30).plan.prefill_chunk, 4000);
  EXPECT_EQ(flags.Load(1).plan.prefill_chunk, 1);
}

TEST(FlagsTest, MetricsMayBeAnAddressOrAUrl) {
  const auto url = [](const std::string& given) {
    Flags flags;
    EXPECT_TRUE(flags.set().Parse({"--metrics=" + given}, nullptr).ok());
    return flags.MetricsUrl();
  };
  EXPECT_EQ(url("127.0.0.1:9464"), "http://127.0.0.1:9464/metrics");
  EXPECT_EQ(url("attnd:9464/other"), "http://attnd:9464/other");
  EXPECT_EQ(url("http://attnd:9464/metrics"), "http://attnd:9464/metrics");
  EXPECT_EQ(Flags().MetricsUrl(), "");
}

TEST(FlagsTest, TheReportsShowEveryFlag) {
  Flags flags;
  ASSERT_TRUE(flags.set().Parse({"--rate=7", "--find_capacity"}, nullptr).ok());
  std::map<std::string, std::string> shown;
  for (const auto& [name, value] : flags.Describe()) shown[name] = value;
  EXPECT_EQ(shown.at("rate"), "7");
  EXPECT_EQ(shown.at("find_capacity"), "true");
  EXPECT_EQ(shown.at("tls"), "false");
  EXPECT_EQ(shown.at("arrivals"), "poisson");
}

}  // namespace
}  // namespace attnd::attnload
