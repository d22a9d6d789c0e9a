// The scheduler, driven by the text files in testdata/: commands, a line of dashes, what is expected. Set
// ATTND_REWRITE=1 to have the expectations rewritten; look at the difference before keeping it.
//
//   limits queue_tokens=N queue_items=N chunk=N scratch=N
//   add ID lanes=A,B tokens=N [prefill] [held] [deadline=SECONDS] [scratch=N] [history=KEYS work_per_key=N]
//   form now=SECONDS [work=N] [cancelled=ID,ID]
//   hold ID | release ID | finish ID
#include "server/engine/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace attnd {
namespace {

struct Command {
  std::string name, id;
  std::map<std::string, std::string> args;
  int64_t Number(const std::string& key, int64_t otherwise) const {
    const auto it = args.find(key);
    int64_t value = otherwise;
    if (it != args.end() && !absl::SimpleAtoi(it->second, &value)) ADD_FAILURE() << "not a number: " << it->second;
    return value;
  }
  std::vector<uint64_t> List(const std::string& key) const {
    std::vector<uint64_t> out;
    const auto it = args.find(key);
    if (it == args.end()) return out;
    for (const absl::string_view word : absl::StrSplit(it->second, ',')) {
      out.emplace_back();
      EXPECT_TRUE(absl::SimpleAtoi(word, &out.back())) << word;
    }
    return out;
  }
};

Command Parse(const std::string& line) {
  Command command;
  for (const absl::string_view word : absl::StrSplit(line, ' ', absl::SkipEmpty())) {
    const std::pair<std::string, std::string> split = absl::StrSplit(word, absl::MaxSplits('=', 1));
    if (command.name.empty()) {
      command.name = std::string(word);
    } else if (split.second.empty() && command.id.empty() && std::isdigit(word[0])) {
      command.id = std::string(word);
    } else {
      command.args[split.first] = split.second;
    }
  }
  return command;
}

class Interpreter {
 public:
  std::string Run(const std::string& line) {
    const Command c = Parse(line);
    std::string out;
    if (c.name == "limits") {
      scheduler_ = std::make_unique<Scheduler>(Scheduler::Limits{c.Number("queue_tokens", 1 << 20),
                                                                 c.Number("queue_items", 1 << 20),
                                                                 c.Number("chunk", 256), c.Number("scratch", 0)});
      return "ok\n";
    }
    uint64_t id = 0;
    EXPECT_TRUE(c.id.empty() || absl::SimpleAtoi(c.id, &id)) << line;
    if (c.name == "add") {
      out = Add(c, id);
    } else if (c.name == "form") {
      out = Form(c);
    } else if (c.name == "finish") {
      scheduler_->Finish(id);
    } else if (c.name == "hold") {
      scheduler_->PutOnHold(id);
    } else if (c.name == "release") {
      scheduler_->Release(id);
    } else {
      return absl::StrCat("unknown command: ", line, "\n");
    }
    return absl::StrCat(out, "queued ", scheduler_->queued_items(), " items, ", scheduler_->queued_tokens(),
                        " tokens\n");
  }

 private:
  std::string Add(const Command& c, uint64_t id) {
    Scheduler::Item item;
    item.id = id;
    item.tokens = c.Number("tokens", 1);
    item.prefill = c.args.count("prefill") > 0;
    item.held = c.args.count("held") > 0;
    for (const uint64_t lane : c.List("lanes")) item.lanes.push_back(lane);
    item.deadline = Time(c.Number("deadline", 1 << 20));
    item.scratch_bytes = c.Number("scratch", 0);
    if (!scheduler_->HasRoom(item.tokens)) return "no room\n";
    costs_[id] = {c.Number("history", 0), static_cast<double>(c.Number("work_per_key", 0))};
    scheduler_->Add(std::move(item));
    return "";
  }

  std::string Form(const Command& c) {
    const std::vector<uint64_t> cancelled = c.List("cancelled");
    const auto is_cancelled = [&](uint64_t id) {
      return std::find(cancelled.begin(), cancelled.end(), id) != cancelled.end();
    };
    const Scheduler::Batch batch =
        scheduler_->Form(Time(c.Number("now", 0)), static_cast<double>(c.Number("work", 1 << 30)),
                         {.is_cancelled = is_cancelled, .cost = [this](uint64_t id) { return costs_.at(id); }});
    std::string out;
    for (const Scheduler::Drop& drop : batch.dropped) {
      absl::StrAppend(&out, "drop ", drop.id, drop.cancelled ? " cancelled\n" : " expired\n");
    }
    for (const Scheduler::Chunk& chunk : batch.chunks) {
      absl::StrAppend(&out, chunk.id, " [", chunk.begin, ", ", chunk.end, ")", chunk.last ? " last\n" : "\n");
    }
    return out.empty() ? "nothing\n" : out;
  }

