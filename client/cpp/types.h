// The plain types of attnd's C++ client: element types, tensors borrowed and owned, session configurations and
// what the server says about itself. No gRPC or protobuf header is needed to use them.
//
// Words and semantics are those of the wire contract, proto/attnd/v1/attnd.proto: its comments are the reference for
// what each option means.
#ifndef ATTND_CLIENT_CPP_TYPES_H_
#define ATTND_CLIENT_CPP_TYPES_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <ranges>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/time/time.h"

namespace attnd::client {

// Element type of a tensor on the wire (little endian).
enum class DType : uint8_t { kF32, kBf16, kF16 };
constexpr size_t DTypeBytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

// Element type in which a session stores K and V.
enum class KvDType : uint8_t { kF32, kBf16, kF16, kInt8 };

// What to do with a query row that has no allowed key: refuse the request, or answer zeros with lse = -inf (with a
// sink: the sink).
enum class EmptyRows : uint8_t { kReject, kZero };

// 16-bit floats, as bits. Conversions from float round to nearest, ties to even; NaN stays NaN.
struct BFloat16 {
  uint16_t bits = 0;
};
struct Float16 {
  uint16_t bits = 0;
};
BFloat16 ToBFloat16(float value);
Float16 ToFloat16(float value);
float ToFloat(BFloat16 value);
float ToFloat(Float16 value);

template <class T>
concept TensorElement = std::is_same_v<T, float> || std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>;

template <TensorElement T>
constexpr DType DTypeOf() {
  if constexpr (std::is_same_v<T, float>) return DType::kF32;
  if constexpr (std::is_same_v<T, BFloat16>) return DType::kBf16;
  return DType::kF16;
}

// A borrowed, contiguous, row-major tensor; without elements it stands for an absent one. It never outlives the
// call that it is given to.
class TensorView {
 public:
  TensorView() = default;
  // From a vector, span or array of float, BFloat16 or Float16.
  template <std::ranges::contiguous_range Range>
    requires TensorElement<std::remove_cv_t<std::ranges::range_value_t<Range>>>
  TensorView(const Range& range)  // NOLINT(google-explicit-constructor): a view, as std::span is.
      : dtype_(DTypeOf<std::remove_cv_t<std::ranges::range_value_t<Range>>>()),
        data_(std::ranges::data(range)),
        size_(std::ranges::size(range)) {}
  // `data` holds `size` elements of `dtype`.
  TensorView(DType dtype, const void* data, size_t size) : dtype_(dtype), data_(data), size_(size) {}

  DType dtype() const { return dtype_; }
  const void* data() const { return data_; }
  size_t size() const { return size_; }  // in elements
  size_t bytes() const { return size_ * DTypeBytes(dtype_); }
  bool empty() const { return size_ == 0; }

 private:
  DType dtype_ = DType::kF32;
  const void* data_ = nullptr;
  size_t size_ = 0;
};

// A tensor as the server answered it, row-major.
struct Tensor {
  DType dtype = DType::kF32;
  std::string data;  // little endian elements

  size_t size() const { return data.size() / DTypeBytes(dtype); }
  bool empty() const { return data.empty(); }
  // The elements in place. REQUIRES: dtype == DTypeOf<T>().
  template <TensorElement T>
  std::span<const T> As() const {
    return {reinterpret_cast<const T*>(data.data()), size()};
  }
  // A copy, widened to float where it is narrower.
  std::vector<float> ToFloats() const;
};

// A bit per (row, column), row-major without padding between rows; 1 means allowed. Empty: no mask.
struct BitMask {
  int64_t rows = 0;
  int64_t columns = 0;
  std::string bits;  // ceil(rows * columns / 8) bytes, the least significant bit first

  static BitMask Filled(int64_t rows, int64_t columns, bool allowed);
  void Set(int64_t row, int64_t column, bool allowed);
  bool Get(int64_t row, int64_t column) const;
  bool empty() const { return rows == 0 && columns == 0; }
};

// Unset and zero are different requests: what is unset takes the server's default.
struct SoftmaxOptions {
  std::optional<float> softmax_scale = {};  // default 1 / sqrt(head_dim)
  std::optional<float> softcap = {};        // > 0; default none
  std::optional<bool> causal = {};          // default: true in a session, false in Attend
  std::optional<int64_t> window = {};       // >= 1, counts the current token; default none
  std::vector<float> alibi_slopes = {};     // none or num_q_heads
  std::vector<float> sinks = {};            // none or num_q_heads
};

struct SessionConfig {
  int num_layers = 1;
  int num_q_heads = 1;  // a multiple of num_kv_heads
  int num_kv_heads = 1;
  int head_dim = 1;   // 1..256, of Q and K
  int value_dim = 0;  // 1..256, of V; 0 means head_dim
  KvDType kv_dtype = KvDType::kF32;
  SoftmaxOptions softmax = {};
  std::vector<int64_t> layer_windows = {};  // none, or one per layer, 0: that layer has none
  int64_t max_tokens = 0;                   // 0: as the cache allows
  std::optional<absl::Duration> ttl = {};   // idle time to live; default: the server's
  int64_t reserve_tokens = 0;               // memory reserved at creation for this many tokens of every layer

  int value_dim_or_default() const { return value_dim == 0 ? head_dim : value_dim; }
};

// A session's state, without its contents.
struct SessionInfo {
  std::string session_id;
  SessionConfig config;  // with its defaults filled in
  int64_t length = 0;    // of the longest layer, in tokens
  std::vector<int64_t> layer_lengths;
  std::vector<int64_t>
      layer_first_tokens;      // oldest token that each layer still holds; not 0 where a window passed some
  int64_t used_bytes = 0;      // of cache blocks, whole blocks counted
  int64_t reserved_bytes = 0;  // >= used_bytes
  int64_t spilled_bytes = 0;   // of its file while it is on disk (used_bytes is 0 then); its next step brings it back
  absl::Time create_time;
  absl::Duration idle_time;
  absl::Duration time_to_live;
};

struct SessionPage {
  std::vector<SessionInfo> sessions;
  std::string next_page_token;  // empty: no more
};

struct ServerInfo {
  std::string version;
  std::string isa;
  std::string onednn_version;
  std::map<std::string, std::string> kernel_paths;  // KV dtype -> how it is computed
  int compute_threads = 0;
  int block_tokens = 0;
  int64_t max_message_bytes = 0;
  int64_t max_queue_tokens = 0;
  int64_t max_sessions = 0;
  int64_t sessions_active = 0;
  int64_t kv_cache_capacity_bytes = 0;
  int64_t kv_cache_reserved_bytes = 0;
  int64_t kv_cache_used_bytes = 0;
  absl::Duration session_idle_ttl;
  bool draining = false;
  // For the configuration asked about, if any.
  int64_t bytes_per_token = 0;   // all layers
  int64_t tokens_capacity = 0;   // one such session in an empty cache
  int64_t tokens_available = 0;  // one more such session now
};

// Lower-case names as the commands print and take them: "f32", "bf16", "f16", "int8".
const char* Name(DType dtype);
const char* Name(KvDType dtype);
std::optional<KvDType> ParseKvDType(const std::string& name);

}  // namespace attnd::client

#endif  // ATTND_CLIENT_CPP_TYPES_H_
