#include "server/engine/stored_session.h"

#include "absl/strings/str_cat.h"
#include "server/engine/session_snapshot.h"

namespace attnd {

SnapshotSource PinSession(const Session& session, BlockPool* pool) {
  const SessionConfig& config = session.model->config;
  SnapshotSource source;
  source.cache =
      std::make_unique<SessionCache>(pool, session.cache.block_bytes(), config.num_layers, config.heads.num_kv_heads);
  source.cache->Pin(session.cache);
  source.header = MakeSnapshotHeader(LayoutOf(session.cache, *session.model), {config, IdentityOf(session)});
  return source;
}

absl::Status ReadSession(const SnapshotStore& store, const std::string& name, SessionCache* cache,
                         const BlockLayout& layout, absl::FunctionRef<bool()> stop) {
  absl::StatusOr<std::unique_ptr<SnapshotStore::File>> file = store.Read(name);
  if (!file.ok()) return file.status();
  SnapshotReader reader;
  bool has_target = false;
  for (std::string piece;;) {
    if (stop()) return absl::CancelledError("the server is shutting down");
    absl::Status status = (*file)->Next(&piece);
    if (!status.ok()) return status;
    if (piece.empty()) return reader.Finish();
    status = reader.Write(piece);
    if (status.ok() && reader.header() != nullptr && !has_target) {
      status = reader.SetTarget(cache, &layout);
      has_target = true;
    }
    if (!status.ok()) return status;
  }
}

absl::StatusOr<SnapshotHeader> ReadHeader(const SnapshotStore& store, const std::string& name) {
  absl::StatusOr<std::unique_ptr<SnapshotStore::File>> file = store.Read(name);
  if (!file.ok()) return file.status();
  SnapshotReader reader;
  for (std::string piece; reader.header() == nullptr;) {
    absl::Status status = (*file)->Next(&piece);
    if (!status.ok()) return status;
    status = piece.empty() ? reader.Finish() : reader.Write(piece);
    if (!status.ok()) return status;
  }
  if (reader.total_bytes() != (*file)->bytes()) {
    return absl::InvalidArgumentError(
        absl::StrCat("the file has ", (*file)->bytes(), " bytes, its session needs ", reader.total_bytes()));
  }
  return *reader.header();
}

}  // namespace attnd
