#include "client/cpp/internal/health.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/wire_format_lite.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include "absl/synchronization/notification.h"

namespace attnd::client::internal {
namespace {

using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;
using google::protobuf::io::CodedOutputStream;

constexpr uint32_t kServing = 1;  // of HealthCheckResponse.ServingStatus

// HealthCheckRequest { string service = 1; }
grpc::ByteBuffer Request(const std::string& service) {
  std::string bytes;
  {
    google::protobuf::io::StringOutputStream stream(&bytes);
    CodedOutputStream out(&stream);
    if (!service.empty()) WireFormatLite::WriteString(1, service, &out);
  }
  const grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

// HealthCheckResponse { ServingStatus status = 1; }
bool IsServing(const grpc::ByteBuffer& response) {
  grpc::Slice slice;
  if (!response.DumpToSingleSlice(&slice).ok()) return false;
  CodedInputStream in(slice.begin(), static_cast<int>(slice.size()));
  uint32_t status = 0;
  while (const uint32_t tag = in.ReadTag()) {
    const bool is_status = tag == WireFormatLite::MakeTag(1, WireFormatLite::WIRETYPE_VARINT);
    if (!(is_status ? in.ReadVarint32(&status) : WireFormatLite::SkipField(&in, tag))) return false;
  }
  return status == kServing;
}

}  // namespace

grpc::Status CheckHealth(const std::shared_ptr<grpc::Channel>& channel, grpc::ClientContext* context,
                         const std::string& service, bool* serving) {
  grpc::GenericStub stub(channel);
  const grpc::ByteBuffer request = Request(service);
  grpc::ByteBuffer response;
  grpc::Status status;
  absl::Notification done;
  stub.UnaryCall(context, "/grpc.health.v1.Health/Check", grpc::StubOptions(), &request, &response,
                 [&status, &done](grpc::Status result) {
                   status = std::move(result);
                   done.Notify();
                 });
  done.WaitForNotification();
  if (status.ok()) *serving = IsServing(response);
  return status;
}

}  // namespace attnd::client::internal
