// attnd_bench from outside: what its rows say, what it refuses. Nothing here depends on how fast anything is.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

namespace attnd::bench {
namespace {

using ::testing::ElementsAre;
using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

struct Outcome {
  int status = -1;
  std::string out, err;
};

Outcome RunBench(const std::string& arguments) {
  const std::string err_path = ::testing::TempDir() + "/attnd_bench_" + std::to_string(getpid()) + ".err";
  Outcome outcome;
  std::FILE* pipe = popen((ATTND_BENCH_PROGRAM " " + arguments + " 2>" + err_path).c_str(), "r");
  if (pipe == nullptr) return outcome;
  char buffer[4096];
  while (const size_t count = std::fread(buffer, 1, sizeof(buffer), pipe)) outcome.out.append(buffer, count);
  const int status = pclose(pipe);
  outcome.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  std::stringstream err;
  err << std::ifstream(err_path).rdbuf();
  outcome.err = err.str();
  unlink(err_path.c_str());
  return outcome;
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// A flat JSON object of numbers and of strings without escapes; strings keep their quotes.
class JsonRow {
 public:
  explicit JsonRow(const std::string& line) {
    EXPECT_TRUE(line.size() > 2 && line.front() == '{' && line.back() == '}') << line;
    // The words that are printed hold no comma.
    std::istringstream members(line.substr(1, line.size() - 2));
    for (std::string member; std::getline(members >> std::ws, member, ',');) {
      const size_t colon = member.find("\": ");
      if (member.empty() || member.front() != '"' || colon == std::string::npos) {
        ADD_FAILURE() << "'" << member << "' is no member of an object";
        continue;
      }
      EXPECT_TRUE(values_.emplace(member.substr(1, colon - 1), member.substr(colon + 3)).second) << "twice: " << member;
    }
  }
  bool Has(const std::string& key) const { return values_.count(key) > 0; }
  std::string Word(const std::string& key) const {
    const std::string value = Has(key) ? values_.at(key) : "";
    EXPECT_TRUE(value.size() >= 2 && value.front() == '"' && value.back() == '"') << key << ": " << value;
    return value.size() >= 2 ? value.substr(1, value.size() - 2) : value;
  }
  double Number(const std::string& key) const {
    size_t used = 0;
    const std::string value = Has(key) ? values_.at(key) : "";
    const double number = value.empty() || value[0] == '"' ? NAN : std::stod(value, &used);
    EXPECT_TRUE(std::isfinite(number) && used == value.size()) << key << ": '" << value << "'";
    return number;
  }
  // What the row divided by its median time: GB or GFLOP, steps.
  double Amount() const { return Number("value") * Number("median_us") * 1e-6; }

 private:
  std::map<std::string, std::string> values_;
};

// The rows of a run that must succeed, each looked at for what every row has.
std::vector<JsonRow> Rows(const std::string& arguments) {
  SCOPED_TRACE(arguments);
  const Outcome outcome = RunBench(arguments + " --seconds=0.02 --json");
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  EXPECT_EQ(outcome.err, "");
  std::vector<JsonRow> rows;
  for (const std::string& line : Lines(outcome.out)) {
    SCOPED_TRACE(line);
    const JsonRow& row = rows.emplace_back(line);
    for (const char* key : {"name", "shape", "kv", "unit", "bound", "resident"}) EXPECT_NE(row.Word(key), "") << key;
    for (const char* key : {"tokens", "threads", "batch", "queries", "median_us", "value", "roof", "ratio"}) {
      EXPECT_GT(row.Number(key), 0) << key;
    }
    for (const char* key : {"history", "shared"}) EXPECT_GE(row.Number(key), 0) << key;
    EXPECT_NEAR(row.Number("ratio"), row.Number("value") / row.Number("roof"), 0.01 * row.Number("ratio") + 0.001);
  }
  return rows;
}

std::vector<std::string> Words(const std::vector<JsonRow>& rows, const std::string& key) {
  std::vector<std::string> words;
  for (const JsonRow& row : rows) words.push_back(row.Word(key));
  return words;
}

std::vector<double> Numbers(const std::vector<JsonRow>& rows, const std::string& key) {
  std::vector<double> numbers;
  for (const JsonRow& row : rows) numbers.push_back(row.Number(key));
  return numbers;
}

// value and median_us are printed with three and two digits.
constexpr double kRounding = 0.02;
// Bytes of a block of smollm2-135m (3 kv heads of 64) in f32, K and V.
constexpr double kBlock = 2.0 * 64 * 64 * 4;

TEST(Bench, EveryCombinationIsARowThreadsInnermost) {
  const std::vector<JsonRow> rows =
      Rows("decode --shape=smollm2-135m --kv=f32,int8 --tokens=64,200 --threads=1,2 --layers=2");
  EXPECT_THAT(Numbers(rows, "tokens"), ElementsAre(64, 64, 64, 64, 200, 200, 200, 200));
  EXPECT_THAT(Words(rows, "kv"), ElementsAre("f32", "f32", "int8", "int8", "f32", "f32", "int8", "int8"));
  EXPECT_THAT(Numbers(rows, "threads"), ElementsAre(1, 2, 1, 2, 1, 2, 1, 2));
}

TEST(Bench, DecodeCountsEveryBlockOfEverySequence) {
  const std::vector<JsonRow> rows =
      Rows("decode --shape=smollm2-135m --tokens=2048 --batch=2 --queries=1,4 --layers=2");
  ASSERT_EQ(rows.size(), 2u);
  for (const JsonRow& row : rows) {
    EXPECT_EQ(row.Word("unit"), "GB/s");
    EXPECT_THAT(row.Word("bound"), ::testing::AnyOf("read", "multiply"));
    EXPECT_NEAR(row.Amount(), 2 * 3 * 32 * kBlock / 1e9, kRounding * row.Amount());
    EXPECT_GT(row.Number("read_gbs"), 0);
    EXPECT_GT(row.Number("multiply_gflops"), 0);
  }
}

TEST(Bench, ForkCountsSharedBlocksOnce) {
  const std::vector<JsonRow> rows =
      Rows("fork --shape=smollm2-135m --tokens=2000 --batch=4 --shared=1000,2000 --layers=2");
  ASSERT_EQ(rows.size(), 2u);
  // A prefix of 1000 tokens is 15 whole blocks, one of 2000 is 31; a sequence has 32.
  EXPECT_THAT(Numbers(rows, "shared"), ElementsAre(15 * 64, 31 * 64));
  EXPECT_NEAR(rows[0].Amount(), 3 * (15 + 4 * 17) * kBlock / 1e9, kRounding * rows[0].Amount());
  EXPECT_NEAR(rows[1].Amount(), 3 * (31 + 4 * 1) * kBlock / 1e9, kRounding * rows[1].Amount());
}

TEST(Bench, PrefillCountsTheProductsThatCausalityAllows) {
  const std::vector<JsonRow> rows = Rows("prefill --heads=6/2 --head_dim=64 --tokens=256 --history=0,512");
  ASSERT_EQ(rows.size(), 2u);
  const double per_pair = 4.0 * 6 * 64 / 1e9;
  EXPECT_EQ(rows[0].Word("shape"), "6/2x64");
  EXPECT_EQ(rows[0].Word("unit"), "GFLOP/s");
  EXPECT_NEAR(rows[0].Amount(), per_pair * 256 * 257 / 2, kRounding * rows[0].Amount());
  EXPECT_NEAR(rows[1].Amount(), per_pair * (256 * 512 + 256 * 257 / 2), kRounding * rows[1].Amount());
}

TEST(Bench, BackwardCountsFiveProducts) {
  const std::vector<JsonRow> rows = Rows("backward --heads=6/2 --head_dim=64 --tokens=128 --history=64 --batch=2");
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0].Word("bound"), "multiply");
  const double pairs = 128 * 64 + 128 * 129 / 2;
  EXPECT_NEAR(rows[0].Amount(), 2 * 10.0 * 6 * 64 * pairs / 1e9, kRounding * rows[0].Amount());
}

TEST(Bench, AppendCountsWhatIsReadAndWhatIsWritten) {
  const std::vector<JsonRow> rows = Rows("append --shape=smollm2-135m --kv=f16 --tokens=1024 --step=64,8 --layers=2");
  EXPECT_THAT(Words(rows, "name"), ElementsAre("append/64", "append/8", "append/64", "append/8"));
  EXPECT_THAT(Words(rows, "source"), ElementsAre("f32", "f32", "f16", "f16"));
  const double elements = 2.0 * 1024 * 3 * 64;
  for (const JsonRow& row : rows) {
    EXPECT_EQ(row.Word("bound"), "copy");
    const double bytes = elements * ((row.Word("source") == "f32" ? 4 : 2) + 2);
    EXPECT_NEAR(row.Amount(), bytes / 1e9, kRounding * row.Amount());
  }
}

TEST(Bench, ScalingHasARowForEachNumberOfThreads) {
  const std::vector<JsonRow> rows = Rows("scaling --shape=smollm2-135m --of=decode,prefill --tokens=128 --threads=3");
  EXPECT_THAT(Words(rows, "name"), ElementsAre("scaling/decode", "scaling/decode", "scaling/decode", "scaling/prefill",
                                               "scaling/prefill", "scaling/prefill"));
  EXPECT_THAT(Numbers(rows, "threads"), ElementsAre(1, 2, 3, 1, 2, 3));
  for (const JsonRow& row : rows) {
    EXPECT_GT(row.Number("speedup"), 0);
    EXPECT_GT(row.Number("roof_speedup"), 0);
  }
  EXPECT_EQ(rows[0].Number("speedup"), 1);
}

TEST(Bench, SessionsCountReferencesToBlocks) {
  const std::vector<JsonRow> rows = Rows("sessions --shape=smollm2-135m --tokens=1000 --layers=5 --batch=3");
  EXPECT_THAT(Words(rows, "name"), ElementsAre("session_fork", "beam_reorder"));
  EXPECT_THAT(Numbers(rows, "batch"), ElementsAre(1, 3));
  EXPECT_THAT(Numbers(rows, "references"), ElementsAre(5 * 3 * 16, 3 * 5 * 3 * 16));
  for (const JsonRow& row : rows) {
    EXPECT_EQ(row.Word("bound"), "touch");
    EXPECT_NEAR(row.Amount() * 1e6, row.Number("references"), 0.2 * row.Number("references"));
  }
}

TEST(Bench, StorageStandsBesidePlainFiles) {
  const std::vector<JsonRow> rows = Rows("storage --shape=smollm2-135m --tokens=100 --layers=2");
  EXPECT_THAT(Words(rows, "name"), ElementsAre("spill", "save_synced", "restore", "restore_cold"));
  EXPECT_THAT(Words(rows, "bound"), ElementsAre("write", "write", "read", "read"));
  for (const JsonRow& row : rows) {
    EXPECT_NEAR(row.Number("megabytes"), 2 * 3 * 2 * 64 * 2 * 64 * 4 / 1e6, 0.02);
  }
  const Outcome refused = RunBench("storage --directory=/nowhere --tokens=64 --layers=1");
  EXPECT_EQ(refused.status, 1);
  EXPECT_NE(refused.err.find("/nowhere"), std::string::npos) << refused.err;
}

TEST(Bench, CommandsOfTheSuiteAreAllRight) {
  const Outcome listed = RunBench("suite --list");
  EXPECT_EQ(listed.status, 0) << listed.err;
  const std::vector<std::string> commands = Lines(listed.out);
  EXPECT_GE(commands.size(), 10u);
  for (const std::string& command : commands) {
    const std::string arguments = command.substr(command.find(' ') + 1);
    if (arguments.rfind("rpc", 0) == 0 || arguments.rfind("serve", 0) == 0) continue;  // have tests of their own
    const bool prefill = arguments.find("prefill") != std::string::npos;
    // What comes later counts: small enough for a test.
    Rows(arguments + " --tokens=64 --layers=1" + (prefill && arguments[0] == 'p' ? " --history=64" : ""));
  }
}

#ifdef ATTND_BENCH_RPC
TEST(Bench, RpcStandsBesideItsEcho) {
  const std::vector<JsonRow> rows = Rows("rpc --shape=smollm2-135m --tokens=64 --kv=f32,bf16 --threads=1");
  const std::vector<std::string> names = {"rpc_unary",  "overhead_unary",  "client_unary",  "echo_unary",
                                          "rpc_stream", "overhead_stream", "client_stream", "echo_stream"};
  std::vector<std::string> twice = names;
  twice.insert(twice.end(), names.begin(), names.end());
  EXPECT_THAT(Words(rows, "name"), ElementsAreArray(twice));
  EXPECT_EQ(rows[3].Number("ratio"), 1);
}
#endif

#ifdef ATTND_BENCH_RPC
TEST(Bench, ServeStandsBesideTheKernel) {
  const std::vector<JsonRow> rows = Rows("serve --heads=2/1 --head_dim=16 --tokens=64 --batch=3 --threads=1");
  EXPECT_THAT(Words(rows, "name"), ElementsAre("serve", "decode_idle", "decode_and_prefill"));
  EXPECT_GT(rows[0].Number("roof"), 0);
  EXPECT_GT(rows[2].Number("prefill_tokens_s"), 0);
}
#endif

TEST(Bench, BadArgumentsAreRefusedByName) {
  const std::map<std::string, std::vector<std::string>> bad = {
      {"decode --kv=f32,f64", {"--kv", "'f64'"}},
      {"decode --tokens=128,12x", {"--tokens", "'12x'"}},
      {"decode --tokens=", {"--tokens", "''"}},
      {"decode --tokens", {"--tokens", "''"}},
      {"decode --batch=0", {"--batch", "'0'"}},
      {"decode --heads=7/2", {"--heads", "'7/2'"}},
      {"decode --heads=8", {"--heads", "'8'"}},
      {"decode --head_dim=64", {"--head_dim", "--heads"}},
      {"decode --heads=8/2 --head_dim=257", {"--head_dim", "'257'"}},
      {"decode --resident=disk", {"--resident", "'disk'"}},
      {"decode --seconds=nan", {"--seconds", "'nan'"}},
      {"decode --json=yes", {"--json", "'yes'"}},
      {"decode --step=4", {"--step", "decode"}},
      {"decode --colour=red", {"--colour"}},
      {"decode tokens=64", {"tokens"}},
      {"suite --tokens=64", {"--tokens", "suite"}},
      {"encode", {"'encode'"}},
      {"", {"usage"}},
  };
  for (const auto& [arguments, named] : bad) {
    SCOPED_TRACE(arguments);
    const Outcome outcome = RunBench(arguments);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_EQ(outcome.out, "");
    for (const std::string& word : named) EXPECT_THAT(outcome.err, HasSubstr(word));
  }
}

TEST(Bench, WhatCannotBeMeasuredIsNamedAndTheRestIsMeasured) {
  const Outcome outcome =
      RunBench("decode --shape=smollm2-135m --tokens=64,10000000 --queries=1,64 --layers=1 --seconds=0.02 --json");
  EXPECT_EQ(outcome.status, 1);
  EXPECT_THAT(outcome.err, HasSubstr("T=10000000"));
  EXPECT_THAT(outcome.err, HasSubstr("4 GiB"));
  EXPECT_EQ(Lines(outcome.out).size(), 2u);
}

TEST(Bench, HelpNamesEveryMode) {
  for (const char* arguments : {"--help", "decode --help"}) {
    const Outcome outcome = RunBench(arguments);
    EXPECT_EQ(outcome.status, 0);
    EXPECT_EQ(outcome.err, "");
    for (const char* word : {"decode", "fork", "prefill", "backward", "append", "scaling", "sessions", "storage",
                             "suite", "--resident", "llama3-8b"}) {
      EXPECT_THAT(outcome.out, HasSubstr(word));
    }
  }
}

}  // namespace
}  // namespace attnd::bench
