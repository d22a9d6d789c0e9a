#include "server/engine/session_snapshot.h"

#include <algorithm>
#include <bit>
#include <concepts>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"
#include "server/engine/step_plan.h"

namespace attnd {
namespace {

using absl::StrCat;

constexpr uint32_t kVersion = 1;
constexpr int64_t kInfiniteSeconds = std::numeric_limits<int64_t>::max();
constexpr int64_t kNanosPerSecond = 1'000'000'000;

absl::Status BadRecord(absl::string_view what) {
  return MakeError(absl::StatusCode::kInvalidArgument, "BAD_SNAPSHOT", StrCat("the snapshot's session record ", what));
}

class RecordWriter {
 public:
  template <std::unsigned_integral T>
  void Put(T value) {
    for (size_t i = 0; i < sizeof(T); i++) out_.push_back(static_cast<char>(value >> (8 * i) & 0xff));
  }
  template <std::signed_integral T>
  void Put(T value) {
    Put(static_cast<std::make_unsigned_t<T>>(value));
  }
  void Put(float value) { Put(std::bit_cast<uint32_t>(value)); }
  template <typename T>
  void Put(const std::vector<T>& values) {
    Put(static_cast<uint32_t>(values.size()));
    for (const T value : values) Put(value);
  }
  std::string Take() { return std::move(out_); }

 private:
  std::string out_;
};

// Reads zeros once the bytes have ended: `ended()` is asked when all is read.
class RecordReader {
 public:
  explicit RecordReader(absl::string_view bytes) : bytes_(bytes) {}

  template <std::unsigned_integral T>
  void Get(T* value) {
    *value = 0;
    if (bytes_.size() < sizeof(T)) return Fail();
    for (size_t i = 0; i < sizeof(T); i++) *value |= static_cast<T>(T{static_cast<uint8_t>(bytes_[i])} << (8 * i));
    bytes_.remove_prefix(sizeof(T));
  }
  template <std::signed_integral T>
  void Get(T* value) {
    std::make_unsigned_t<T> bits;
    Get(&bits);
    *value = static_cast<T>(bits);
  }
  void Get(float* value) {
    uint32_t bits;
    Get(&bits);
    *value = std::bit_cast<float>(bits);
  }
  template <typename T>
  void Get(std::vector<T>* values) {
    uint32_t count;
    Get(&count);
    if (count > bytes_.size() / sizeof(T)) return Fail();
    values->resize(count);
    for (T& value : *values) Get(&value);
  }
  bool ended() const { return ended_; }
  size_t left() const { return bytes_.size(); }

 private:
  void Fail() {
    ended_ = true;
    bytes_ = {};
  }

