// The whole life of the program with --snapshot_on_drain and --restore: sessions outlive the process that served them.
// Scenario names (P07, ...) are those of the project's list of failures that people have reported.
#include <signal.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/service/folder.h"
#include "tests/service/harness.h"
#include "tests/service/program.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;
using Stub = v1::Attention::Stub;

class RestartTest : public ::testing::Test {
 protected:
  std::vector<std::string> SaveAndRestore() const {
    return {absl::StrCat("--snapshot_on_drain=", folder_ / "saved"), absl::StrCat("--restore=", folder_ / "saved")};
  }
  static std::unique_ptr<Stub> StubOf(const Program& program) { return v1::Attention::NewStub(program.NewChannel()); }
  std::string File(const std::string& id) const { return folder_ / ("saved/" + id + ".attnd"); }

  static Floats Mean(Stub* stub, const std::string& id, const Floats& values) {
    v1::StepResponse response;
    const grpc::Status status = Step(stub, MeanStep(id, values), &response);
    EXPECT_TRUE(status.ok()) << status.error_code() << " " << status.error_message();
    return ToFloats(response.out());
  }

  // Ends on SIGTERM as it should; returns its log.
  static std::string Stop(Program* program) {
    program->Signal(SIGTERM);
    EXPECT_EQ(program->Wait(), 0) << program->err();
    return program->err();
  }

  // Cannot start; returns why.
  static std::string Refusal(std::vector<std::string> arguments) {
    for (const char* more : {"--listen=127.0.0.1:0", "--metrics_listen=", "--kv_cache_bytes=64MiB"}) {
      arguments.push_back(more);
    }
    Program program(arguments);
    EXPECT_EQ(program.Wait(), 1);
    EXPECT_TRUE(absl::StrContains(program.err(), "attnd cannot start")) << program.err();
    EXPECT_EQ(program.out(), "");
    return program.err();
  }

  Folder folder_;
};

TEST_F(RestartTest, P07_O04_TheSameSessionsGoOnInTheNextProcess) {
  std::string a, b, empty;
  {
    auto first = Program::Serving(SaveAndRestore());
    auto stub = StubOf(*first);
    a = Create(stub.get()), b = Create(stub.get(), ServiceTest::MeanConfig(2)), empty = Create(stub.get());
    EXPECT_EQ(Mean(stub.get(), a, {1, 2, 3}), Floats({1, 1.5, 2}));
    EXPECT_EQ(Mean(stub.get(), b, {4}), Floats({4}));
    // A stream that has a session's last step ends with the process.
    grpc::ClientContext context;
    auto stream = stub->StepStream(&context);
    ASSERT_TRUE(stream->Write(MeanStep(a, {6})));
    v1::StepResponse response;
    ASSERT_TRUE(stream->Read(&response));
    EXPECT_EQ(ToFloats(response.out()), Floats({3}));
    first->Signal(SIGTERM);
    EXPECT_FALSE(stream->Read(&response));
    EXPECT_EQ(stream->Finish().error_code(), StatusCode::UNAVAILABLE);
    EXPECT_EQ(first->Wait(), 0) << first->err();
    EXPECT_TRUE(
        absl::StrContains(first->err(), "sessions saved directory=" + (folder_ / "saved") + " sessions=3 lost=0"))
        << first->err();
  }
  EXPECT_EQ(CountSnapshots(folder_ / "saved"), 3);
  for (int round = 0; round < 2; ++round) {  // the second one gets them from the first, which was asked for one alone
    auto next = Program::Serving(SaveAndRestore());
    EXPECT_TRUE(absl::StrContains(next->err(), "sessions of an earlier process are served again")) << next->err();
    auto stub = StubOf(*next);
    std::map<std::string, double> metrics = next->Metrics();
    EXPECT_EQ(metrics["attnd_sessions_created_total{origin=\"restore\"}"], 3);
    EXPECT_EQ(metrics["attnd_sessions_created_total{origin=\"create\"}"], 0);
    EXPECT_EQ(metrics["attnd_sessions_active"], 3);
    EXPECT_EQ(metrics["attnd_sessions_spilled"], 3) << "each is read when its first step comes";
    EXPECT_EQ(metrics["attnd_kv_cache_used_bytes"], 0);
    if (round == 0) {
      EXPECT_EQ(Mean(stub.get(), a, {8}), Floats({4})) << "(1 + 2 + 3 + 6 + 8) / 5";
    } else {
      // A step whose answer the end of the process took is sent again with its position: nothing is there twice.
      v1::StepRequest replay = MeanStep(a, {8});
      replay.mutable_segments(0)->set_start_position(4);
      v1::StepResponse response;
      ASSERT_TRUE(Step(stub.get(), replay, &response).ok());
      EXPECT_EQ(ToFloats(response.out()), Floats({4}));
      EXPECT_EQ(response.segments(0).length(), 5);
      EXPECT_EQ(Mean(stub.get(), b, {8}), Floats({6}));
      EXPECT_EQ(Mean(stub.get(), empty, {5}), Floats({5}));
    }
    metrics = next->Metrics();
    const int asked_for = round == 0 ? 1 : 3;
    EXPECT_EQ(metrics["attnd_snapshot_duration_seconds_count{op=\"restore\"}"], asked_for);
    EXPECT_EQ(metrics["attnd_sessions_spilled"], 3 - asked_for);
    EXPECT_TRUE(absl::StrContains(Stop(next.get()), "sessions=3 lost=0"));
  }
}

