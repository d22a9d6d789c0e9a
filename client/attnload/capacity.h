// Searches the highest rate that a system sustains. Knows nothing of load: a trial is a function.
#ifndef ATTND_CLIENT_ATTNLOAD_CAPACITY_H_
#define ATTND_CLIENT_ATTNLOAD_CAPACITY_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace attnd::attnload {

struct Trial {
  double rate = 0;
  bool ok = false;
  double p99_seconds = 0;
  double error_rate = 0;
  double steps_per_second = 0;
  std::string why = {};  // it failed
};

struct CapacityResult {
  std::vector<Trial> trials;  // in the order made
  double rate = 0;            // the highest that held; 0: none did
  bool bounded = false;       // a higher one failed; otherwise the search ended at its limit
};

// Doubles from `first` while trials hold (or halves until one does), then halves the interval between the highest that
// held and the lowest that did not until it is within 5 % of the former. `max` is the highest rate tried. Stops at an
// error of a trial and returns that.
absl::StatusOr<CapacityResult> FindCapacity(double first, double max,
                                            const std::function<absl::StatusOr<Trial>(double rate)>& trial);

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_CAPACITY_H_
