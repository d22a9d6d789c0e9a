// Client::ExportSession and ImportSession: one message at a time, and a watch that ends a call which stands still.
#include <algorithm>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "attnd/v1/attnd.pb.h"
#include "client/cpp/client.h"
#include "client/cpp/internal/convert.h"
#include "client/cpp/internal/status.h"
#include "client/cpp/internal/transport.h"

namespace attnd::client {
namespace {

constexpr size_t kPieceBytes = size_t{1} << 20;

// Cancels the call when one wait for the server is longer than the timeout. A deadline of the whole call would not do:
// how long it takes is a matter of the session's size.
class StallWatch {
 public:
  StallWatch(grpc::ClientContext* context, absl::Duration timeout, const std::stop_token& stop)
      : context_(context),
        timeout_(timeout),
        stop_(stop, [context] { context->TryCancel(); }),
        thread_([this](const std::stop_token& end) { Watch(end); }) {}

  // Calls `wait`, which waits for the server.
  template <class Wait>
  auto During(Wait wait) {
    Set(absl::Now() + timeout_);
    auto result = wait();
    Set(absl::InfiniteFuture());
    return result;
  }

  // What the call ended with.
  absl::Status Explain(const grpc::Status& status) {
    const std::lock_guard lock(mutex_);
    if (!stalled_) return internal::FromGrpc(status);
    return absl::DeadlineExceededError(
        absl::StrCat("the server did not go on with the transfer for ", absl::FormatDuration(timeout_)));
  }

 private:
  void Set(absl::Time deadline) {
    const std::lock_guard lock(mutex_);
    deadline_ = deadline;
    changed_.notify_all();
  }
  void Watch(const std::stop_token& end) {
    std::unique_lock lock(mutex_);
    while (!end.stop_requested()) {
      const absl::Time deadline = deadline_;
      const auto changed = [&] { return deadline_ != deadline; };
      if (deadline == absl::InfiniteFuture()) {
        changed_.wait(lock, end, changed);
      } else if (!changed_.wait_until(lock, end, absl::ToChronoTime(deadline), changed) && !end.stop_requested()) {
        stalled_ = true;
        deadline_ = absl::InfiniteFuture();
        context_->TryCancel();
      }
    }
  }

  grpc::ClientContext* const context_;
  const absl::Duration timeout_;
  std::mutex mutex_;
  std::condition_variable_any changed_;
  absl::Time deadline_ = absl::InfiniteFuture();
  bool stalled_ = false;
  std::stop_callback<std::function<void()>> stop_;
  std::jthread thread_;  // ends first
};

// Cut to messages: a source may give more at once than a message may hold.
absl::Status SendAll(const SnapshotSource& source, StallWatch* watch, v1::ImportSessionRequest request,
                     grpc::ClientWriter<v1::ImportSessionRequest>* writer) {
  for (;;) {
    absl::StatusOr<std::string> bytes = source();
    if (!bytes.ok()) return bytes.status();
    if (bytes->empty() && !request.has_expected()) return absl::OkStatus();
    const bool ended = bytes->empty();
    size_t sent = 0;
    do {
      request.set_data(bytes->substr(sent, kPieceBytes));
      sent += request.data().size();
      if (!watch->During([&] { return writer->Write(request); })) return absl::OkStatus();  // its status says why
      request.Clear();
    } while (sent < bytes->size());
    if (ended) return absl::OkStatus();
  }
}

}  // namespace

absl::Status Client::ExportSession(const std::string& session_id, const SnapshotSink& sink,
                                   const CallOptions& call) const {
  v1::ExportSessionRequest request;
  request.set_session_id(session_id);
  grpc::ClientContext context;
  transport_->Prepare(context);
  StallWatch watch(&context, transport_->TimeoutOr(call.timeout), call.stop);
  const auto reader = transport_->stub().ExportSession(&context, request);
  v1::ExportSessionResponse response;
  int64_t total_bytes = 0, received = 0;
  absl::Status sunk;
  while (watch.During([&] { return reader->Read(&response); })) {
    if (total_bytes == 0) total_bytes = response.total_bytes();
    received += static_cast<int64_t>(response.data().size());
    if (!sunk.ok()) continue;  // what was still on its way
    sunk = sink(response.data(), total_bytes);
    if (!sunk.ok()) context.TryCancel();
  }
  const absl::Status status = watch.Explain(watch.During([&] { return reader->Finish(); }));
  if (!sunk.ok()) return sunk;
  if (!status.ok()) return internal::ExplainLostSession(status);
  if (received != total_bytes || received == 0) {
    return absl::DataLossError(absl::StrCat("the snapshot ended after ", received, " of ", total_bytes, " bytes"));
  }
  return absl::OkStatus();
}

absl::StatusOr<Session> Client::ImportSession(const SnapshotSource& source, const SessionConfig* expected,
                                              const CallOptions& call) const {
  v1::ImportSessionRequest first;
  if (expected != nullptr) internal::ToWire(*expected, first.mutable_expected());
  v1::Session response;
  grpc::ClientContext context;
  transport_->Prepare(context);
  StallWatch watch(&context, transport_->TimeoutOr(call.timeout), call.stop);
  const auto writer = transport_->stub().ImportSession(&context, &response);
  const absl::Status sent = SendAll(source, &watch, std::move(first), writer.get());
  if (sent.ok()) {
    writer->WritesDone();
  } else {
    context.TryCancel();
  }
  const absl::Status status = watch.Explain(watch.During([&] { return writer->Finish(); }));
  if (!sent.ok()) return sent;
  if (!status.ok()) return status;
  return Opened(internal::FromWire(response));
}

}  // namespace attnd::client
