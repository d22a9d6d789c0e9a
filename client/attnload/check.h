// Whether an answer is right.
#ifndef ATTND_CLIENT_ATTNLOAD_CHECK_H_
#define ATTND_CLIENT_ATTNLOAD_CHECK_H_

#include <cstdint>
#include <string>

#include "client/attnload/data.h"
#include "client/attnload/plan.h"
#include "client/cpp/requests.h"

namespace attnd::attnload {

struct CheckOutcome {
  int64_t rows = 0;      // compared: one head of one token
  double max_error = 0;  // ||out - expected|| / ||expected|| of the worst
  std::string mismatch;  // what is wrong with the first row beyond the dtype's bound; empty: nothing
};

// A kConstant session's answer: every row has to be the constant of its kv head. All heads of up to 16 tokens.
CheckOutcome CheckConstant(const Plan& plan, const client::SessionConfig& config, const PlannedStep& step,
                           const client::Tensor& out);

// A kReference session's answer: the query heads of one kv head in the step's last tokens, against float64. Costs a
// pass over the history of that kv head.
CheckOutcome CheckReference(const Plan& plan, const client::SessionConfig& config, const TensorPool& pool,
                            const PlannedStep& step, int kv_head, const client::Tensor& out);

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_CHECK_H_
