// A real server on a loopback port for each test, and short verbs to drive it with.
//
// The mean oracle: in a session of one head and one dimension whose keys are all zero, a step's output is the plain
// mean of the values so far, so that what is in the cache can be told from the outside and checked by hand.
#ifndef ATTND_TESTS_SERVICE_HARNESS_H_
#define ATTND_TESTS_SERVICE_HARNESS_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "attnd/v1/attnd.grpc.pb.h"
#include "attnd/v1/error_details.pb.h"
#include "server/options.h"
#include "server/server.h"

namespace attnd::testing {

using Floats = std::vector<float>;

v1::Tensor F32(const Floats& values);
Floats ToFloats(const v1::Tensor& tensor);

// google.rpc.ErrorInfo of a status; fails the test when there is none.
v1::ErrorInfo ErrorInfoOf(const grpc::Status& status);
// The reason, or "" when the status has no details.
std::string ReasonOf(const grpc::Status& status);
bool HasRetryInfo(const grpc::Status& status);

// A step of `values.size()` tokens with zero queries and keys, one head and one dimension.
v1::StepRequest MeanStep(const std::string& session_id, const Floats& values);

// The gate of a server's compute thread: while it is closed, the next batch waits in it.
class ComputeGate {
 public:
  void Close();
  void Open();     // also lets out a batch that waits
  void PassOne();  // lets out the batch that waits, and no other
  // For Options::compute_hook.
  std::function<absl::Status()> hook();
  // Waits until a batch is inside that came after the last Close.
  void AwaitBatch();

 private:
  absl::Mutex mutex_;
  bool open_ ABSL_GUARDED_BY(mutex_) = true;
  int openings_ ABSL_GUARDED_BY(mutex_) = 0;
  int entered_ ABSL_GUARDED_BY(mutex_) = 0;  // batches that found it closed
  int entered_at_close_ ABSL_GUARDED_BY(mutex_) = 0;
};

class ServiceTest : public ::testing::Test {
 public:
  // One head, one dimension: what the mean oracle needs.
  static v1::SessionConfig MeanConfig(int num_layers = 1);

 protected:
  ServiceTest();
  ~ServiceTest() override;

  // Small and on free ports; metrics are read from the object, without a port.
  static Options DefaultOptions();
  void StartServer(const Options& options = DefaultOptions());
  std::shared_ptr<grpc::Channel> NewChannel() const;

  std::string Create(int num_layers = 1);
  std::string Create(const v1::SessionConfig& config);

  grpc::Status Step(const v1::StepRequest& request, v1::StepResponse* response);
  // The output rows of a MeanStep that must succeed.
  Floats Mean(const std::string& session_id, const Floats& values);
  grpc::Status MeanError(const std::string& session_id, const Floats& values);
  v1::Session Get(const std::string& session_id);
  grpc::Status Close(const std::string& session_id);
  grpc::Status Attend(const v1::AttendRequest& request, v1::AttendResponse* response);
  v1::ServerInfo Info();

  // A series as scraped, e.g. Metric("attnd_rpc_handled_total{code=\"OK\",method=\"Step\"}"); fails the test when it
  // does not exist.
  double Metric(const std::string& series);
  std::map<std::string, double> AllMetrics();
  double Handled(absl::string_view method, absl::string_view code);
  bool WaitForMetric(const std::string& series, double value, absl::Duration timeout = absl::Seconds(5));

  ComputeGate gate_;
  std::unique_ptr<Server> server_;
  std::unique_ptr<v1::Attention::Stub> stub_;
};

// Through any stub. Create must succeed; Step has a minute.
std::string Create(v1::Attention::Stub* stub, const v1::SessionConfig& config = ServiceTest::MeanConfig());
grpc::Status Step(v1::Attention::Stub* stub, const v1::StepRequest& request, v1::StepResponse* response);

// Calls `condition` until it is true.
bool Eventually(const std::function<bool()>& condition, absl::Duration timeout = absl::Seconds(5));

}  // namespace attnd::testing

#endif  // ATTND_TESTS_SERVICE_HARNESS_H_
