#include "tests/unit/engine/model/twin.h"

#include <utility>

#include "tests/unit/engine/model/engine_call.h"

namespace attnd {

Twins::Twins() : ids_(ModelKinds().size()) {
  EngineOptions options;
  options.kv_cache_bytes = int64_t{16} << 20;
  options.session_idle_ttl = absl::InfiniteDuration();
  engine_ = *Engine::Create(options, nullptr);
}

std::vector<float> Twins::Ask(const ModelSession& session, int layer, int64_t start, int64_t rows, uint64_t query_seed,
                              std::string* error) {
  const auto make = [&](EngineCall* call) {
    Make(engine_.get(), call);
    call->done.WaitForNotification();
    for (const SegmentOutcome& segment : call->outcome.segments) call->status.Update(segment.status);
    if (!call->status.ok()) *error = call->Describe() + ": " + std::string(call->status.message());
    return call->status.ok();
  };
  std::string& id = ids_[session.kind->index];
  if (id.empty()) {
    EngineCall create;
    create.kind = EngineCall::Kind::kCreate;
    create.of = session.kind;
    if (!make(&create)) return {};
    id = create.info.session_id;
  }
  EngineCall rewind;
  rewind.kind = EngineCall::Kind::kRewind;
  rewind.session_id = id;
  rewind.length = 0;
  if (!make(&rewind)) return {};

  EngineCall prefill, query;
  const std::vector<ModelToken>& tokens = session.layers[layer].tokens;
  prefill.of = query.of = session.kind;
  prefill.layer = query.layer = layer;
  prefill.attends = false;
  prefill.segments.push_back({id, tokens, static_cast<int64_t>(tokens.size()), {}, false});
  if (!tokens.empty() && !make(&prefill)) return {};
  query.appends = false;
  query.query_seed = query_seed;
  query.segments.push_back({id, {}, rows, start, false});
  if (!make(&query)) return {};
  return std::move(query.out);
}

}  // namespace attnd
