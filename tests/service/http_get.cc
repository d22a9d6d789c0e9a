#include "tests/service/http_get.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

namespace attnd::testing {

int HttpConnect(const std::string& address) {
  const int connection = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in target{};
  target.sin_family = AF_INET;
  target.sin_port = htons(static_cast<uint16_t>(std::atoi(address.substr(address.rfind(':') + 1).c_str())));
  inet_pton(AF_INET, "127.0.0.1", &target.sin_addr);
  if (connect(connection, reinterpret_cast<const sockaddr*>(&target), sizeof(target)) == 0) return connection;
  close(connection);
  return -1;
}

std::string HttpExchange(const std::string& address, const std::string& request) {
  std::string answer;
  const int connection = HttpConnect(address);
  if (connection < 0) return answer;
  const std::string whole = request + "\r\nHost: " + address + "\r\n\r\n";
  if (write(connection, whole.data(), whole.size()) == static_cast<ssize_t>(whole.size())) {
    char buffer[8192];
    for (ssize_t n; (n = read(connection, buffer, sizeof(buffer))) > 0;) answer.append(buffer, n);
  }
  close(connection);
  return answer;
}

std::string HttpGet(const std::string& address, const std::string& path) {
  return HttpExchange(address, "GET " + path + " HTTP/1.0");
}

std::string HttpBody(const std::string& answer) {
  const size_t end = answer.find("\r\n\r\n");
  return end == std::string::npos ? "" : answer.substr(end + 4);
}

}  // namespace attnd::testing
