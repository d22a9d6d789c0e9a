// A little HTTP for tests. Blocking.
#ifndef ATTND_TESTS_SERVICE_HTTP_GET_H_
#define ATTND_TESTS_SERVICE_HTTP_GET_H_

#include <string>

namespace attnd::testing {

// A connection to the address, to be closed by the caller; -1: refused.
int HttpConnect(const std::string& address);
// Headers and body of the answer, "" when the connection fails. address: 127.0.0.1:PORT.
std::string HttpGet(const std::string& address, const std::string& path);
// The same for any request: "HEAD / HTTP/1.0", perhaps with lines of header, each after "\r\n".
std::string HttpExchange(const std::string& address, const std::string& request);
// What follows the headers of an answer.
std::string HttpBody(const std::string& answer);

}  // namespace attnd::testing

#endif  // ATTND_TESTS_SERVICE_HTTP_GET_H_
