// All metrics of the process, resolved once at start-up so that every series exists at 0 and no call looks up labels.
// No series carries a session, a peer or anything else that a client chose.
//
// Thread-safe. The engine and the edge tell it what happens; gauges of sessions, queue and cache are read from the
// engine when scraped, which waits for no computation. Prometheus's exceptions end here.
#ifndef ATTND_SERVER_METRICS_H_
#define ATTND_SERVER_METRICS_H_

#include <memory>
#include <string>
#include <vector>

#include "server/engine/engine.h"
#include "server/rpc/rpc_observer.h"

namespace prometheus {
class Collectable;
}

namespace attnd {

class AttentionService;

struct BuildInfo {
  std::string version;
  std::string isa;
  std::string onednn;
};

class Metrics final : public EngineObserver, public RpcObserver {
 public:
  explicit Metrics(const BuildInfo& build_info);
  ~Metrics() override;

  // Where the gauges come from, from now on; null before the two exist and again before they end.
  void SetStatsSource(const Engine* engine, const AttentionService* service);
  void SetReady(bool ready);
  void SetDraining(bool draining);
  bool ready() const;
  bool draining() const;

  // Lives as long as the Metrics.
  const std::shared_ptr<prometheus::Collectable>& collectable() const;
  std::string Text() const;       // as scraped
  std::string Reference() const;  // a Markdown table of names, types, labels and help

  void OnStepDone(Phase phase, int64_t tokens, absl::Duration total, absl::Duration queue,
                  absl::Duration compute) override;
  void OnBatch(int segments, int64_t tokens, int64_t kv_bytes_read) override;
  void OnCancelled(CancelStage stage) override;
  void OnSessionCreated(Origin origin) override;
  void OnEvicted(Eviction kind) override;
  void OnSnapshot(SnapshotOp op, int64_t bytes, absl::Duration duration) override;
  void OnSnapshotFailed(SnapshotOp op) override;
  void OnSessionClosed(absl::string_view reason) override;

  void OnHandled(RpcMethod method, absl::StatusCode code, absl::Duration duration) override;
  // An error is counted where it goes to a client, whoever found it; the engine's own report of it (OnRejected) is
  // therefore left alone.
  void OnError(absl::string_view reason) override;
  void OnRequestsInFlight(int delta) override;
  void OnStreamsActive(int delta) override;
  void OnConnectionRefused() override;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace attnd

#endif  // ATTND_SERVER_METRICS_H_
