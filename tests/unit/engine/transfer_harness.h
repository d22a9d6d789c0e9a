// Snapshots out of an engine and into it, waited for.
#ifndef ATTND_TESTS_UNIT_ENGINE_TRANSFER_HARNESS_H_
#define ATTND_TESTS_UNIT_ENGINE_TRANSFER_HARNESS_H_

#include <gtest/gtest.h>

#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "tests/unit/engine/engine_harness.h"

namespace attnd {

using ExportResult = absl::StatusOr<std::unique_ptr<SessionExport>>;

inline std::future<ExportResult> StartExport(Harness* h, const std::string& id) {
  auto promise = std::make_shared<std::promise<ExportResult>>();
  h->engine->ExportSession(id, [promise](ExportResult result) { promise->set_value(std::move(result)); });
  return promise->get_future();
}

// All that is left of an export.
inline std::string ReadAll(SessionExport* source) {
  std::string all;
  for (;;) {
    const absl::StatusOr<std::string> piece = source->Next();
    EXPECT_TRUE(piece.ok()) << piece.status();
    if (!piece.ok() || piece->empty()) break;
    EXPECT_LE(piece->size(), size_t{1} << 20);
    all += *piece;
  }
  EXPECT_EQ(static_cast<int64_t>(all.size()), source->total_bytes());
  return all;
}

inline std::string Export(Harness* h, const std::string& id) {
  const ExportResult source = StartExport(h, id).get();
  EXPECT_TRUE(source.ok()) << source.status();
  return source.ok() ? ReadAll(source->get()) : "";
}

inline std::future<absl::StatusOr<SessionInfo>> Finish(SessionImport* target) {
  auto promise = std::make_shared<std::promise<absl::StatusOr<SessionInfo>>>();
  target->Finish([promise](absl::StatusOr<SessionInfo> info) { promise->set_value(std::move(info)); });
  return promise->get_future();
}

// In pieces of `piece` bytes.
inline absl::StatusOr<SessionInfo> Import(Harness* h, absl::string_view bytes,
                                          const std::optional<SessionConfig>& expected = std::nullopt,
                                          size_t piece = 1000) {
  const std::unique_ptr<SessionImport> target = h->engine->ImportSession(expected);
  while (!bytes.empty()) {
    if (absl::Status status = target->Write(bytes.substr(0, piece)); !status.ok()) return status;
    bytes.remove_prefix(std::min(piece, bytes.size()));
  }
  return Finish(target.get()).get();
}

inline std::string ReasonOf(const absl::Status& status) { return GetErrorDetails(status).reason; }

}  // namespace attnd

#endif  // ATTND_TESTS_UNIT_ENGINE_TRANSFER_HARNESS_H_
