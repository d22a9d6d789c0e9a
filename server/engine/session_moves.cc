// What happens to whole sessions between their steps: rewind, fork, reorder.
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "server/engine/engine_impl.h"
#include "server/engine/errors.h"
#include "server/engine/window.h"

namespace attnd {
namespace {

using absl::StrCat;

absl::Status Invalid(absl::string_view reason, absl::string_view message) {
  return MakeError(absl::StatusCode::kInvalidArgument, reason, message);
}

// Whether each layer can be cut to `length`. `verb`: cut, fork.
absl::Status CheckCut(const Session& session, absl::string_view verb, int64_t length) {
  const SessionCache& cache = session.cache;
  if (length < 0 || length > cache.longest()) {
    return MakeError(absl::StatusCode::kInvalidArgument, "BAD_POSITION",
                     StrCat("cannot ", verb, " at ", length, " tokens: the longest layer has ", cache.longest()),
                     {{"length", StrCat(cache.longest())}});
  }
  for (int layer = 0; layer < cache.num_layers() && length > 0; layer++) {
    if (length >= cache.length(layer)) continue;
    if (const absl::Status held = CheckHeld(session, layer, length); !held.ok()) return held;
  }
  return absl::OkStatus();
}

absl::Status CheckReorder(absl::Span<const std::string> ids, absl::Span<const int> sources) {
  if (ids.empty()) return Invalid("BAD_SHAPE", "a reorder needs at least one session");
  if (ids.size() != sources.size()) {
    return Invalid("BAD_SHAPE", StrCat(sources.size(), " sources for ", ids.size(), " sessions"));
  }
  absl::flat_hash_map<absl::string_view, size_t> rows;
  for (size_t i = 0; i < ids.size(); i++) {
    if (sources[i] < 0 || static_cast<size_t>(sources[i]) >= ids.size()) {
      return Invalid("BAD_SHAPE",
                     StrCat("source ", i, " is ", sources[i], ", but must be a row, 0 to ", ids.size() - 1));
    }
    const auto [row, is_new] = rows.emplace(ids[i], i);
    if (!is_new) {
      return Invalid("DUPLICATE_SESSION", StrCat("rows ", row->second, " and ", i, " name the same session"));
    }
  }
  return absl::OkStatus();
}

// Whether the keys and values of one are worth the same in the other.
bool SameModel(const SessionConfig& a, const SessionConfig& b) {
  if (a.num_layers != b.num_layers) return false;
  for (int layer = 0; layer < a.num_layers; layer++) {
    if (WindowOf(a, layer) != WindowOf(b, layer)) return false;
  }
  return a.heads.num_q_heads == b.heads.num_q_heads && a.heads.num_kv_heads == b.heads.num_kv_heads &&
         a.shape == b.shape && a.softmax_scale == b.softmax_scale && a.softcap == b.softcap && a.causal == b.causal &&
         a.alibi_slopes == b.alibi_slopes && a.sinks == b.sinks;
}

absl::Status Reorder(absl::Span<const std::shared_ptr<Session>> rows, absl::Span<const int> sources) {
  for (size_t i = 0; i < rows.size(); i++) {
    const SessionConfig& config = rows[i]->model->config;
    if (rows[i]->model != rows[0]->model && !SameModel(config, rows[0]->model->config)) {
      return Invalid("BAD_CONFIG", StrCat("the sessions of a reorder must have the same configuration but for "
                                          "max_tokens, ttl and reserve_tokens: row ",
                                          i, " has not that of row 0"));
    }
    const int64_t length = rows[sources[i]]->cache.longest();
    if (config.max_tokens > 0 && length > config.max_tokens) {
      return MakeError(absl::StatusCode::kFailedPrecondition, "TOO_LONG",
                       StrCat("row ", i, " may have ", config.max_tokens, " tokens (max_tokens), its source, row ",
                              sources[i], ", has ", length),
                       {{"row", StrCat(i)}, {"length", StrCat(length)}, {"limit", StrCat(config.max_tokens)}});
    }
  }
  std::vector<SessionCache*> caches;
  caches.reserve(rows.size());
  for (const auto& row : rows) caches.push_back(&row->cache);
  SessionCache::Reorder(caches, sources);
  return absl::OkStatus();
}

}  // namespace

void EngineImpl::MoveSessions(absl::Span<const std::string> ids, absl::AnyInvocable<absl::Status(Sessions)> move,
                              absl::AnyInvocable<void(absl::Status)> done) {
  absl::Status status;
  {
    absl::MutexLock lock(&mutex_);
    status = CheckAccepting(0);
    std::vector<SessionPtr> sessions;
    bool at_once = true;
    for (const std::string& id : ids) {
      absl::StatusOr<SessionPtr> session = FindSession(id);
      if (!session.ok()) {
        status = session.status();  // says more than that the queue is full
        break;
      }
      at_once = at_once && CanChangeNow(**session);
      sessions.push_back(*std::move(session));
    }
    if (status.ok() && !at_once) {
      auto job = std::make_unique<Job>();
      job->kind = Job::Kind::kMove;
      job->move = std::move(move);
      job->move_done = std::move(done);
      job->runs.resize(sessions.size());
      for (size_t i = 0; i < sessions.size(); i++) job->runs[i].session = std::move(sessions[i]);
      return Enqueue(std::move(job), 0);
    }
    if (status.ok()) status = move(sessions);
  }
  Reject(status);
  done(std::move(status));
}

absl::Status EngineImpl::Move(Job* job) {
  std::vector<SessionPtr> sessions;
  for (const SegmentRun& run : job->runs) {
    if (!run.status.ok()) return run.status;
    sessions.push_back(run.session);
  }
  return job->move(sessions);
}

void EngineImpl::RewindSession(std::string session_id, int64_t length, SessionDone done) {
  auto info = std::make_shared<SessionInfo>();
  MoveSessions(
      {&session_id, 1},
      [this, length, info](Sessions sessions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        Session& session = *sessions[0];
        if (const absl::Status status = CheckCut(session, "cut", length); !status.ok()) return status;
        for (int layer = 0; layer < session.cache.num_layers(); layer++) session.cache.Truncate(layer, length);
        sessions_.Touch(&session, absl::Now());
        *info = Describe(session);
        return absl::OkStatus();
      },
      [info, done = std::move(done)](absl::Status status) mutable {
        if (!status.ok()) return done(std::move(status));
        done(std::move(*info));
      });
}

absl::StatusOr<EngineImpl::SessionPtr> EngineImpl::Fork(const Session& parent, std::optional<int64_t> length) {
  const int64_t tokens = length.value_or(parent.cache.longest());
  if (absl::Status status = CheckCut(parent, "fork", tokens); !status.ok()) return status;
  std::shared_ptr<const SessionModel> model = parent.model;
  if (model->config.reserve_tokens > 0) {
    SessionConfig config = model->config;
    config.reserve_tokens = 0;
    model = std::make_shared<const SessionModel>(std::move(config));
  }
  absl::StatusOr<SessionPtr> child = OpenSession(std::move(model));
  if (child.ok()) (*child)->cache.ShareFrom(parent.cache, tokens);
  return child;
}

void EngineImpl::ForkSession(std::string session_id, std::optional<int64_t> length, SessionDone done) {
  auto info = std::make_shared<SessionInfo>();
  MoveSessions(
      {&session_id, 1},
      [this, length, info](Sessions sessions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        const absl::StatusOr<SessionPtr> child = Fork(*sessions[0], length);
        if (!child.ok()) return child.status();
        sessions_.Touch(sessions[0].get(), absl::Now());
        *info = Describe(**child);
        return absl::OkStatus();
      },
      [this, info, done = std::move(done)](absl::Status status) mutable {
        if (!status.ok()) return done(std::move(status));
        observer_->OnSessionCreated(EngineObserver::Origin::kFork);
        done(std::move(*info));
      });
}

void EngineImpl::ReorderSessions(std::vector<std::string> session_ids, std::vector<int> sources,
                                 absl::AnyInvocable<void(absl::StatusOr<std::vector<int64_t>>)> done) {
  if (absl::Status status = CheckReorder(session_ids, sources); !status.ok()) return done(std::move(status));
  auto lengths = std::make_shared<std::vector<int64_t>>();
  MoveSessions(
      session_ids,
      [this, sources = std::move(sources), lengths](Sessions sessions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        if (const absl::Status status = Reorder(sessions, sources); !status.ok()) return status;
        const absl::Time now = absl::Now();
        for (const SessionPtr& session : sessions) {
          sessions_.Touch(session.get(), now);
          lengths->push_back(session->cache.longest());
        }
        return absl::OkStatus();
      },
      [lengths, done = std::move(done)](absl::Status status) mutable {
        if (!status.ok()) return done(std::move(status));
        done(std::move(*lengths));
      });
}

}  // namespace attnd
