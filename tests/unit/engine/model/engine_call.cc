#include "tests/unit/engine/model/engine_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/engine/errors.h"

namespace attnd {
namespace {

// The tensors of a step, which live until its answer has come.
struct Tensors {
  std::vector<float> q, k, v;
};

void MakeStep(Engine* engine, EngineCall* call) {
  auto tensors = std::make_shared<Tensors>();
  StepTask task;
  task.layer = call->layer;
  std::vector<ModelToken> tokens;
  int64_t num_tokens = 0;
  for (const SegmentCall& segment : call->segments) {
    task.segments.push_back({segment.session_id, segment.num_tokens, segment.start, segment.rewind, {}});
    tokens.insert(tokens.end(), segment.tokens.begin(), segment.tokens.end());
    num_tokens += segment.num_tokens;
  }
  const auto give = [](const std::vector<float>& tensor, const std::byte** data, size_t* bytes) {
    *data = reinterpret_cast<const std::byte*>(tensor.data());
    *bytes = tensor.size() * sizeof(float);
  };
  if (call->appends) {
    tensors->k = KeysOf(*call->of, call->layer, tokens);
    tensors->v = ValuesOf(*call->of, call->layer, tokens);
    give(tensors->k, &task.k, &task.k_bytes);
    give(tensors->v, &task.v, &task.v_bytes);
  }
  if (call->attends) {
    tensors->q = QueriesOf(*call->of, call->query_seed, num_tokens);
    give(tensors->q, &task.q, &task.q_bytes);
  }
  task.allocate = [call](size_t out_bytes, size_t) {
    call->out.assign(out_bytes / sizeof(float), -777.0f);
    return StepTask::Buffers{reinterpret_cast<std::byte*>(call->out.data()), nullptr};
  };
  task.done = [call, tensors](StepOutcome outcome) {
    call->status = outcome.status;
    call->outcome = std::move(outcome);
    call->done.Notify();
  };
  engine->Submit(std::move(task));
}

}  // namespace

std::vector<std::string> EngineCall::Names() const {
  std::vector<std::string> names = rows;
  if (!session_id.empty()) names.push_back(session_id);
  for (const SegmentCall& segment : segments) names.push_back(segment.session_id);
  return names;
}

std::string EngineCall::Name() const {
  constexpr const char* kNames[] = {"create", "step", "fork", "rewind", "reorder", "close", "export", "import"};
  return kNames[static_cast<int>(kind)];
}

std::string EngineCall::Describe() const {
  std::string text = Name();
  if (of != nullptr) absl::StrAppend(&text, " kind ", of->index);
  if (!session_id.empty()) absl::StrAppend(&text, " ", session_id.substr(0, 6));
  if (length.has_value()) absl::StrAppend(&text, " at ", *length);
  if (!snapshot.empty()) absl::StrAppend(&text, " of ", snapshot.size(), " bytes", is_damaged ? " (damaged)" : "");
  for (size_t i = 0; i < rows.size(); i++) absl::StrAppend(&text, " ", rows[i].substr(0, 6), "<-", sources[i]);
  if (kind == Kind::kStep)
    absl::StrAppend(&text, " layer ", layer, appends ? " appends" : "", attends ? " attends" : "");
  for (const SegmentCall& s : segments) {
    absl::StrAppend(&text, " [", s.session_id.substr(0, 6), " ", s.num_tokens, " tokens",
                    s.start.has_value() ? absl::StrCat(" from ", *s.start) : "", s.rewind ? " rewind" : "", "]");
  }
  return text;
}

void Make(Engine* engine, EngineCall* call) {
  const auto session_done = [call](absl::StatusOr<SessionInfo> info) {
    call->status = info.status();
    if (info.ok()) call->info = *std::move(info);
    call->done.Notify();
  };
  switch (call->kind) {
    case EngineCall::Kind::kCreate:
      return engine->CreateSession(call->of->config, session_done);
    case EngineCall::Kind::kStep:
      return MakeStep(engine, call);
    case EngineCall::Kind::kFork:
      return engine->ForkSession(call->session_id, call->length, session_done);
    case EngineCall::Kind::kRewind:
      return engine->RewindSession(call->session_id, *call->length, session_done);
    case EngineCall::Kind::kReorder:
      return engine->ReorderSessions(call->rows, call->sources, [call](absl::StatusOr<std::vector<int64_t>> lengths) {
        call->status = lengths.status();
        if (lengths.ok()) call->lengths = *std::move(lengths);
        call->done.Notify();
      });
    case EngineCall::Kind::kExport:
      return engine->ExportSession(call->session_id, [call](absl::StatusOr<std::unique_ptr<SessionExport>> exported) {
        call->status = exported.status();
        if (exported.ok()) call->exported = *std::move(exported);
        call->done.Notify();
      });
    case EngineCall::Kind::kImport: {
      const std::unique_ptr<SessionImport> import = engine->ImportSession(std::nullopt);
      absl::string_view rest = call->snapshot;
      absl::Status status;
      while (!rest.empty() && status.ok()) {
        status = import->Write(rest.substr(0, call->piece_bytes));
        rest.remove_prefix(std::min(rest.size(), call->piece_bytes));
      }
      return import->Finish(session_done);  // after an error it is told once more
    }
    case EngineCall::Kind::kClose: {
      const absl::StatusOr<bool> closed = engine->CloseSession(call->session_id);
      call->status = closed.status();
      call->was_open = closed.value_or(false);
      return call->done.Notify();
    }
  }
}

std::string ReasonOf(const absl::Status& status) {
  if (status.ok()) return "";
  const std::string reason = GetErrorDetails(status).reason;
  return reason.empty() ? absl::StatusCodeToString(status.code()) : reason;
}

}  // namespace attnd
