// A call of any method by its bytes, for the services whose messages the tests do not generate (health, reflection) and
// for messages that are none. Thread-safe.
#ifndef ATTND_TESTS_SERVICE_RAW_CALL_H_
#define ATTND_TESTS_SERVICE_RAW_CALL_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/client_callback.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"

namespace attnd::testing {

class RawCall final : public grpc::ClientBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  // Sends one message and, for a unary method, half-closes.
  RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method, const std::string& message,
          bool half_close);
  ~RawCall() override;  // cancels and waits

  // The message of that number, once it has come; "" if it did not come in time.
  std::string Message(size_t number, absl::Duration timeout = absl::Seconds(5));
  grpc::Status AwaitStatus();

  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

 private:
  grpc::GenericStub stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer outgoing_, incoming_;
  absl::Mutex mutex_;
  std::vector<std::string> messages_ ABSL_GUARDED_BY(mutex_);
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::Status status_ ABSL_GUARDED_BY(mutex_);
};

// grpc.health.v1.HealthCheckRequest, and its answers.
std::string HealthRequest(const std::string& service);
inline const char kServing[] = "\x08\x01";
inline const char kNotServing[] = "\x08\x02";
inline const char kHealthCheck[] = "/grpc.health.v1.Health/Check";
inline const char kHealthWatch[] = "/grpc.health.v1.Health/Watch";

}  // namespace attnd::testing

#endif  // ATTND_TESTS_SERVICE_RAW_CALL_H_