// What a client does that repeats a step whose answer it did not get: at the same position.
void StepThroughRestarts(Stub* stub, const std::string& id, int first, int steps, std::atomic<int>* done) {
  double sum = 0;
  for (int i = 0; i < steps; ++i) {
    const auto value = static_cast<float>(first + i % 10);
    v1::StepRequest request = MeanStep(id, {value});
    request.mutable_segments(0)->set_start_position(i);
    v1::StepResponse response;
    grpc::Status status;
    do {
      grpc::ClientContext context;
      context.set_wait_for_ready(true);
      status = stub->Step(&context, request, &response);
      // What reaches the transport while it closes ends as a CANCELLED that nobody asked for.
    } while (status.error_code() == StatusCode::UNAVAILABLE || status.error_code() == StatusCode::CANCELLED);
    ASSERT_TRUE(status.ok()) << i << ": " << status.error_code() << " " << status.error_message();
    sum += value;
    ASSERT_EQ(response.segments(0).length(), i + 1);
    ASSERT_NEAR(ToFloats(response.out()).at(0), sum / (i + 1), 1e-3) << i;
    done->fetch_add(1);
  }
}

TEST_F(RestartTest, P07_O04_ClientsThatReconnectGoOnAsIfNothingHadHappened) {
  constexpr int kClients = 4, kSteps = 900;
  auto program = Program::Serving(SaveAndRestore());
  std::vector<std::string> flags = SaveAndRestore();
  flags.push_back("--listen=" + program->address);
  const auto stub = StubOf(*program);
  std::atomic<int> done{0};
  std::vector<std::thread> clients;
  for (int i = 0; i < kClients; ++i) {
    clients.emplace_back(
        [&, i, id = Create(stub.get())] { StepThroughRestarts(stub.get(), id, 100 * i, kSteps, &done); });
  }
  for (int restart = 1; restart <= 3; ++restart) {
    const int enough = restart * kClients * kSteps / 5;
    EXPECT_TRUE(Eventually([&] { return done.load() >= enough; }, absl::Seconds(60)));
    EXPECT_LT(done.load(), kClients * kSteps) << "still at it";
    EXPECT_TRUE(absl::StrContains(Stop(program.get()), "sessions=4 lost=0")) << program->err();
    program = Program::Serving(flags);
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(done.load(), kClients * kSteps);
  EXPECT_EQ(program->Metrics().at("attnd_sessions_active"), kClients);
}

TEST_F(RestartTest, WithoutTheFlagsARestartLosesSessionsAndSaysSo) {
  std::string id;
  {
    auto first = Program::Serving();
    auto stub = StubOf(*first);
    id = Create(stub.get());
    Mean(stub.get(), id, {1});
    EXPECT_FALSE(absl::StrContains(Stop(first.get()), "sessions saved"));
  }
  auto next = Program::Serving(SaveAndRestore());
  v1::StepResponse response;
  EXPECT_EQ(ReasonOf(Step(StubOf(*next).get(), MeanStep(id, {1}), &response)), "NEVER_EXISTED");
}

TEST_F(RestartTest, WhatWasOnDiskIsSavedTooAndWhatWasSavedIsNotLostBySpilling) {
  // 1 MiB holds seven sessions of 128 KiB: the rest is on disk when the signal comes.
  v1::SessionConfig config = ServiceTest::MeanConfig();
  config.set_head_dim(256);
  const auto step = [](Stub* stub, const std::string& id, float value, float expected) {
    v1::StepRequest request = MeanStep(id, {value});
    *request.mutable_q() = *request.mutable_k() = F32(Floats(256, 0));
    *request.mutable_v() = F32(Floats(256, value));
    v1::StepResponse response;
    const grpc::Status status = Step(stub, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(ToFloats(response.out()), Floats(256, expected));
  };
  std::vector<std::string> flags = SaveAndRestore();
  for (const std::string& flag : {std::string("--kv_cache_bytes=1MiB"), std::string("--eviction=lru"),
                                  absl::StrCat("--spill_dir=", folder_ / "spill")}) {
    flags.push_back(flag);
  }
  constexpr int kSessions = 20;
  std::vector<std::string> ids;
  for (int life = 1; life <= 3; ++life) {
    auto program = Program::Serving(flags);
    auto stub = StubOf(*program);
    for (int i = 0; i < kSessions; ++i) {
      if (life == 1) ids.push_back(Create(stub.get(), config));
      step(stub.get(), ids[i], static_cast<float>(i), static_cast<float>(i));
    }
    const std::map<std::string, double> metrics = program->Metrics();
    EXPECT_GT(metrics.at("attnd_sessions_spilled"), kSessions / 2);
    EXPECT_GT(metrics.at("attnd_kv_cache_evictions_total{reason=\"spilled\"}"), kSessions / 2);
    EXPECT_TRUE(absl::StrContains(Stop(program.get()), "sessions=20 lost=0")) << program->err();
    EXPECT_EQ(CountSnapshots(folder_ / "saved"), kSessions);
    EXPECT_EQ(CountSnapshots(folder_ / "spill"), 0);
  }
}

TEST_F(RestartTest, S17_DamagedFilesAreLostSessionsAndTheOthersGoOn) {
  std::string head, body, gone, good;
  {
    auto first = Program::Serving(SaveAndRestore());
    auto stub = StubOf(*first);
    for (std::string* id : {&head, &body, &gone, &good}) {
      *id = Create(stub.get());
      Mean(stub.get(), *id, {1, 2, 3});
    }
    Stop(first.get());
  }
  FlipBit(File(head), static_cast<int64_t>(std::filesystem::file_size(File(head))) - 20);
  FlipBit(File(body), 100);
  std::filesystem::remove(File(gone));
  auto next = Program::Serving(SaveAndRestore());
  // What is wrong in a header is found at once, the rest when the session is read.
  EXPECT_TRUE(absl::StrContains(next->err(), "sessions=2 lost=1 first_error=")) << next->err();
  EXPECT_TRUE(absl::StrContains(next->err(), head)) << next->err();
  EXPECT_TRUE(absl::StrContains(next->err(), "ERROR")) << next->err();
  auto stub = StubOf(*next);
  v1::StepResponse response;
  for (const std::string& id : {head, body, head, body}) {
    const grpc::Status status = Step(stub.get(), MeanStep(id, {6}), &response);
    EXPECT_EQ(status.error_code(), StatusCode::DATA_LOSS) << status.error_message();
    EXPECT_EQ(ReasonOf(status), "SPILL_DAMAGED");
    EXPECT_TRUE(absl::StrContains(status.error_message(), id)) << status.error_message();
  }
  EXPECT_EQ(ReasonOf(Step(stub.get(), MeanStep(gone, {6}), &response)), "NEVER_EXISTED");
  EXPECT_EQ(Mean(stub.get(), good, {6}), Floats({3}));
  const std::map<std::string, double> metrics = next->Metrics();
  EXPECT_EQ(metrics.at("attnd_snapshot_failures_total{op=\"restore\"}"), 2);
  EXPECT_EQ(metrics.at("attnd_sessions_closed_total{reason=\"lost\"}"), 1) << "the other one was never open";
  EXPECT_EQ(metrics.at("attnd_sessions_active"), 1);
}

TEST_F(RestartTest, ADrainThatCannotSaveSaysSoAndEndsWithOne) {
  const std::string disk = folder_.SmallDisk();
  if (disk.empty()) GTEST_SKIP() << "needs the right to mount";
  auto program = Program::Serving({"--snapshot_on_drain=" + disk});
  auto stub = StubOf(*program);
  const std::string small = Create(stub.get());
  Mean(stub.get(), small, {1});
  v1::SessionConfig config = ServiceTest::MeanConfig();
  config.set_head_dim(256);
  const std::string large = Create(stub.get(), config);
  v1::StepRequest request = MeanStep(large, Floats(1200, 0));  // 2.4 MiB of keys and values
  for (v1::Tensor* tensor : {request.mutable_q(), request.mutable_k(), request.mutable_v()}) {
    *tensor = F32(Floats(size_t{1200} * 256, 0));
  }
  v1::StepResponse response;
  ASSERT_TRUE(Step(stub.get(), request, &response).ok());
  program->Signal(SIGTERM);
  EXPECT_EQ(program->Wait(), 1) << program->err();
  EXPECT_TRUE(absl::StrContains(program->err(), "sessions=1 lost=1 first_error=")) << program->err();
  EXPECT_TRUE(absl::StrContains(program->err(), "No space left on device")) << program->err();
  EXPECT_TRUE(absl::StrContains(program->err(), "drained: every call was answered")) << program->err();
  EXPECT_TRUE(std::filesystem::exists(absl::StrCat(disk, "/", small, ".attnd"))) << "what fits is saved";
  EXPECT_EQ(CountSnapshots(disk), 1);
}

TEST_F(RestartTest, ASecondSignalEndsTheSaving) {
  auto program = Program::Serving({"--snapshot_on_drain=" + (folder_ / "saved"), "--drain_timeout=60s"});
  auto stub = StubOf(*program);
  for (int i = 0; i < 4000; ++i) Create(stub.get());
  program->Signal(SIGTERM);
  // Each file is forced to the disk, and so is its name: 4000 take seconds.
  ASSERT_TRUE(Eventually([&] { return CountSnapshots(folder_ / "saved") > 0; }));
  program->Signal(SIGTERM);
  const absl::Time hurried = absl::Now();
  EXPECT_EQ(program->Wait(), 1) << program->err();
  EXPECT_LT(absl::Now() - hurried, absl::Seconds(5));
  // Between two files, or in one.
  EXPECT_TRUE(absl::StrContains(program->err(), "there was no time left") ||
              absl::StrContains(program->err(), "was given up"))
      << program->err();
  EXPECT_LT(CountSnapshots(folder_ / "saved"), 4000);
}

TEST_F(RestartTest, DirectoriesThatCannotBeUsedStopTheStart) {
  const std::string saved = folder_ / "saved";
  auto program = Program::Serving(SaveAndRestore());
  std::string why = Refusal({"--snapshot_on_drain=" + saved});
  EXPECT_TRUE(absl::StrContains(why, "is in use by process ")) << why;
  why = Refusal({"--restore=" + saved});
  EXPECT_TRUE(absl::StrContains(why, saved)) << why;
  EXPECT_TRUE(absl::StrContains(why, "is in use by process ")) << why;
  why = Refusal({"--eviction=lru", "--spill_dir=" + saved});
  EXPECT_TRUE(absl::StrContains(why, saved)) << why;
  EXPECT_TRUE(absl::StrContains(why, "is in use by process ")) << why;
  Stop(program.get());

  std::ofstream(folder_ / "file") << "x";
  for (const std::string& directory : {folder_ / "file", folder_ / "no/such/parent", std::string("/proc/attnd")}) {
    for (const std::vector<std::string>& flags :
         {std::vector<std::string>{"--restore=" + directory},
          std::vector<std::string>{"--snapshot_on_drain=" + directory},
          std::vector<std::string>{"--eviction=lru", "--spill_dir=" + directory}}) {
      why = Refusal(flags);
      EXPECT_TRUE(absl::StrContains(why, directory)) << why;
    }
  }
}

TEST_F(RestartTest, WhatAKilledProcessHadMovedToDiskIsServedAgain) {
  const std::vector<std::string> flags = {"--kv_cache_bytes=1MiB", "--eviction=lru",
                                          absl::StrCat("--spill_dir=", folder_ / "spill")};
  v1::SessionConfig config = ServiceTest::MeanConfig();
  config.set_head_dim(256);
  config.set_value_dim(1);
  const auto step = [](Stub* stub, const std::string& id, float value, Floats* mean) {
    v1::StepRequest request = MeanStep(id, {value});
    *request.mutable_q() = *request.mutable_k() = F32(Floats(256, 0));
    v1::StepResponse response;
    const grpc::Status status = Step(stub, request, &response);
    if (status.ok()) *mean = ToFloats(response.out());
    return status;
  };
  Floats mean;
  std::vector<std::string> ids;
  int on_disk;
  {
    auto killed = Program::Serving(flags);
    auto stub = StubOf(*killed);
    for (int i = 0; i < 30; ++i) {
      ids.push_back(Create(stub.get(), config));
      ASSERT_TRUE(step(stub.get(), ids.back(), static_cast<float>(i), &mean).ok());
    }
    killed->Signal(SIGKILL);
    EXPECT_EQ(killed->Wait(), 1000 + SIGKILL);
    on_disk = CountSnapshots(folder_ / "spill");
    ASSERT_GT(on_disk, 5);
  }
  auto next = Program::Serving(flags);
  EXPECT_TRUE(absl::StrContains(next->err(), absl::StrCat("sessions=", on_disk, " lost=0"))) << next->err();
  auto stub = StubOf(*next);
  int served = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const grpc::Status status = step(stub.get(), ids[i], static_cast<float>(i) + 2, &mean);
    if (status.ok()) {
      EXPECT_EQ(mean, Floats({static_cast<float>(i) + 1})) << "as it was, or not at all";
      ++served;
    } else {
      EXPECT_EQ(ReasonOf(status), "NEVER_EXISTED") << status.error_message();
    }
  }
  EXPECT_EQ(served, on_disk);
}

}  // namespace
}  // namespace attnd::testing
