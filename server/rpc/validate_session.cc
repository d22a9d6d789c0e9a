// Session configurations, ids and pages.
#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "server/rpc/convert.h"
#include "server/rpc/validate.h"

namespace attnd {
namespace {

constexpr absl::string_view kBadConfig = "BAD_CONFIG";
constexpr int kDefaultPageSize = 100;
constexpr int kMaxPageSize = 1000;
constexpr int64_t kForeverSeconds = int64_t{10} * 365 * 24 * 3600;  // a longer time to live never ends

absl::Status FillWindows(const v1::SessionConfig& wire, SessionConfig* config) {
  const int64_t everywhere = wire.softmax().window();  // 0 when unset, which CheckSoftmax tells from an explicit 0
  config->layer_windows.assign(config->num_layers, everywhere);
  if (wire.layer_windows().empty()) return absl::OkStatus();
  if (wire.layer_windows_size() != config->num_layers) {
    return InvalidArgument(kBadConfig, absl::StrCat("layer_windows has ", wire.layer_windows_size(), " entries for ",
                                                    config->num_layers, " layers"));
  }
  for (int layer = 0; layer < config->num_layers; ++layer) {
    if (wire.layer_windows(layer) < 0) {
      return InvalidArgument(kBadConfig, absl::StrCat("layer_windows[", layer, "] is ", wire.layer_windows(layer),
                                                      ", but must be >= 0 (0: that layer has no window)"));
    }
    config->layer_windows[layer] = wire.layer_windows(layer);
  }
  return absl::OkStatus();
}

absl::Status FillLimits(const v1::SessionConfig& wire, SessionConfig* config) {
  if (wire.max_tokens() < 0 || wire.max_tokens() > kMaxSessionTokens) {
    return InvalidArgument(kBadConfig, absl::StrCat("max_tokens is ", wire.max_tokens(), ", but must be 0..",
                                                    kMaxSessionTokens, " (0: as the cache allows)"));
  }
  const int64_t most_reserved = wire.max_tokens() == 0 ? kMaxSessionTokens : wire.max_tokens();
  if (wire.reserve_tokens() < 0 || wire.reserve_tokens() > most_reserved) {
    return InvalidArgument(
        kBadConfig, absl::StrCat("reserve_tokens is ", wire.reserve_tokens(), ", but must be 0..", most_reserved));
  }
  config->max_tokens = wire.max_tokens();
  config->reserve_tokens = wire.reserve_tokens();
  if (!wire.has_ttl()) return absl::OkStatus();
  const absl::Duration ttl = absl::Seconds(wire.ttl().seconds()) + absl::Nanoseconds(wire.ttl().nanos());
  if (ttl <= absl::ZeroDuration()) {
    return InvalidArgument(kBadConfig, absl::StrCat("ttl is ", absl::FormatDuration(ttl),
                                                    ", but must be > 0 (leave it unset for the server's)"));
  }
  config->ttl = wire.ttl().seconds() >= kForeverSeconds ? absl::InfiniteDuration() : ttl;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SessionConfig> MakeSessionConfig(const v1::SessionConfig& wire) {
  SessionConfig config;
  if (wire.num_layers() < 1 || wire.num_layers() > kMaxLayers) {
    return InvalidArgument(kBadConfig,
                           absl::StrCat("num_layers is ", wire.num_layers(), ", but must be 1..", kMaxLayers));
  }
  config.num_layers = wire.num_layers();
  config.heads = {.num_q_heads = wire.num_q_heads(), .num_kv_heads = wire.num_kv_heads()};
  config.shape.head_dim = wire.head_dim();
  config.shape.value_dim = wire.value_dim() == 0 ? wire.head_dim() : wire.value_dim();
  config.shape.dtype = FromProto(wire.kv_dtype());
  absl::Status status = CheckHeads(kBadConfig, wire.num_q_heads(), wire.num_kv_heads());
  if (status.ok()) status = CheckDims(kBadConfig, config.shape.head_dim, config.shape.value_dim);
  if (status.ok()) status = CheckKvDType(kBadConfig, wire.kv_dtype());
  if (status.ok()) status = CheckSoftmax(kBadConfig, wire.softmax(), wire.num_q_heads());
  if (status.ok()) status = FillWindows(wire, &config);
  if (status.ok()) status = FillLimits(wire, &config);
  if (!status.ok()) return status;
  config.softmax_scale = SoftmaxScale(wire.softmax(), config.shape.head_dim);
  config.softcap = wire.softmax().softcap();
  config.causal = !wire.softmax().has_causal() || wire.softmax().causal();
  config.alibi_slopes.assign(wire.softmax().alibi_slopes().begin(), wire.softmax().alibi_slopes().end());
  config.sinks.assign(wire.softmax().sinks().begin(), wire.softmax().sinks().end());
  return config;
}

absl::Status CheckSessionId(absl::string_view session_id) {
  if (session_id.empty()) return InvalidArgument("BAD_SESSION_ID", "session_id is empty");
  if (session_id.size() > kMaxSessionIdBytes) {
    return InvalidArgument("BAD_SESSION_ID",
                           absl::StrCat("session_id is ", session_id.size(), " bytes long, but at most ",
                                        kMaxSessionIdBytes, " can be an id"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<int64_t>> CheckFork(const v1::ForkSessionRequest& request) {
  if (absl::Status status = CheckSessionId(request.session_id()); !status.ok()) return status;
  if (!request.has_length()) return std::optional<int64_t>();
  if (request.length() < 0) {
    return InvalidArgument("BAD_POSITION",
                           absl::StrCat("length is ", request.length(), ", but must be >= 0 (leave it unset for all)"));
  }
  return std::optional<int64_t>(request.length());
}

absl::Status CheckReorder(const v1::ReorderSessionsRequest& request) {
  if (request.session_ids_size() > kMaxSegments) {
    return InvalidArgument("BAD_SHAPE", absl::StrCat("a reorder of ", request.session_ids_size(), " sessions; at most ",
                                                     kMaxSegments, " are allowed"));
  }
  if (request.session_ids_size() != request.sources_size()) {
    return InvalidArgument(
        "BAD_SHAPE", absl::StrCat(request.sources_size(), " sources for ", request.session_ids_size(), " sessions"));
  }
  for (const std::string& id : request.session_ids()) {
    if (absl::Status status = CheckSessionId(id); !status.ok()) return status;
  }
  return absl::OkStatus();  // the rest is the engine's to check
}

absl::StatusOr<Page> MakePage(const v1::ListSessionsRequest& request) {
  Page page;
  if (request.page_size() < 0) {
    return InvalidArgument("BAD_PAGE", absl::StrCat("page_size is ", request.page_size(), ", but must be >= 0"));
  }
  page.limit = request.page_size() == 0 ? kDefaultPageSize : std::min(request.page_size(), kMaxPageSize);
  if (!request.page_token().empty() && !absl::SimpleAtoi(request.page_token(), &page.after)) {
    return InvalidArgument("BAD_PAGE", "page_token is not one that this server gave out");
  }
  return page;
}

}  // namespace attnd
