// TLS and client certificates, with certificates made on the spot.
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_cat.h"
#include "tests/service/harness.h"

namespace attnd::testing {
namespace {

class TlsTest : public ServiceTest {
 protected:
  void SetUp() override {
    folder_ = absl::StrCat(::testing::TempDir(), "/attnd_tls_", getpid());
    std::filesystem::create_directories(folder_);
    Run("req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=ca -keyout ca.key -out ca.pem");
    MakeCertificate("server");
    MakeCertificate("client");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void Run(const std::string& arguments) {
    const std::string command =
        absl::StrCat("cd ", folder_, " && openssl ", arguments, " >>log 2>&1 || { cat log; exit 1; }");
    ASSERT_EQ(std::system(command.c_str()), 0) << command;
  }
  void MakeCertificate(const std::string& name) {
    std::ofstream(folder_ + "/ext") << "subjectAltName=IP:127.0.0.1\n";
    Run(absl::StrCat("req -newkey rsa:2048 -nodes -subj /CN=", name, " -keyout ", name, ".key -out ", name, ".csr"));
    Run(absl::StrCat("x509 -req -in ", name, ".csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile ext -out ",
                     name, ".pem"));
  }
  std::string Read(const std::string& name) {
    std::ifstream file(folder_ + "/" + name);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
  }
  Options TlsOptions(bool client_certificates) {
    Options options = DefaultOptions();
    options.tls_cert = folder_ + "/server.pem";
    options.tls_key = folder_ + "/server.key";
    if (client_certificates) options.tls_client_ca = folder_ + "/ca.pem";
    return options;
  }
  grpc::Status Ask(bool with_certificate) {
    grpc::SslCredentialsOptions ssl;
    ssl.pem_root_certs = Read("ca.pem");
    if (with_certificate) {
      ssl.pem_cert_chain = Read("client.pem");
      ssl.pem_private_key = Read("client.key");
    }
    const auto stub = v1::Attention::NewStub(grpc::CreateChannel(server_->address(), grpc::SslCredentials(ssl)));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    v1::ServerInfo info;
    return stub->GetServerInfo(&context, v1::GetServerInfoRequest(), &info);
  }

  std::string folder_;
};

TEST_F(TlsTest, ServesTlsAndNothingElse) {
  StartServer(TlsOptions(/*client_certificates=*/false));
  const grpc::Status status = Ask(/*with_certificate=*/false);
  EXPECT_TRUE(status.ok()) << status.error_message();
  grpc::ClientContext context;  // the harness's own channel is not encrypted
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
  v1::ServerInfo info;
  EXPECT_FALSE(stub_->GetServerInfo(&context, v1::GetServerInfoRequest(), &info).ok());
}

TEST_F(TlsTest, LetsOnlyKnownClientsIn) {
  StartServer(TlsOptions(/*client_certificates=*/true));
  EXPECT_FALSE(Ask(/*with_certificate=*/false).ok());
  const grpc::Status status = Ask(/*with_certificate=*/true);
  EXPECT_TRUE(status.ok()) << status.error_message();
}

TEST_F(TlsTest, FilesThatCannotBeReadAreNamed) {
  Options options = TlsOptions(false);
  options.tls_key = folder_ + "/no_such.key";
  const auto server = Server::Start(options);
  ASSERT_FALSE(server.ok());
  EXPECT_NE(server.status().message().find("no_such.key"), absl::string_view::npos) << server.status();
}

}  // namespace
}  // namespace attnd::testing
