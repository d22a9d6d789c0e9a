#include "server/rpc/admission.h"

#include "absl/strings/str_cat.h"
#include "server/engine/errors.h"

namespace attnd {
namespace {

constexpr absl::Duration kRetryDelay = absl::Milliseconds(100);
// Streams last: a place is not likely to be free within milliseconds.
constexpr absl::Duration kStreamRetryDelay = absl::Seconds(1);

}  // namespace

absl::Status Admission::Reserve(int64_t bytes) { return Extend(0, bytes); }

absl::Status Admission::Extend(int64_t held, int64_t more) {
  const int64_t others = bytes_.fetch_add(more, std::memory_order_relaxed) - held;
  const int64_t bytes = held + more;
  if (others <= 0 || others + bytes <= max_bytes_) return absl::OkStatus();
  Release(more);
  return MakeError(absl::StatusCode::kResourceExhausted, "QUEUE_FULL",
                   absl::StrCat("requests and answers hold ", others, " bytes, and ", bytes, " more would exceed the ",
                                max_bytes_, " allowed (--max_inflight_bytes)"),
                   {{"inflight_bytes", absl::StrCat(others)}, {"limit_bytes", absl::StrCat(max_bytes_)}}, kRetryDelay);
}

absl::Status Admission::OpenStream() {
  const int64_t others = streams_.fetch_add(1, std::memory_order_relaxed);
  if (others < max_streams_) return absl::OkStatus();
  CloseStream();
  return MakeError(absl::StatusCode::kResourceExhausted, "STREAM_LIMIT",
                   absl::StrCat("there are ", others, " open streams; the limit is ", max_streams_, " (--max_streams)"),
                   {{"limit", absl::StrCat(max_streams_)}}, kStreamRetryDelay);
}

absl::Status Admission::DrainingError() {
  return MakeError(absl::StatusCode::kUnavailable, "DRAINING", "the server is shutting down and takes no new work");
}

void Admission::CallBegins() {
  absl::MutexLock lock(&mutex_);
  ++calls_;
}

void Admission::CallEnds() {
  absl::MutexLock lock(&mutex_);
  --calls_;
}

bool Admission::WaitForCalls(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  const auto none = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return calls_ == 0; };
  return mutex_.AwaitWithDeadline(absl::Condition(&none), deadline);
}

}  // namespace attnd
