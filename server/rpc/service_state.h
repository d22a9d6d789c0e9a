// What every call of the service shares. Owned by AttentionService, outlives every call.
#ifndef ATTND_SERVER_RPC_SERVICE_STATE_H_
#define ATTND_SERVER_RPC_SERVICE_STATE_H_

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/synchronization/mutex.h"
#include "server/engine/engine.h"
#include "server/rpc/admission.h"
#include "server/rpc/attention_service.h"
#include "server/rpc/auth.h"
#include "server/rpc/rpc_observer.h"
#include "server/rpc/stream_call.h"

namespace attnd {

struct ServiceState {
  ServiceState(Engine* engine, RpcObserver* observer, const RpcOptions& options);

  Engine* const engine;
  RpcObserver* const observer;
  const RpcOptions options;
  const int64_t max_answer_bytes;  // of tensors: leaves room for the fields around them
  Admission admission;

  absl::Mutex streams_mutex;
  std::vector<std::shared_ptr<StreamCall>> Streams() ABSL_LOCKS_EXCLUDED(streams_mutex);
  absl::flat_hash_set<std::shared_ptr<StreamCall>> streams ABSL_GUARDED_BY(streams_mutex);
};

}  // namespace attnd

#endif  // ATTND_SERVER_RPC_SERVICE_STATE_H_
