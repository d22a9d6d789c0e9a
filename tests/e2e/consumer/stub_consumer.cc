// stub_consumer HOST:PORT: prints the server's version.
#include <grpcpp/create_channel.h>

#include <iostream>

#include "attnd/v1/attnd.grpc.pb.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  const auto stub = attnd::v1::Attention::NewStub(grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  attnd::v1::ServerInfo info;
  const grpc::Status status = stub->GetServerInfo(&context, {}, &info);
  if (!status.ok()) return std::cerr << status.error_message() << "\n", 1;
  std::cout << "version " << info.version() << "\n";
  return 0;
}
