// Reads the server's metrics page: once, or every second while a run lasts.
#ifndef ATTND_CLIENT_ATTNLOAD_SCRAPER_H_
#define ATTND_CLIENT_ATTNLOAD_SCRAPER_H_

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "client/attnload/clock.h"

namespace attnd::attnload {

// Metric name -> value, summed over its labels. Buckets of histograms are left out.
using MetricValues = std::map<std::string, double>;

MetricValues ParseMetrics(const std::string& page);
absl::StatusOr<MetricValues> ReadMetrics(const std::string& url);  // errors as tool::FetchPage

struct MetricSample {
  double seconds = 0;  // since the run's start; negative: before it
  MetricValues values;
};

// Thread-safe.
class Scraper {
 public:
  // Without a URL it does nothing.
  Scraper(std::string url, TimePoint start);
  ~Scraper();

  void Finish();  // takes the last sample
  std::vector<MetricSample> samples() const;
  int64_t failures() const;  // reads that failed, for example while the server stood still

 private:
  void Work();
  void TakeSample();

  const std::string url_;
  const TimePoint start_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  bool stopping_ = false;
  int64_t failures_ = 0;
  std::vector<MetricSample> samples_;
  std::thread thread_;
};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_SCRAPER_H_
