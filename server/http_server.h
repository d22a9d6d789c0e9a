// A small HTTP server for pages that are cheap to make: GET and HEAD, gzip for those who ask, one answer a connection.
// Keeps civetweb out of everything else. Thread-safe.
#ifndef ATTND_SERVER_HTTP_SERVER_H_
#define ATTND_SERVER_HTTP_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

struct mg_connection;
struct mg_context;

namespace attnd {

struct HttpAnswer {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
  // What a browser may load for it: nothing, unless the page says otherwise.
  std::string content_security_policy = "default-src 'none'; frame-ancestors 'none'";
};

class HttpServer {
 public:
  // Called from several threads at once, with the path alone ("/metrics"): no query, percent signs decoded.
  using Handler = std::function<HttpAnswer(absl::string_view path)>;

  // `address` is HOST:PORT; port 0 takes a free one. UNAVAILABLE when it cannot be bound.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(const std::string& address, Handler handler);
  ~HttpServer();  // waits for what is being answered

  int port() const { return port_; }

 private:
  HttpServer(Handler handler, std::string host) : handler_(std::move(handler)), host_(std::move(host)) {}
  static int OnRequest(mg_connection* connection);

  const Handler handler_;
  const std::string host_;
  mg_context* context_ = nullptr;
  int port_ = 0;
};

}  // namespace attnd

#endif  // ATTND_SERVER_HTTP_SERVER_H_
