// How long work that comes now will wait for compute, told from how fast recent batches went. Pure: no clock, no mutex.
//
// Prefills share what batches have room for, so what is ahead of one is every token of the others that is not computed
// yet. Decodes all go into the next batch, which takes the longer the more there are.
#ifndef ATTND_SERVER_ENGINE_DELAY_ESTIMATE_H_
#define ATTND_SERVER_ENGINE_DELAY_ESTIMATE_H_

#include <cstdint>

#include "absl/time/time.h"

namespace attnd {

class DelayEstimate {
 public:
  // A batch was computed: tokens of prefills, and decode items.
  void AddBatch(int64_t prefill_tokens, int64_t decodes, absl::Duration elapsed);

  // Until the tokens ahead are computed; zero as long as no prefill was.
  absl::Duration OfPrefill(int64_t tokens_ahead) const;
  // Until a decode that finds `decodes_ahead` others waiting has been through its batch, zero as long as none was.
  absl::Duration OfDecode(int64_t decodes_ahead) const;

 private:
  // Sums over the batches with such work, in which each counts a tenth less with every one that follows.
  struct Sums {
    double batches = 0, work = 0, seconds = 0;
    void Add(double amount, double elapsed_s);
  };
  Sums prefill_, decode_;
};

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_DELAY_ESTIMATE_H_
