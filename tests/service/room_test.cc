// What is counted when memory is short: sessions dropped, moved to disk, brought back, lost. All through a real server
// with a cache of 1 MiB.
#include <atomic>
#include <filesystem>
#include <random>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/service/folder.h"
#include "tests/service/harness.h"

namespace attnd::testing {
namespace {

using grpc::StatusCode;

constexpr int kHeadDim = 256;  // so that a block of keys takes 64 KiB of the cache

class RoomTest : public ServiceTest {
 protected:
  Options RoomOptions(const std::string& spill_dir) {
    Options options = DefaultOptions();
    options.kv_cache_bytes = int64_t{1} << 20;
    options.eviction = "lru";
    options.spill_dir = spill_dir;
    return options;
  }

  static v1::SessionConfig WideConfig() {
    v1::SessionConfig config = MeanConfig();
    config.set_head_dim(kHeadDim);
    config.set_value_dim(1);
    return config;
  }

  static v1::StepRequest WideStep(const std::string& id, const Floats& values) {
    v1::StepRequest request = MeanStep(id, values);
    *request.mutable_q() = *request.mutable_k() = F32(Floats(values.size() * kHeadDim, 0));
    return request;
  }

  grpc::Status WideMean(const std::string& id, const Floats& values, Floats* means) {
    v1::StepResponse response;
    const grpc::Status status = Step(WideStep(id, values), &response);
    if (status.ok()) *means = ToFloats(response.out());
    return status;
  }
  Floats WideMean(const std::string& id, const Floats& values) {
    Floats means;
    const grpc::Status status = WideMean(id, values, &means);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return means;
  }

  // One token each, of its number, until `series` is no longer 0: what fits and one more.
  std::vector<std::string> FillUntil(const std::string& series) {
    std::vector<std::string> ids;
    while (Metric(series) == 0 && ids.size() < 100) {
      ids.push_back(Create(WideConfig()));
      EXPECT_EQ(WideMean(ids.back(), {static_cast<float>(ids.size())}), Floats({static_cast<float>(ids.size())}));
    }
    EXPECT_EQ(Metric(series), 1);
    return ids;
  }

  grpc::Status Fork(const std::string& id, std::string* child) {
    grpc::ClientContext context;
    v1::ForkSessionRequest request;
    request.set_session_id(id);
    v1::Session session;
    const grpc::Status status = stub_->ForkSession(&context, request, &session);
    *child = session.session_id();
    return status;
  }

  double Snapshots(absl::string_view op) {
    return Metric(absl::StrCat("attnd_snapshot_duration_seconds_count{op=\"", op, "\"}"));
  }
  double SnapshotBytes(absl::string_view op) {
    return Metric(absl::StrCat("attnd_snapshot_bytes_total{op=\"", op, "\"}"));
  }
  double Failures(absl::string_view op) {
    return Metric(absl::StrCat("attnd_snapshot_failures_total{op=\"", op, "\"}"));
  }
  double Created(absl::string_view origin) {
    return Metric(absl::StrCat("attnd_sessions_created_total{origin=\"", origin, "\"}"));
  }
  double Ended(absl::string_view reason) {
    return Metric(absl::StrCat("attnd_sessions_closed_total{reason=\"", reason, "\"}"));
  }

  void ExpectEmptyCache() {
    for (const char* gauge : {"used", "reserved", "shared", "spilled"}) {
      EXPECT_TRUE(WaitForMetric(absl::StrCat("attnd_kv_cache_", gauge, "_bytes"), 0)) << gauge;
    }
    EXPECT_EQ(Metric("attnd_kv_cache_tokens"), 0);
    EXPECT_EQ(Metric("attnd_sessions_active"), 0);
    EXPECT_EQ(Metric("attnd_sessions_spilled"), 0);
  }

