// The server's listening sockets. It accepts connections itself, hands them on, and bounds how many may be open.
//
// gRPC's own listener has no such bound, and the first accept() that fails for want of a file descriptor makes it deaf
// for good (seen in 1.51): established connections live on, new ones are never answered again. Here a connection beyond
// the bound is reset at once, so that its client knows, and the server is open again as soon as others have ended.
//
// How connections are counted: accept() takes the lowest free descriptor, so one that lies `max_connections` above
// those which were in use at the start says that as many connections are open (files opened since count among them).
// Nobody has to tell when a connection ends.
#ifndef ATTND_SERVER_ACCEPTOR_H_
#define ATTND_SERVER_ACCEPTOR_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace attnd {

class Acceptor {
 public:
  // Binds and listens: ADDRESS:PORT (port 0 takes a free one; a name may stand for several addresses) or unix:PATH.
  // UNAVAILABLE, naming the address, when none of its addresses can be bound. Nothing is accepted before Start.
  static absl::StatusOr<std::unique_ptr<Acceptor>> Listen(const std::string& address);
  ~Acceptor();  // as Stop

  const std::string& address() const { return address_; }  // with the port that was taken

  // Calls `serve` with each connection, from one thread, and leaves the descriptor to it; it is non-blocking. Calls
  // `refused` for each that was beyond the bound. REQUIRES: max_connections > 0; called once.
  void Start(int max_connections, std::function<void(int listener, int connection)> serve,
             std::function<void()> refused);
  // Closes the listening sockets. Connections that were handed on are not touched. May be called more than once.
  void Stop();

 private:
  Acceptor() = default;
  absl::Status ListenTcp(const std::string& host, const std::string& port);
  absl::Status ListenUnix(const std::string& path);
  void Run();
  void AcceptAll(int listener);
  void Refuse(int connection);
  void RefuseWithoutDescriptor(int listener);

  std::string address_;
  std::string unix_path_;  // to be removed at the end; empty otherwise
  std::vector<int> listeners_;
  int stop_event_ = -1;
  int spare_ = -1;  // given up for a moment when a connection is to be refused and no descriptor is left
  int limit_ = 0;   // descriptors from here on are beyond the bound
  absl::Time next_warning_ = absl::InfinitePast();
  std::function<void(int, int)> serve_;
  std::function<void()> refused_;
  std::thread thread_;
};

// How many connections may be open where nothing else is said: what the limit of open files leaves beside the process's
// own, at most 4096.
int DefaultMaxConnections();
// How many the limit of open files allows.
int MostConnections();
// Raises the limit of open files to the most that the process may give itself.
void RaiseOpenFileLimit();

}  // namespace attnd

#endif  // ATTND_SERVER_ACCEPTOR_H_
