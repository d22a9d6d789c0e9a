// attnctl estimate.
#include <iostream>
#include <string>

#include "absl/strings/str_format.h"
#include "client/attnctl/commands.h"
#include "client/attnctl/connection.h"
#include "client/attnctl/estimate.h"

namespace attnd::attnctl {
namespace {

std::string Exact(int64_t bytes) {
  return absl::StrFormat("%s (%d bytes)", HumanBytes(static_cast<double>(bytes)), bytes);
}

}  // namespace

int RunEstimate(const Arguments& arguments) {
  FlagSet flags(
      "attnctl estimate [FLAG...]",
      "Prints the cache memory that a model's context takes and what each token costs on the network. It asks no\n"
      "server. A cache for N sessions is attnd --kv_cache_bytes=<the last line>.");
  ModelFlags model(&flags, "llama3-8b");
  int64_t tokens = 0;
  int64_t sessions = 1;
  std::string wire = "f32";
  flags.Int("tokens", &tokens, 0, int64_t{1} << 32, "context of each session; 0: what the model was trained for");
  flags.Int("sessions", &sessions, 1, 1'000'000, "number of sessions");
  flags.Choice("wire", &wire, {"f32", "bf16", "f16"}, "how tensors travel");
  if (auto exit = ParseOrExit(&flags, arguments)) return *exit;
  absl::StatusOr<client::SessionConfig> config = model.Config();
  if (!config.ok()) return PrintUsageError(config.status());
  if (tokens == 0) tokens = model.trained_context();
  if (tokens == 0) {
    std::cerr << "attnctl: --tokens is needed for a custom model\n";
    return kUsage;
  }
  const client::DType wire_dtype =
      wire == "f32" ? client::DType::kF32 : (wire == "bf16" ? client::DType::kBf16 : client::DType::kF16);
  const Estimate e = EstimateCost(*config, tokens, sessions, wire_dtype);
  absl::PrintF("%s\n", model.Describe());
  absl::PrintF("block (64 tokens of one kv head)  %s\n", Exact(e.block_bytes));
  absl::PrintF("per token, all layers             %s\n", Exact(e.bytes_per_token));
  absl::PrintF("on the network, per token         %s to the server, %s back (%s)\n",
               HumanBytes(static_cast<double>(e.request_bytes)), HumanBytes(static_cast<double>(e.answer_bytes)), wire);
  absl::PrintF("a session of %-9d tokens      %s in %d blocks\n", tokens, Exact(e.session_bytes), e.blocks_per_session);
  absl::PrintF("%-9d sessions                %s\n", sessions, Exact(e.total_bytes));
  return kDone;
}

}  // namespace attnd::attnctl
