#include "client/attnload/scraper.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "client/tool/metrics_page.h"

namespace attnd::attnload {

MetricValues ParseMetrics(const std::string& page) {
  MetricValues values;
  for (absl::string_view line : absl::StrSplit(page, '\n')) {
    if (line.empty() || line[0] == '#') continue;
    const absl::string_view name = line.substr(0, line.find_first_of("{ "));
    if (absl::EndsWith(name, "_bucket")) continue;
    // The value follows the labels, and no label of attnd's holds a brace.
    const size_t labels = line.rfind('}');
    absl::string_view rest = line.substr(labels == absl::string_view::npos ? name.size() : labels + 1);
    const std::vector<absl::string_view> words = absl::StrSplit(rest, ' ', absl::SkipEmpty());
    double value = 0;
    if (words.empty() || !absl::SimpleAtod(words[0], &value)) continue;
    values[std::string(name)] += value;
  }
  return values;
}

absl::StatusOr<MetricValues> ReadMetrics(const std::string& url) {
  absl::StatusOr<std::string> page = tool::FetchPage(url, absl::Seconds(3));
  if (!page.ok()) return page.status();
  return ParseMetrics(*page);
}

Scraper::Scraper(std::string url, TimePoint start) : url_(std::move(url)), start_(start) {
  if (!url_.empty()) thread_ = std::thread([this] { Work(); });
}

Scraper::~Scraper() { Finish(); }

void Scraper::TakeSample() {
  absl::StatusOr<MetricValues> values = ReadMetrics(url_);
  const double seconds = ToSeconds(Clock::now() - start_);
  std::lock_guard<std::mutex> lock(mutex_);
  if (values.ok()) {
    samples_.push_back({seconds, *std::move(values)});
  } else {
    ++failures_;
  }
}

void Scraper::Work() {
  TimePoint due = Clock::now();
  while (true) {
    TakeSample();
    due = std::max(due + std::chrono::seconds(1), Clock::now());
    std::unique_lock<std::mutex> lock(mutex_);
    if (wake_.wait_until(lock, due, [this] { return stopping_; })) return;
  }
}

void Scraper::Finish() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (stopping_ || url_.empty()) return;
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
  TakeSample();
}

std::vector<MetricSample> Scraper::samples() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return samples_;
}

int64_t Scraper::failures() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return failures_;
}

}  // namespace attnd::attnload
