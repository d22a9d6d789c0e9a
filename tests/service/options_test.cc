// Options, log lines and tokens: what needs no server.
#include "server/options.h"

#include <gtest/gtest.h>

#include "server/log.h"
#include "server/rpc/auth.h"

namespace attnd {
namespace {

TEST(ParseBytesTest, UnitsAndFractions) {
  EXPECT_EQ(*ParseBytes("0"), 0);
  EXPECT_EQ(*ParseBytes("536870912"), 536870912);
  EXPECT_EQ(*ParseBytes("64MiB"), 64 << 20);
  EXPECT_EQ(*ParseBytes("4GiB"), int64_t{4} << 30);
  EXPECT_EQ(*ParseBytes("4 gib"), int64_t{4} << 30);
  EXPECT_EQ(*ParseBytes("1.5G"), int64_t{3} << 29);
  EXPECT_EQ(*ParseBytes("2GB"), 2'000'000'000);
  EXPECT_EQ(*ParseBytes("1TiB"), int64_t{1} << 40);
}

TEST(ParseBytesTest, RefusesWhatIsNoCount) {
  for (const char* text : {"", "GiB", "-1", "4Q", "1..5G", "4GiB more", "0x10", "99999999999999999999", "9000000TiB"}) {
    EXPECT_FALSE(ParseBytes(text).ok()) << text;
  }
}

TEST(ParseBytesTest, FormatIsParsedBack) {
  for (const int64_t bytes : {int64_t{1}, int64_t{1000}, int64_t{1024}, int64_t{64} << 20, (int64_t{3} << 30) + 1}) {
    EXPECT_EQ(*ParseBytes(FormatBytes(bytes)), bytes);
  }
  EXPECT_EQ(FormatBytes(int64_t{4} << 30), "4GiB");
}

TEST(ResolveOptionsTest, FillsInThisMachinesValues) {
  const absl::StatusOr<Options> options = ResolveOptions(Options());
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_GE(options->compute_threads, 1);
  EXPECT_GT(options->kv_cache_bytes, int64_t{1} << 20);
  EXPECT_GE(options->max_connections, 16);
  EXPECT_LE(options->max_connections, 4096);
  EXPECT_GE(options->max_inflight_bytes, 2 * options->max_message_bytes);
}

TEST(ResolveOptionsTest, NamesTheFlagThatIsWrong) {
  const auto message = [](const Options& options) { return std::string(ResolveOptions(options).status().message()); };
  Options options;
  options.kv_cache_bytes = 1;
  EXPECT_NE(message(options).find("--kv_cache_bytes"), std::string::npos);
  options = Options();
  options.compute_threads = -1;
  EXPECT_NE(message(options).find("--compute_threads is -1"), std::string::npos);
  options = Options();
  options.tls_cert = "cert.pem";
  EXPECT_NE(message(options).find("--tls_key"), std::string::npos);
  options = Options();
  options.max_message_bytes = int64_t{3} << 30;
  EXPECT_NE(message(options).find("--max_message_bytes"), std::string::npos);
  options = Options();
  options.max_connections = 1 << 30;
  EXPECT_NE(message(options).find("--max_connections is 1073741824"), std::string::npos) << message(options);
  EXPECT_NE(message(options).find("ulimit -n"), std::string::npos);
  options = Options();
  options.max_streams = 0;
  EXPECT_NE(message(options).find("--max_streams is 0"), std::string::npos) << message(options);
  options = Options();
  options.max_queue_requests = -1;
  EXPECT_NE(message(options).find("--max_queue_requests is -1"), std::string::npos) << message(options);
  options = Options();
  options.max_queue_delay = absl::ZeroDuration();
  EXPECT_NE(message(options).find("--max_queue_delay"), std::string::npos) << message(options);
  options = Options();
  options.session_idle_ttl = absl::ZeroDuration();
  EXPECT_NE(message(options).find("--session_idle_ttl"), std::string::npos);
}

TEST(ResolveOptionsTest, WhereSessionsGoWhenMemoryIsShort) {
  const auto message = [](absl::string_view eviction, absl::string_view spill_dir, absl::string_view restore,
                          absl::string_view snapshot_on_drain) {
    Options options;
    options.eviction = std::string(eviction);
    options.spill_dir = std::string(spill_dir);
    options.restore = std::string(restore);
    options.snapshot_on_drain = std::string(snapshot_on_drain);
    const absl::Status status = ResolveOptions(options).status();
    EXPECT_TRUE(status.ok() || absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(message("fifo", "", "", ""), "--eviction is 'fifo', but must be none or lru");
  EXPECT_EQ(message("", "", "", ""), "--eviction is '', but must be none or lru");
  EXPECT_EQ(message("LRU", "", "", ""), "--eviction is 'LRU', but must be none or lru");
  EXPECT_EQ(message("none", "/spill", "", ""), "--spill_dir is '/spill', which needs --eviction=lru");
  EXPECT_EQ(message("lru", "/one", "/one", ""),
            "--spill_dir and --restore are both '/one', but must be different directories");
  EXPECT_EQ(message("lru", "/one", "", "/one"),
            "--spill_dir and --snapshot_on_drain are both '/one', but must be different directories");
  EXPECT_EQ(message("lru", "", "", ""), "");
  EXPECT_EQ(message("lru", "/spill", "/saved", "/saved"), "");
  EXPECT_EQ(message("none", "", "/old", "/new"), "");
}

// gRPC would serve on 34463 and on 443.
TEST(ResolveOptionsTest, AnAddressWithoutAUsablePortIsRefused) {
  for (const char* listen : {"127.0.0.1:99999", "127.0.0.1", "127.0.0.1:", "127.0.0.1:-1", "127.0.0.1:http", ""}) {
    Options options;
    options.listen = listen;
    const absl::Status status = ResolveOptions(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << listen;
    EXPECT_NE(status.message().find("--listen is"), std::string::npos) << status;
    EXPECT_NE(status.message().find(listen), std::string::npos) << status;
  }
  for (const char* listen : {"127.0.0.1:0", "[::1]:65535", "unix:/tmp/attnd"}) {
    Options options;
    options.listen = listen;
    EXPECT_TRUE(ResolveOptions(options).ok()) << listen;
  }
}

TEST(LogTest, ValuesAreQuotedWhereNeeded) {
  const absl::Time time = absl::FromUnixMillis(1'700'000'000'123);
  EXPECT_EQ(FormatLogLine(time, LogLevel::kWarning, "an event", {{"plain", "a=b"}, {"quoted", "two words\n\"x\""}}),
            "2023-11-14T22:13:20.123Z WARNING an event plain=a=b quoted=\"two words\\n\\\"x\\\"\"");
}

TEST(TokenTableTest, ReadsTokensAndChecksHeaders) {
  const auto table = TokenTable::FromText("# comment\n\n0123456789abcdef\r\n  fedcba9876543210  \n");
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ((*table)->size(), 2u);
  EXPECT_TRUE((*table)->Check("Bearer 0123456789abcdef").ok());
  EXPECT_TRUE((*table)->Check("Bearer fedcba9876543210").ok());
  for (const char* header : {"", "Bearer", "Bearer ", "0123456789abcdef", "Bearer 0123456789abcdee",
                             "Bearer 0123456789abcdef ", "Bearer 0123456789abcde"}) {
    EXPECT_EQ((*table)->Check(header).code(), absl::StatusCode::kUnauthenticated) << header;
  }
}

TEST(TokenTableTest, RefusesFilesThatWouldLetNobodyOrAnybodyIn) {
  EXPECT_FALSE(TokenTable::FromText("").ok());
  EXPECT_FALSE(TokenTable::FromText("# only a comment\n").ok());
  EXPECT_FALSE(TokenTable::FromText("short\n").ok());
  EXPECT_FALSE(TokenTable::FromText("sixteen characters with spaces\n").ok());
  EXPECT_FALSE(TokenTable::FromFile("/nonexistent/tokens").ok());
}

}  // namespace
}  // namespace attnd
