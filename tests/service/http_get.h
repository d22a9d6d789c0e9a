// GET of http://address/path, headers and body; "" when the connection fails. Blocking.
#ifndef ATTND_TESTS_SERVICE_HTTP_GET_H_
#define ATTND_TESTS_SERVICE_HTTP_GET_H_

#include <string>

namespace attnd::testing {

// A connection to the address, to be closed by the caller; -1: refused.
int HttpConnect(const std::string& address);
std::string HttpGet(const std::string& address, const std::string& path);  // address: 127.0.0.1:PORT

}  // namespace attnd::testing

#endif  // ATTND_TESTS_SERVICE_HTTP_GET_H_
