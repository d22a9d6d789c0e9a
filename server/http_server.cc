#include "server/http_server.h"

#include <civetweb.h>
#include <zlib.h>

#include <atomic>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace attnd {
namespace {

// A body shorter than a packet gains nothing.
constexpr size_t kSmallestCompressed = 1400;

const char* ReasonPhrase(int status) {
  switch (status) {
    case 200:
      return "OK";
    case 404:
      return "Not Found";
    case 405:
      return "Method Not Allowed";
    case 503:
      return "Service Unavailable";
    default:
      return "Internal Server Error";
  }
}

// Nothing: the body is sent as it is.
std::optional<std::string> Gzip(const std::string& body) {
  constexpr int kGzipFormat = 15 + 16;  // a window of 32 KiB, and gzip's header instead of zlib's
  z_stream stream{};
  // The fastest level: a scrape is worth less time than the network saves.
  if (deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, kGzipFormat, 8, Z_DEFAULT_STRATEGY) != Z_OK) return std::nullopt;
  std::string packed(deflateBound(&stream, body.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(body.data()));
  stream.avail_in = static_cast<uInt>(body.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  const bool complete = deflate(&stream, Z_FINISH) == Z_STREAM_END;
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  if (!complete) return std::nullopt;
  return packed;
}

bool AcceptsGzip(const mg_connection* connection) {
  const char* accepted = mg_get_header(connection, "Accept-Encoding");
  return accepted != nullptr && absl::StrContains(accepted, "gzip");
}

void Send(mg_connection* connection, HttpAnswer answer, bool with_body, absl::string_view more_headers) {
  std::string encoding;
  if (answer.body.size() >= kSmallestCompressed && AcceptsGzip(connection)) {
    if (std::optional<std::string> packed = Gzip(answer.body)) {
      answer.body = *std::move(packed);
      encoding = "Content-Encoding: gzip\r\n";
    }
  }
  std::string message =
      absl::StrCat("HTTP/1.1 ", answer.status, " ", ReasonPhrase(answer.status), "\r\n",                       //
                   "Content-Type: ", answer.content_type, "\r\nContent-Length: ", answer.body.size(), "\r\n",  //
                   encoding, "Vary: Accept-Encoding\r\n", more_headers,                                        //
                   "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nReferrer-Policy: no-referrer\r\n",
                   "Content-Security-Policy: ", answer.content_security_policy, "\r\nConnection: close\r\n\r\n");
  if (with_body) message += answer.body;
  mg_write(connection, message.data(), message.size());
}

}  // namespace

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(const std::string& address, Handler handler) {
  std::unique_ptr<HttpServer> server(new HttpServer(std::move(handler), address.substr(0, address.rfind(':'))));
  // A connection that says nothing holds one of the threads until its time is out: with few threads and civetweb's 30 s
  // two such connections would make the target look down. For the same reason none is kept for a second request.
  const char* options[] = {"listening_ports",
                           address.c_str(),
                           "num_threads",
                           "8",
                           "request_timeout_ms",
                           "1000",
                           "enable_keep_alive",
                           "no",
                           "access_control_allow_origin",
                           "",
                           "access_control_allow_methods",
                           "",
                           nullptr};
  mg_callbacks callbacks{};
  callbacks.begin_request = &HttpServer::OnRequest;
  callbacks.log_message = [](const mg_connection*, const char*) { return 1; };  // what matters is in the status
  mg_init_library(MG_FEATURES_DEFAULT);
  mg_init_data init{};
  init.callbacks = &callbacks;
  init.user_data = server.get();
  init.configuration_options = options;
  char text[256] = "";
  mg_error_data error{};
  error.text = text;
  error.text_buffer_size = sizeof(text);
  server->context_ = mg_start2(&init, &error);
  if (server->context_ == nullptr)
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", text));
  mg_server_port port{};
  if (mg_get_server_ports(server->context_, 1, &port) == 1) server->port_ = port.port;
  return server;
}

HttpServer::~HttpServer() {
  if (context_ != nullptr) {
    // civetweb's listening thread sees that it is to stop when someone connects, or else every 2 s.
    std::atomic<bool> stopped{false};
    std::thread visitor([&] {
      char error[64];
      while (!stopped) {
        absl::SleepFor(absl::Milliseconds(10));
        if (mg_connection* visit = mg_connect_client(host_.c_str(), port_, 0, error, sizeof(error)); visit != nullptr) {
          mg_close_connection(visit);
        }
      }
    });
    mg_stop(context_);
    stopped = true;
    visitor.join();
  }
  mg_exit_library();
}

int HttpServer::OnRequest(mg_connection* connection) {
  const mg_request_info* request = mg_get_request_info(connection);
  const auto* server = static_cast<const HttpServer*>(request->user_data);
  const absl::string_view method = request->request_method;
  HttpAnswer answer;
  if (method != "GET" && method != "HEAD") {
    answer = {.status = 405, .body = "Only GET and HEAD are answered here.\n"};
    Send(connection, std::move(answer), true, "Allow: GET, HEAD\r\n");
    return 405;
  }
  try {
    answer = server->handler_(request->local_uri);
  } catch (const std::exception& exception) {  // Prometheus's, or no memory: neither may pass through C
    answer = {.status = 500, .body = absl::StrCat(exception.what(), "\n")};
  }
  const int status = answer.status;
  Send(connection, std::move(answer), method == "GET", "");
  return status;
}

}  // namespace attnd
