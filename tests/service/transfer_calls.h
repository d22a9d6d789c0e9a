// Exports and imports through a stub, as a client without a library would call them.
#ifndef ATTND_TESTS_SERVICE_TRANSFER_CALLS_H_
#define ATTND_TESTS_SERVICE_TRANSFER_CALLS_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>

#include "tests/service/harness.h"

namespace attnd::testing {

inline grpc::Status Export(v1::Attention::Stub* stub, const std::string& id, std::string* bytes) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  v1::ExportSessionRequest request;
  request.set_session_id(id);
  const auto reader = stub->ExportSession(&context, request);
  v1::ExportSessionResponse response;
  int64_t total_bytes = 0;
  while (reader->Read(&response)) {
    EXPECT_LE(response.data().size(), size_t{1} << 20);
    EXPECT_EQ(response.total_bytes() > 0, bytes->empty()) << "said once, at the start";
    total_bytes += response.total_bytes();
    *bytes += response.data();
  }
  const grpc::Status status = reader->Finish();
  if (status.ok()) {
    EXPECT_EQ(static_cast<int64_t>(bytes->size()), total_bytes);
  }
  return status;
}

inline std::string Export(v1::Attention::Stub* stub, const std::string& id) {
  std::string bytes;
  const grpc::Status status = Export(stub, id, &bytes);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return bytes;
}

// In messages of `piece` bytes.
inline grpc::Status Import(v1::Attention::Stub* stub, const std::string& bytes, v1::Session* session,
                           const v1::SessionConfig* expected = nullptr, size_t piece = 100'000) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const auto writer = stub->ImportSession(&context, session);
  v1::ImportSessionRequest request;
  if (expected != nullptr) *request.mutable_expected() = *expected;
  for (size_t at = 0; at < bytes.size(); at += piece) {
    request.set_data(bytes.substr(at, piece));
    if (!writer->Write(request)) break;
    request.Clear();
  }
  writer->WritesDone();
  return writer->Finish();
}

inline std::string Import(v1::Attention::Stub* stub, const std::string& bytes) {
  v1::Session session;
  const grpc::Status status = Import(stub, bytes, &session);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return session.session_id();
}

// Sessions with a lot of bytes: 8 KiB a token.
inline v1::SessionConfig BigConfig() {
  v1::SessionConfig config;
  config.set_num_layers(1);
  config.set_num_q_heads(8);
  config.set_num_kv_heads(8);
  config.set_head_dim(128);
  return config;
}

// A session of that configuration which holds `mebibytes`.
inline std::string CreateBig(v1::Attention::Stub* stub, int mebibytes) {
  constexpr int kTokens = 1024;  // a step of 8 MiB
  const std::string id = Create(stub, BigConfig());
  Floats values(kTokens * 8 * 128);
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i % 251) / 251;
  v1::StepRequest request;
  v1::Segment* segment = request.add_segments();
  segment->set_session_id(id);
  segment->set_num_tokens(kTokens);
  *request.mutable_k() = F32(values);
  *request.mutable_v() = F32(values);
  for (int i = 0; i < mebibytes / 8; ++i) {
    v1::StepResponse response;
    const grpc::Status status = Step(stub, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  return id;
}

// An export that is read by hand.
struct OpenExport {
  OpenExport(v1::Attention::Stub* stub, const std::string& id) {
    v1::ExportSessionRequest request;
    request.set_session_id(id);
    reader = stub->ExportSession(&context, request);
  }
  bool Read() {
    if (!reader->Read(&response)) return false;
    received += static_cast<int64_t>(response.data().size());
    return true;
  }
  grpc::ClientContext context;
  v1::ExportSessionResponse response;
  std::unique_ptr<grpc::ClientReader<v1::ExportSessionResponse>> reader;
  int64_t received = 0;
};

// An import that is written by hand.
struct OpenImport {
  explicit OpenImport(v1::Attention::Stub* stub) : writer(stub->ImportSession(&context, &session)) {}
  bool Write(const std::string& bytes) {
    v1::ImportSessionRequest request;
    request.set_data(bytes);
    return writer->Write(request);
  }
  grpc::ClientContext context;
  v1::Session session;
  std::unique_ptr<grpc::ClientWriter<v1::ImportSessionRequest>> writer;
};

}  // namespace attnd::testing

#endif  // ATTND_TESTS_SERVICE_TRANSFER_CALLS_H_