  static absl::Time Time(int64_t seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

  std::map<uint64_t, Scheduler::Cost> costs_;
  std::unique_ptr<Scheduler> scheduler_ = std::make_unique<Scheduler>(Scheduler::Limits{1 << 20, 1 << 20, 256, 0});
};

// Runs a file and returns it with the expectations replaced by what happened.
std::string Replay(const std::string& text) {
  Interpreter interpreter;
  std::string out;
  std::istringstream in(text);
  std::string line;
  bool in_expectation = false;
  while (std::getline(in, line)) {
    if (line.empty()) in_expectation = false;
    if (in_expectation) continue;
    absl::StrAppend(&out, line, "\n");
    if (line.empty() || line[0] == '#') continue;
    std::string command = line;
    if (!std::getline(in, line) || line != "----") return "expected ---- after: " + command;
    absl::StrAppend(&out, "----\n", interpreter.Run(command));
    in_expectation = true;
  }
  return out;
}

std::string ReadFile(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

TEST(Scheduler, TextFiles) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(ATTND_SCHEDULER_TESTDATA)) {
    const std::string expected = ReadFile(entry.path());
    const std::string actual = Replay(expected);
    if (std::getenv("ATTND_REWRITE") != nullptr) {
      std::ofstream(entry.path()) << actual;
    } else {
      EXPECT_EQ(actual, expected) << entry.path();
    }
    files++;
  }
  EXPECT_GT(files, 0);
}

// Random traffic: lanes stay in order and never overlap, everything comes out once, the queue's counts are right.
TEST(Scheduler, RandomTrafficKeepsItsPromises) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t n) { return random() % n; };
  Scheduler scheduler({1 << 30, 1 << 30, 100, 50});
  struct State {
    std::vector<uint64_t> lanes;
    int64_t tokens = 0, done = 0;
    bool started = false, prefill = false;
  };
  std::map<uint64_t, State> open;
  std::map<uint64_t, std::vector<uint64_t>> order;  // lane -> ids not finished, oldest first
  const auto finish = [&](uint64_t id) {
    for (const uint64_t lane : open[id].lanes) {
      ASSERT_EQ(order[lane].front(), id) << "overtaken in lane " << lane;
      order[lane].erase(order[lane].begin());
    }
    open.erase(id);
  };
  uint64_t next_id = 1, out = 0;
  for (int round = 0; round < 20000 || !open.empty(); round++) {
    ASSERT_LT(round, 100000);
    for (uint64_t n = round < 20000 ? below(3) : 0; n > 0; n--) {
      Scheduler::Item item;
      item.id = next_id++;
      item.prefill = below(4) == 0;
      item.tokens = item.prefill ? 1 + below(300) : 1 + below(3);
      std::set<uint64_t> lanes;
      for (uint64_t k = below(4); k > 0; k--) lanes.insert(below(12));
      if (lanes.empty()) item.scratch_bytes = below(51);
      for (const uint64_t lane : lanes) {
        item.lanes.push_back(lane);
        order[lane].push_back(item.id);
      }
      open[item.id] = {{lanes.begin(), lanes.end()}, item.tokens, 0, false, item.prefill};
      scheduler.Add(std::move(item));
    }
    const auto cost = [&](uint64_t) {
      return Scheduler::Cost{static_cast<int64_t>(below(1000)), static_cast<double>(below(2))};
    };
    const Scheduler::Batch batch =
        scheduler.Form(absl::UnixEpoch(), static_cast<double>(1 + below(100000)),
                       {.is_cancelled = [&](uint64_t) { return below(50) == 0; }, .cost = cost});
    for (const Scheduler::Drop& drop : batch.dropped) finish(drop.id);
    std::set<uint64_t> busy_lanes;
    int64_t queued = static_cast<int64_t>(open.size());
    for (const Scheduler::Chunk& chunk : batch.chunks) {
      State& state = open.at(chunk.id);
      ASSERT_EQ(state.done, chunk.begin);
      ASSERT_LT(chunk.begin, chunk.end);
      state.done = chunk.end;
      state.started = true;
      ASSERT_EQ(chunk.last, chunk.end == state.tokens);
      for (const uint64_t lane : state.lanes) ASSERT_TRUE(busy_lanes.insert(lane).second);
    }
    int64_t prefill_tokens_left = 0;
    for (const auto& [id, state] : open) {
      queued -= state.started;
      if (state.prefill) prefill_tokens_left += state.tokens - state.done;
    }
    ASSERT_EQ(scheduler.prefill_tokens_left(), prefill_tokens_left);
    ASSERT_EQ(scheduler.queued_items(), queued);
    ASSERT_EQ(scheduler.size(), static_cast<int64_t>(open.size()));
    ASSERT_TRUE(open.empty() || !batch.chunks.empty() || !batch.dropped.empty()) << "stuck";
    for (const Scheduler::Chunk& chunk : batch.chunks) {
      if (!chunk.last && below(30) > 0) continue;  // now and then one fails before its end
      scheduler.Finish(chunk.id);
      finish(chunk.id);
      out++;
    }
  }
  EXPECT_EQ(scheduler.queued_tokens(), 0);
  EXPECT_EQ(scheduler.prefill_tokens_left(), 0);
  EXPECT_GT(out, 1000u);
}

}  // namespace
}  // namespace attnd
