// attnctl session export | import.
#include <optional>
#include <string>

#include "absl/strings/str_format.h"
#include "client/attnctl/commands.h"
#include "client/attnctl/connection.h"
#include "client/attnctl/progress_bar.h"
#include "client/attnctl/snapshot_file.h"
#include "client/attnctl/transfer_command.h"

namespace attnd::attnctl {

int ExportSession(const Client& client, const std::string& id, const std::string& output) {
  absl::StatusOr<std::unique_ptr<SnapshotFile>> file = SnapshotFile::Create(output);
  if (!file.ok()) return PrintError(file.status());
  std::optional<ProgressBar> progress;
  int64_t bytes = 0;
  absl::Status status = client.ExportSession(id, [&](std::string_view piece, int64_t total_bytes) {
    if (!progress.has_value()) progress.emplace(total_bytes).SetLabel("exporting");
    bytes += static_cast<int64_t>(piece.size());
    progress->Advance(static_cast<int64_t>(piece.size()));
    return (*file)->Write(piece);
  });
  progress.reset();
  if (status.ok()) status = (*file)->Commit();
  if (!status.ok()) return PrintError(status, client.options().target);
  if (output != "-") absl::PrintF("%s: %s\n", output, HumanBytes(static_cast<double>(bytes)));
  return kDone;
}

int ImportSession(const Client& client, const std::string& input) {
  absl::StatusOr<std::unique_ptr<SnapshotInput>> file = SnapshotInput::Open(input);
  if (!file.ok()) return PrintError(file.status());
  std::optional<ProgressBar> progress;
  if ((*file)->total_bytes() > 0) progress.emplace((*file)->total_bytes()).SetLabel("importing");
  absl::StatusOr<client::Session> session = client.ImportSession([&] {
    absl::StatusOr<std::string> bytes = (*file)->Next();
    if (bytes.ok() && progress.has_value()) progress->Advance(static_cast<int64_t>(bytes->size()));
    return bytes;
  });
  progress.reset();
  if (!session.ok()) return PrintError(session.status(), client.options().target);
  absl::PrintF("%s\n", session->id());
  return kDone;
}

}  // namespace attnd::attnctl
