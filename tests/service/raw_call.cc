#include "tests/service/raw_call.h"

namespace attnd::testing {

RawCall::RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method, const std::string& message,
                 bool half_close)
    : stub_(channel) {
  const grpc::Slice slice(message);
  outgoing_ = grpc::ByteBuffer(&slice, 1);
  stub_.PrepareBidiStreamingCall(&context_, method, grpc::StubOptions(), this);
  if (half_close) {
    StartWriteLast(&outgoing_, grpc::WriteOptions());
  } else {
    StartWrite(&outgoing_);
  }
  StartRead(&incoming_);
  StartCall();
}

RawCall::~RawCall() {
  context_.TryCancel();
  AwaitStatus();
}

void RawCall::OnReadDone(bool ok) {
  if (!ok) return;
  grpc::Slice slice;
  incoming_.DumpToSingleSlice(&slice);
  {
    absl::MutexLock lock(&mutex_);
    messages_.emplace_back(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  StartRead(&incoming_);
}

void RawCall::OnDone(const grpc::Status& status) {
  absl::MutexLock lock(&mutex_);
  status_ = status;
  done_ = true;
}

std::string RawCall::Message(size_t number, absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  const auto arrived = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return messages_.size() > number || done_; };
  mutex_.AwaitWithTimeout(absl::Condition(&arrived), timeout);
  return messages_.size() > number ? messages_[number] : "";
}

grpc::Status RawCall::AwaitStatus() {
  absl::MutexLock lock(&mutex_);
  mutex_.Await(absl::Condition(&done_));
  return status_;
}

std::string HealthRequest(const std::string& service) {
  return std::string("\x0a") + static_cast<char>(service.size()) + service;
}

}  // namespace attnd::testing
