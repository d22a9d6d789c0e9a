// attnctl attend.
#include <iostream>
#include <string>

#include "client/attnctl/commands.h"
#include "client/attnctl/connection.h"
#include "client/attnctl/problem.h"

namespace attnd::attnctl {
namespace {

constexpr char kSummary[] =
    "Computes attention over the JSON matrices of FILE (or of standard input) and prints outputs and weights as JSON.\n"
    "\n"
    "  {\"q\":[[0]], \"k\":[[0],[0]], \"v\":[[2],[8]], \"scale\":1}   gives   {\"out\":[[5]],\"weights\":[[0.5,0.5]], "
    "...}\n"
    "\n"
    "q, k, v: [tokens][dim], or [tokens][heads][dim] in all three. Options, each with the server's default when left\n"
    "out: scale, causal, mask (rows of true and false), window, softcap, query_offset, sinks, alibi_slopes,\n"
    "empty_rows (\"zero\" or \"reject\"), kv (\"f32\", \"bf16\", \"f16\", \"int8\"). \"nan\", \"inf\" and \"-inf\" are "
    "numbers.";

// What the shapes promise; without it a short answer would be printed out of bounds.
absl::Status CheckSizes(const client::AttendRequest& request, const client::AttendResult& result) {
  const size_t rows = static_cast<size_t>(request.num_queries) * static_cast<size_t>(request.num_q_heads);
  if (result.out.size() == rows * static_cast<size_t>(request.value_dim) && result.lse.size() == rows &&
      result.weights.size() == rows * static_cast<size_t>(request.num_keys)) {
    return absl::OkStatus();
  }
  return absl::InternalError("the server's answer does not have the shape that was asked for");
}

}  // namespace

int RunAttend(const Arguments& arguments) {
  FlagSet flags("attnctl attend [FILE] [FLAG...]", kSummary);
  tool::ConnectionFlags connection(&flags);
  std::vector<std::string> files;
  if (auto exit = ParseOrExit(&flags, arguments, &files)) return *exit;
  if (files.size() > 1) {
    std::cerr << "attnctl: attend takes one file, not also '" << files[1] << "'\n";
    return kUsage;
  }
  absl::StatusOr<std::string> json = ReadFile(files.empty() ? "-" : files[0]);
  if (!json.ok()) return PrintError(json.status());
  absl::StatusOr<Problem> problem = ParseProblem(*json);
  if (!problem.ok()) return PrintError(problem.status());
  absl::StatusOr<Client> client = Connect(connection);
  if (!client.ok()) return PrintError(client.status());
  client::AttendRequest request = problem->Request();
  request.return_weights = true;
  request.return_lse = true;
  absl::StatusOr<client::AttendResult> result = client->Attend(request);
  if (!result.ok()) return PrintError(result.status(), connection.server());
  absl::Status sizes = CheckSizes(request, *result);
  if (!sizes.ok()) return PrintError(sizes);
  std::cout << FormatAnswer(*problem, *result) << "\n";
  return kDone;
}

}  // namespace attnd::attnctl
