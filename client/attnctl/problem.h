// Attention problems as JSON, the format of `attnctl attend`:
//
//   {"q": [[0]], "k": [[0],[0]], "v": [[2],[8]], "scale": 1, "causal": false, "mask": [[true,true]],
//    "window": 4, "softcap": 30, "query_offset": 0, "empty_rows": "zero", "kv": "bf16",
//    "sinks": [0.5], "alibi_slopes": [0.1]}
//
// q, k and v are [tokens][dim], or [tokens][heads][dim] in all three; the rest may be left out and then takes the
// server's default. The strings "nan", "inf" and "-inf" stand for numbers that JSON has no way to write. A "name" is
// ignored; any other key is an error.
#ifndef ATTND_CLIENT_ATTNCTL_PROBLEM_H_
#define ATTND_CLIENT_ATTNCTL_PROBLEM_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cpp/requests.h"

namespace attnd::attnctl {

struct Problem {
  std::vector<float> q, k, v;
  bool with_heads = false;        // the matrices had a dimension of heads, and so has the answer
  client::AttendRequest request;  // all but its tensors, so that a Problem can be moved

  // The request with its tensors, valid as long as the problem.
  client::AttendRequest Request() const;
};

// INVALID_ARGUMENT naming the key, row and value that is wrong.
absl::StatusOr<Problem> ParseProblem(const std::string& json);

// {"out": ..., "weights": ..., "lse": ...} with the nesting of the problem: weights [heads][queries][keys], or
// [queries][keys] without heads. Numbers are the shortest that read back as the same f32.
std::string FormatAnswer(const Problem& problem, const client::AttendResult& result);

}  // namespace attnd::attnctl

#endif  // ATTND_CLIENT_ATTNCTL_PROBLEM_H_
