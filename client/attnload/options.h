// What attnload can be told.
#ifndef ATTND_CLIENT_ATTNLOAD_OPTIONS_H_
#define ATTND_CLIENT_ATTNLOAD_OPTIONS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/attnload/load.h"
#include "client/attnload/target.h"
#include "client/tool/connection_flags.h"
#include "client/tool/flags.h"
#include "client/tool/model_flags.h"

namespace attnd::attnload {

// Flags as given. Made into the options of the parts once parsed.
class Flags {
 public:
  Flags();

  tool::FlagSet& set() { return set_; }
  // INVALID_ARGUMENT, naming flag and value: flags that do not go together.
  absl::Status Check() const;

  // REQUIRES: Check() is OK.
  LoadOptions Load(int64_t max_message_bytes) const;
  absl::StatusOr<TargetOptions> Target() const;
  std::string MetricsUrl() const;  // empty: none
  // Every flag's name and value, for the reports.
  std::vector<std::pair<std::string, std::string>> Describe() const { return set_.Values(); }

  const std::string& target() const { return connection_.server(); }
  const tool::ModelFlags& model() const { return model_; }

  std::string json, report;
  double rate = 4;
  absl::Duration slo_p99 = absl::ZeroDuration();  // zero: none
  double slo_error_rate = 0.01;
  bool find_capacity = false;
  double max_rate = 100000;
  absl::Duration trial_duration = absl::Seconds(10);
  absl::Duration session_ttl = absl::Seconds(30);
  int64_t threads = 2;
  bool has_abandons() const { return abandon_rate_ > 0; }

 private:
  tool::FlagSet set_;
  tool::ConnectionFlags connection_;
  tool::ModelFlags model_;
  std::string metrics_;
  std::string arrivals_ = "poisson";
  absl::Duration duration_ = absl::Seconds(30), warmup_ = absl::Seconds(2), decode_interval_ = absl::ZeroDuration();
  int64_t prefill_tokens_ = 512, prefill_chunk_ = 2048, decode_tokens_ = 64;
  int64_t connections_ = 1, streams_ = 0, calls_per_connection_ = 100, steps_per_stream_ = 64, max_sessions_ = 1024;
  int64_t retries_ = 0, seed_ = 1;
  double cancel_rate_ = 0, abandon_rate_ = 0, check_rate_ = 0.05;
};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_OPTIONS_H_
