#include "client/attnload/target.h"

#include <utility>

#include "client/attnload/gate.h"
#include "client/attnload/stream_slot.h"

namespace attnd::attnload {

struct Target::Connection {
  Connection(Client client_of, Executor* executor, int64_t limit)
      : client(std::move(client_of)), gate(executor, limit) {}

  Client client;
  Gate gate;
  std::vector<std::unique_ptr<StreamSlot>> streams;
};

absl::StatusOr<std::unique_ptr<Target>> Target::Connect(const TargetOptions& options, Executor* executor) {
  std::unique_ptr<Target> target(new Target(options));
  for (int i = 0; i < options.connections; ++i) {
    client::ClientOptions client_options = options.client;
    client_options.own_connection = true;
    client_options.retry.max_attempts = 1;  // a repetition would hide what is measured
    absl::StatusOr<Client> client = Client::Connect(client_options);
    if (!client.ok()) return client.status();
    target->connections_.push_back(
        std::make_unique<Connection>(*std::move(client), executor, options.calls_per_connection));
    Connection& connection = *target->connections_.back();
    for (int s = 0; s < options.streams; ++s) {
      connection.streams.push_back(std::make_unique<StreamSlot>(connection.client, executor, options.steps_per_stream));
    }
  }
  return target;
}

Target::Target(const TargetOptions& options) : options_(options) {}
Target::~Target() = default;

const Client& Target::client() const { return connections_[0]->client; }

void Target::Create(int64_t session, const client::SessionConfig& config, Done<std::string> done) {
  Connection& connection = ConnectionOf(session);
  connection.gate.Enter([&connection, config, done = std::move(done)] {
    const TimePoint sent = Clock::now();
    connection.client.CreateSessionAsync(
        config, {}, [&connection, sent, done](absl::StatusOr<client::Session> created) {
          const CallTimes times = {sent, Clock::now()};
          connection.gate.Leave();
          absl::StatusOr<std::string> id = created.ok() ? absl::StatusOr<std::string>(created->id()) : created.status();
          // Before `done`: the handle holds the connection, which may not end on this thread.
          created = absl::CancelledError();
          done(std::move(id), times);
        });
  });
}

void Target::Step(int64_t session, const client::StepRequest& request, bool unary, std::stop_token cancel,
                  Done<client::StepResult> done) {
  Connection& connection = ConnectionOf(session);
  if (!unary && !connection.streams.empty()) {
    const size_t slot = static_cast<size_t>(session / options_.connections) % connection.streams.size();
    connection.streams[slot]->Step(request, std::move(done));
    return;
  }
  connection.gate.Enter([&connection, &request, cancel = std::move(cancel), done = std::move(done)] {
    const TimePoint sent = Clock::now();
    connection.client.StepAsync(request, {.timeout = {}, .stop = cancel},
                                [&connection, sent, done](absl::StatusOr<client::StepResult> result) {
                                  const CallTimes times = {sent, Clock::now()};
                                  connection.gate.Leave();
                                  done(std::move(result), times);
                                });
  });
}

void Target::Close(int64_t session, const std::string& session_id, Done<bool> done) {
  Connection& connection = ConnectionOf(session);
  connection.gate.Enter([&connection, session_id, done = std::move(done)] {
    const TimePoint sent = Clock::now();
    connection.client.CloseSessionAsync(session_id, {}, [&connection, sent, done](absl::StatusOr<bool> closed) {
      const CallTimes times = {sent, Clock::now()};
      connection.gate.Leave();
      done(std::move(closed), times);
    });
  });
}

}  // namespace attnd::attnload
