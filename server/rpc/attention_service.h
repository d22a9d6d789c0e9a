// attnd.v1.Attention on gRPC's callback API. Reactors never block and never compute: they validate, hand the work to
// the engine with pointers into the request, and answer when the engine completes it.
//
// Thread-safe. The engine and the observer must outlive it, and it must outlive the gRPC server that serves it.
#ifndef ATTND_SERVER_RPC_ATTENTION_SERVICE_H_
#define ATTND_SERVER_RPC_ATTENTION_SERVICE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "absl/time/time.h"
#include "server/engine/engine.h"
#include "server/rpc/rpc_observer.h"

namespace grpc {
class Service;
}

namespace attnd {

class TokenTable;
struct ServiceState;

struct RpcOptions {
  // What GetServerInfo tells of the binary and the machine, found out once: asking the kernels can generate code.
  std::string version;
  std::string isa;
  std::string onednn_version;
  std::map<std::string, std::string> kernel_paths;  // by the name of the KvDType

  int64_t max_message_bytes = int64_t{64} << 20;
  int64_t max_inflight_bytes = int64_t{1} << 30;  // of requests and their answers
  int64_t max_streams = 4096;                     // steps', exports and imports, open at a time
  std::shared_ptr<const TokenTable> tokens;       // null: no token is asked for
};

// Read without waiting for anything, e.g. at every scrape.
struct EdgeStats {
  int64_t inflight_bytes = 0, inflight_bytes_limit = 0;
  int64_t streams_limit = 0;
};

class AttentionService {
 public:
  AttentionService(Engine* engine, RpcObserver* observer, const RpcOptions& options);
  ~AttentionService();

  grpc::Service* service();  // to be registered with a server builder

  EdgeStats stats() const;

  // From now on new calls are refused with UNAVAILABLE (DRAINING), and each stream ends so once the steps that it has
  // in flight are answered; imports end at once, exports go on. Returns at once.
  void BeginDrain();
  // The exports that still go on end with UNAVAILABLE (DRAINING), unless their clients do not read. Returns at once.
  void CutOff();
  // True once every call has ended; false when `deadline` came first.
  bool WaitForCalls(absl::Time deadline);

 private:
  std::unique_ptr<ServiceState> state_;
  std::unique_ptr<grpc::Service> service_;
};

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_ATTENTION_SERVICE_H_