  Folder folder_;
};

constexpr char kDropped[] = "attnd_kv_cache_evictions_total{reason=\"dropped\"}";
constexpr char kSpilled[] = "attnd_kv_cache_evictions_total{reason=\"spilled\"}";

TEST_F(RoomTest, ASpillAndARestoreAreCountedOnce) {
  StartServer(RoomOptions(folder_ / "spill"));
  const std::vector<std::string> ids = FillUntil(kSpilled);
  const auto sessions = static_cast<double>(ids.size());
  const auto file = static_cast<double>(std::filesystem::file_size(folder_ / ("spill/" + ids[0] + ".attnd")));
  EXPECT_EQ(Get(ids[0]).spilled_bytes(), file);
  EXPECT_EQ(Get(ids[0]).used_bytes(), 0);
  EXPECT_EQ(Metric("attnd_sessions_spilled"), 1);
  EXPECT_EQ(Metric("attnd_kv_cache_spilled_bytes"), file);
  EXPECT_EQ(Snapshots("spill"), 1);
  EXPECT_EQ(SnapshotBytes("spill"), file);
  EXPECT_EQ(Snapshots("restore"), 0);
  EXPECT_EQ(Metric("attnd_sessions_active"), sessions) << "it is open all the same";

  EXPECT_EQ(WideMean(ids[0], {3}), Floats({2})) << "another makes room for it";
  EXPECT_EQ(Snapshots("restore"), 1);
  EXPECT_EQ(SnapshotBytes("restore"), file);
  EXPECT_EQ(Snapshots("spill"), 2);
  EXPECT_EQ(Metric(kSpilled), 2);
  EXPECT_EQ(Metric("attnd_sessions_spilled"), 1);
  EXPECT_EQ(Get(ids[0]).spilled_bytes(), 0);
  EXPECT_EQ(CountSnapshots(folder_ / "spill"), 1);

  EXPECT_EQ(Created("create"), sessions);
  EXPECT_EQ(Created("restore"), 0) << "that is for sessions of an earlier process";
  for (const std::string& id : ids) EXPECT_TRUE(Close(id).ok());
  EXPECT_EQ(Ended("closed"), sessions);
  EXPECT_EQ(Ended("evicted"), 0);
  EXPECT_EQ(Metric(kDropped), 0);
  for (const char* op : {"export", "import", "spill", "restore", "drain"}) EXPECT_EQ(Failures(op), 0) << op;
  ExpectEmptyCache();
  EXPECT_EQ(CountSnapshots(folder_ / "spill"), 0);
}

TEST_F(RoomTest, ADroppedSessionIsCountedOnceAndItsClientIsTold) {
  StartServer(RoomOptions(""));
  const std::vector<std::string> ids = FillUntil(kDropped);
  EXPECT_EQ(Metric("attnd_sessions_active"), static_cast<double>(ids.size()) - 1);
  EXPECT_EQ(Ended("evicted"), 1);
  EXPECT_EQ(ReasonOf(MeanError(ids[0], {1})), "EVICTED");
  EXPECT_EQ(Metric("attnd_rejected_total{reason=\"EVICTED\"}"), 1);
  EXPECT_EQ(Metric(kSpilled), 0);
  EXPECT_EQ(Snapshots("spill"), 0);
  for (size_t i = 1; i < ids.size(); ++i) EXPECT_TRUE(Close(ids[i]).ok());
  EXPECT_TRUE(Close(ids[0]).ok()) << "closing what was evicted is no error";
  EXPECT_EQ(Ended("closed"), static_cast<double>(ids.size()) - 1);
  ExpectEmptyCache();
}

TEST_F(RoomTest, S14_SharedBlocksAreCountedOnceAndForksAreCreatedSessions) {
  StartServer(RoomOptions(""));
  const std::string parent = Create(WideConfig());
  WideMean(parent, Floats(10, 4));
  const double block = Metric("attnd_kv_cache_used_bytes");
  EXPECT_EQ(Metric("attnd_kv_cache_shared_bytes"), 0);
  std::vector<std::string> children(3);
  for (std::string& child : children) ASSERT_TRUE(Fork(parent, &child).ok());
  EXPECT_EQ(Created("fork"), 3);
  EXPECT_EQ(Created("create"), 1);
  EXPECT_EQ(Metric("attnd_kv_cache_used_bytes"), block);
  EXPECT_EQ(Metric("attnd_kv_cache_shared_bytes"), block);
  EXPECT_EQ(Metric("attnd_kv_cache_tokens"), 40);
  EXPECT_EQ(WideMean(children[0], {15}), Floats({5}));
  EXPECT_EQ(Metric("attnd_kv_cache_used_bytes"), 2 * block) << "its own copy of the block that it appends to";
  EXPECT_EQ(Metric("attnd_kv_cache_shared_bytes"), block);
  EXPECT_TRUE(Close(parent).ok());
  EXPECT_TRUE(Close(children[1]).ok());
  EXPECT_EQ(Metric("attnd_kv_cache_shared_bytes"), 0);
  EXPECT_EQ(Metric("attnd_kv_cache_used_bytes"), 2 * block);
  EXPECT_EQ(WideMean(children[2], {15}), Floats({5}));
  for (const int left : {0, 2}) EXPECT_TRUE(Close(children[left]).ok());
  EXPECT_EQ(Ended("closed"), 4);
  ExpectEmptyCache();
}

TEST_F(RoomTest, ADamagedFileIsOneLostSession) {
  StartServer(RoomOptions(folder_ / "spill"));
  const std::vector<std::string> ids = FillUntil(kSpilled);
  FlipBit(folder_ / ("spill/" + ids[0] + ".attnd"), 100);
  v1::StepResponse response;
  const grpc::Status status = Step(WideStep(ids[0], {1}), &response);
  EXPECT_EQ(status.error_code(), StatusCode::DATA_LOSS);
  EXPECT_EQ(ReasonOf(status), "SPILL_DAMAGED");
  EXPECT_EQ(Ended("lost"), 1);
  EXPECT_EQ(Failures("restore"), 1);
  EXPECT_EQ(Snapshots("restore"), 0);
  EXPECT_EQ(Metric("attnd_sessions_active"), static_cast<double>(ids.size()) - 1);
  EXPECT_EQ(Metric("attnd_rejected_total{reason=\"SPILL_DAMAGED\"}"), 1);
  for (size_t i = 1; i < ids.size(); ++i) {
    EXPECT_EQ(WideMean(ids[i], {static_cast<float>(i + 3)}), Floats({static_cast<float>(i + 2)})) << i;
  }
  for (size_t i = 1; i < ids.size(); ++i) EXPECT_TRUE(Close(ids[i]).ok());
  ExpectEmptyCache();
}

TEST_F(RoomTest, AFullDiskIsCountedAndCostsNoSession) {
  const std::string disk = folder_.SmallDisk();
  if (disk.empty()) GTEST_SKIP() << "needs the right to mount";
  StartServer(RoomOptions(disk));
  EXPECT_EQ(Metric("attnd_spill_disk_size_bytes"), 1 << 20);
  EXPECT_GT(Metric("attnd_spill_disk_available_bytes"), 900 << 10);
  std::vector<char> ballast(1 << 20, 'x');
  std::ofstream(disk + "/ballast", std::ios::binary).write(ballast.data(), ballast.size());
  EXPECT_EQ(Metric("attnd_spill_disk_available_bytes"), 0);
  EXPECT_EQ(Metric("attnd_kv_cache_eviction_enabled"), 1);
  std::vector<std::string> ids;
  Floats mean;
  grpc::Status status;
  while (status.ok() && ids.size() < 100) {
    ids.push_back(Create(WideConfig()));
    status = WideMean(ids.back(), {1}, &mean);
  }
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonOf(status), "CACHE_FULL");
  EXPECT_TRUE(HasRetryInfo(status));
  EXPECT_NE(status.error_message().find("No space left on device"), std::string::npos) << status.error_message();
  EXPECT_GE(Failures("spill"), 1);
  EXPECT_EQ(Snapshots("spill"), 0);
  EXPECT_EQ(Metric(kSpilled), 0);
  EXPECT_EQ(Metric("attnd_sessions_spilled"), 0);
  for (size_t i = 0; i + 1 < ids.size(); ++i) EXPECT_EQ(WideMean(ids[i], {3}), Floats({2})) << i;
  // As soon as the disk takes it, the step that was refused is served.
  std::filesystem::remove(disk + "/ballast");
  EXPECT_TRUE(Eventually([&] { return WideMean(ids.back(), {1}, &mean).ok(); }));
  EXPECT_EQ(Metric(kSpilled), 1);
}

TEST_F(RoomTest, ExportsAndImportsAreCountedAndAnImportFindsRoom) {
  StartServer(RoomOptions(folder_ / "spill"));
  const std::string id = Create(WideConfig());
  WideMean(id, {1, 2, 3});
  std::string bytes;
  {
    grpc::ClientContext context;
    v1::ExportSessionRequest request;
    request.set_session_id(id);
    const auto stream = stub_->ExportSession(&context, request);
    v1::ExportSessionResponse response;
    while (stream->Read(&response)) bytes += response.data();
    ASSERT_TRUE(stream->Finish().ok());
  }
  EXPECT_TRUE(Eventually([&] { return Snapshots("export") == 1; }));
  EXPECT_EQ(SnapshotBytes("export"), static_cast<double>(bytes.size()));
  EXPECT_TRUE(WaitForMetric("attnd_kv_cache_shared_bytes", 0)) << "held while it is exported";
  const auto import = [&](const std::string& data, v1::Session* session) {
    grpc::ClientContext context;
    const auto stream = stub_->ImportSession(&context, session);
    v1::ImportSessionRequest request;
    request.set_data(data);
    stream->Write(request);
    stream->WritesDone();
    return stream->Finish();
  };
  std::string damaged = bytes;
  damaged[damaged.size() / 2] ^= 1;
  v1::Session session;
  EXPECT_EQ(ReasonOf(import(damaged, &session)), "BAD_SNAPSHOT");
  EXPECT_EQ(Failures("import"), 1);
  EXPECT_EQ(Created("import"), 0);
  EXPECT_EQ(Metric("attnd_rejected_total{reason=\"BAD_SNAPSHOT\"}"), 1);
  FillUntil(kSpilled);
  grpc::Status status;
  EXPECT_TRUE(Eventually([&] {
    status = import(bytes, &session);
    return status.ok() || ReasonOf(status) != "CACHE_FULL";
  })) << "the cache is full and idle sessions can leave it";
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(WideMean(session.session_id(), {6}), Floats({3}));
  EXPECT_EQ(Created("import"), 1);
  EXPECT_EQ(Snapshots("import"), 1);
  EXPECT_EQ(SnapshotBytes("import"), static_cast<double>(bytes.size()));
}

// What a client thread knows of its sessions.
struct Twin {
  std::string id;
  double sum = 0;
  int length = 0;
};

TEST_F(RoomTest, TheInvariantsHoldAtEveryScrapeWhileSessionsComeGoForkAndMove) {
  StartServer(RoomOptions(folder_ / "spill"));
  std::atomic<bool> stop{false};
  int64_t scrapes = 0;
  std::thread scraper([&] {
    std::map<std::string, double> last;
    for (; !stop.load(); ++scrapes, absl::SleepFor(absl::Milliseconds(3))) {
      const std::map<std::string, double> now = AllMetrics();
      EXPECT_LE(now.at("attnd_kv_cache_used_bytes"), now.at("attnd_kv_cache_reserved_bytes"));
      EXPECT_LE(now.at("attnd_kv_cache_reserved_bytes"), now.at("attnd_kv_cache_capacity_bytes"));
      EXPECT_LE(now.at("attnd_kv_cache_shared_bytes"), now.at("attnd_kv_cache_capacity_bytes"));
      for (const char* gauge : {"attnd_kv_cache_shared_bytes", "attnd_kv_cache_spilled_bytes", "attnd_sessions_spilled",
                                "attnd_sessions_active", "attnd_kv_cache_tokens"}) {
        EXPECT_GE(now.at(gauge), 0) << gauge;
      }
      for (const auto& [series, value] : now) {
        if (series.find("_total") == std::string::npos || last.empty()) continue;
        EXPECT_GE(value, last.at(series)) << series;
      }
      last = now;
    }
  });
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::vector<std::thread> clients;
  for (int client = 0; client < 4; ++client) {
    clients.emplace_back([&, client] {
      std::mt19937 random(seed + client);
      std::vector<Twin> twins;
      for (int i = 0; i < 150; ++i) {
        const unsigned what = random() % 10;
        if (twins.size() < 8 && (what == 0 || twins.empty())) {
          twins.push_back({.id = Create(WideConfig())});
          continue;
        }
        const size_t at = random() % twins.size();
        if (what == 1) {
          EXPECT_TRUE(Close(twins[at].id).ok());
          twins.erase(twins.begin() + static_cast<std::ptrdiff_t>(at));
          continue;
        }
        if (what <= 3 && twins.size() < 8) {
          Twin child = twins[at];
          const grpc::Status status = Fork(twins[at].id, &child.id);
          if (status.ok()) twins.push_back(child);
          EXPECT_TRUE(status.ok() || ReasonOf(status) == "CACHE_FULL") << status.error_message();
          continue;
        }
        const Floats values(1 + random() % 40, static_cast<float>(random() % 100));
        Floats means;
        const grpc::Status status = WideMean(twins[at].id, values, &means);
        if (!status.ok()) {
          EXPECT_EQ(ReasonOf(status), "CACHE_FULL") << status.error_message();
          continue;
        }
        for (const float value : values) twins[at].sum += value;
        twins[at].length += static_cast<int>(values.size());
        EXPECT_NEAR(means.back(), twins[at].sum / twins[at].length, 1e-3);
      }
      for (const Twin& twin : twins) EXPECT_TRUE(Close(twin.id).ok());
    });
  }
  for (std::thread& client : clients) client.join();
  stop.store(true);
  scraper.join();
  EXPECT_GT(scrapes, 10);
  EXPECT_GT(Metric(kSpilled), 10) << "or nothing was tried";
  EXPECT_GT(Snapshots("restore"), 5);
  EXPECT_GT(Created("fork"), 5);
  EXPECT_EQ(Metric(kDropped), 0);
  EXPECT_EQ(Ended("closed"), Created("create") + Created("fork"));
  EXPECT_EQ(Ended("lost") + Ended("evicted") + Ended("expired"), 0);
  ExpectEmptyCache();
  EXPECT_TRUE(Eventually([&] { return CountSnapshots(folder_ / "spill") == 0; }));
}

}  // namespace
}  // namespace attnd::testing
