// How long work that comes now will wait for compute, told from how fast recent batches went. Pure: no clock, no mutex.
//
// Prefills share what their batches have room for, so what is ahead of one is every token of the others that is not
// computed yet. Decodes all go into their next batch, which takes the longer the more there are. Each kind waits for
// the other's batches, too: they take turns.
#ifndef ATTND_SERVER_ENGINE_DELAY_ESTIMATE_H_
#define ATTND_SERVER_ENGINE_DELAY_ESTIMATE_H_

#include <cstdint>

#include "absl/time/time.h"

namespace attnd {

class DelayEstimate {
 public:
  // A batch was computed: of tokens of prefills or of decode items (or both), while items of the other kind waited or
  // not.
  void AddBatch(int64_t prefill_tokens, int64_t decodes, bool others_waited, absl::Duration elapsed);

  // Until the tokens ahead are computed; zero as long as no prefill was.
  absl::Duration OfPrefill(int64_t tokens_ahead) const;
  // Until a decode that finds `decodes_ahead` others waiting has been through its batch, zero as long as none was.
  absl::Duration OfDecode(int64_t decodes_ahead) const;

 private:
  // Sums over the batches with such work, in which each counts a tenth less with every one that follows.
  struct Sums {
    double batches = 0, work = 0, seconds = 0;
    void Add(double amount, double elapsed_s);
    void Wait(double elapsed_s);  // of the other kind's batch, if this one has any
  };
  Sums prefill_, decode_;
};

}  // namespace attnd

#endif  // ATTND_SERVER_ENGINE_DELAY_ESTIMATE_H_