  absl::string_view bytes_;
  bool ended_ = false;
};

void PutDuration(absl::Duration duration, RecordWriter* out) {
  absl::Duration rest;
  const int64_t seconds = absl::IDivDuration(duration, absl::Seconds(1), &rest);
  out->Put(duration == absl::InfiniteDuration() ? kInfiniteSeconds : seconds);
  out->Put(duration == absl::InfiniteDuration() ? uint32_t{0} : static_cast<uint32_t>(absl::ToInt64Nanoseconds(rest)));
}

void PutConfig(const SessionConfig& config, RecordWriter* out) {
  out->Put(int32_t{config.num_layers});
  out->Put(int32_t{config.heads.num_q_heads});
  out->Put(int32_t{config.heads.num_kv_heads});
  out->Put(int32_t{config.shape.head_dim});
  out->Put(int32_t{config.shape.value_dim});
  out->Put(static_cast<uint8_t>(config.shape.dtype));
  out->Put(static_cast<uint8_t>(config.causal));
  out->Put(config.softmax_scale);
  out->Put(config.softcap);
  out->Put(config.alibi_slopes);
  out->Put(config.sinks);
  out->Put(config.layer_windows);
  out->Put(config.max_tokens);
  out->Put(config.reserve_tokens);
  PutDuration(config.ttl, out);
}

absl::Status GetDuration(RecordReader* in, absl::Duration* duration) {
  int64_t seconds;
  uint32_t nanos;
  in->Get(&seconds);
  in->Get(&nanos);
  if (nanos >= kNanosPerSecond) return BadRecord(StrCat("has a ttl with ", nanos, " nanoseconds"));
  *duration = seconds == kInfiniteSeconds ? absl::InfiniteDuration()
                                          : absl::Seconds(seconds) + absl::Nanoseconds(int64_t{nanos});
  return absl::OkStatus();
}

absl::Status GetBool(RecordReader* in, absl::string_view name, bool* value) {
  uint8_t byte;
  in->Get(&byte);
  if (byte > 1) return BadRecord(StrCat("has ", byte, " where ", name, " is 0 or 1"));
  *value = byte == 1;
  return absl::OkStatus();
}

absl::Status GetConfig(RecordReader* in, SessionConfig* config) {
  uint8_t dtype;
  for (int* field : {&config->num_layers, &config->heads.num_q_heads, &config->heads.num_kv_heads,
                     &config->shape.head_dim, &config->shape.value_dim}) {
    int32_t value;
    in->Get(&value);
    *field = value;
  }
  in->Get(&dtype);
  config->shape.dtype = static_cast<KvDType>(dtype);
  absl::Status status = GetBool(in, "causal", &config->causal);
  in->Get(&config->softmax_scale);
  in->Get(&config->softcap);
  in->Get(&config->alibi_slopes);
  in->Get(&config->sinks);
  in->Get(&config->layer_windows);
  in->Get(&config->max_tokens);
  in->Get(&config->reserve_tokens);
  status.Update(GetDuration(in, &config->ttl));
  return status;
}

absl::Status CheckLayer(const SessionConfig& config, int layer, int64_t length, int64_t first_token) {
  if (config.max_tokens > 0 && length > config.max_tokens) {
    return BadRecord(StrCat("allows ", config.max_tokens, " tokens (max_tokens), layer ", layer, " has ", length));
  }
  // What the layer's next token sees must be there. Without a window that is every token.
  const int64_t window = config.layer_windows.empty() ? 0 : config.layer_windows[layer];
  const int64_t oldest_seen = window == 0 ? 0 : std::max<int64_t>(0, length - window + 1);
  if (first_token <= oldest_seen) return absl::OkStatus();
  return BadRecord(StrCat("gives layer ", layer, " ", window == 0 ? "no window" : StrCat("a window of ", window),
                          ", so its next token sees tokens from ", oldest_seen, " on, but it holds those from ",
                          first_token, " on"));
}

absl::Status CheckLayout(const SessionConfig& config, const SnapshotLayout& layout) {
  if (layout.shape != config.shape || layout.num_kv_heads != config.heads.num_kv_heads ||
      layout.num_layers() != config.num_layers) {
    return BadRecord("is of other dimensions, heads, layers or another element type than its blocks");
  }
  for (int layer = 0; layer < config.num_layers; layer++) {
    const absl::Status status = CheckLayer(config, layer, layout.lengths[layer], layout.first_tokens[layer]);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

SessionRecord::Identity GetIdentity(RecordReader* in) {
  SessionRecord::Identity identity;
  int64_t created, idle_since;
  in->Get(&identity.id.high);
  in->Get(&identity.id.low);
  in->Get(&created);
  in->Get(&idle_since);
  in->Get(&identity.sequence);
  identity.create_time = absl::FromUnixNanos(created);
  identity.idle_since = absl::FromUnixNanos(idle_since);
  return identity;
}

}  // namespace

std::string EncodeSessionRecord(const SessionRecord& record) {
  RecordWriter out;
  out.Put(kVersion);
  PutConfig(record.config, &out);
  out.Put(static_cast<uint8_t>(record.identity.has_value()));
  if (record.identity.has_value()) {
    out.Put(record.identity->id.high);
    out.Put(record.identity->id.low);
    out.Put(absl::ToUnixNanos(record.identity->create_time));
    out.Put(absl::ToUnixNanos(record.identity->idle_since));
    out.Put(record.identity->sequence);
  }
  return out.Take();
}

absl::StatusOr<SessionRecord> DecodeSessionRecord(absl::string_view bytes) {
  RecordReader in(bytes);
  uint32_t version;
  in.Get(&version);
  if (in.ended()) return BadRecord(StrCat("ends after ", bytes.size(), " bytes"));
  if (version != kVersion) {
    return BadRecord(StrCat("has version ", version, "; this server reads version ", kVersion));
  }
  SessionRecord record;
  bool has_identity = false;
  absl::Status status = GetConfig(&in, &record.config);
  status.Update(GetBool(&in, "the mark of an identity", &has_identity));
  if (has_identity) record.identity = GetIdentity(&in);
  if (in.ended()) return BadRecord(StrCat("ends after ", bytes.size(), " bytes"));
  if (!status.ok()) return status;
  if (in.left() > 0) return BadRecord(StrCat("has ", in.left(), " bytes too many"));
  status = ValidateConfig(record.config);
  if (!status.ok()) return BadRecord(StrCat("is no configuration: ", status.message()));
  return record;
}

SessionRecord::Identity IdentityOf(const Session& session) {
  return {session.id, session.create_time, session.idle_since, session.sequence};
}

SnapshotLayout LayoutOf(const SessionCache& cache, const SessionModel& model) {
  return LayoutOf(cache, model.config.shape, model.config.heads.num_kv_heads);
}

SnapshotHeader MakeSnapshotHeader(SnapshotLayout layout, const SessionRecord& record) {
  return {std::move(layout), EncodeSessionRecord(record)};
}

absl::StatusOr<SessionRecord> ReadSnapshotHeader(const SnapshotHeader& header) {
  absl::StatusOr<SessionRecord> record = DecodeSessionRecord(header.metadata);
  if (!record.ok()) return record;
  if (const absl::Status status = CheckLayout(record->config, header.layout); !status.ok()) return status;
  return record;
}

}  // namespace attnd
