#include "tests/bench/report.h"

#include <cstdio>

namespace attnd::bench {
namespace {

void PrintJson(const Case& c, const Row& row, double ratio) {
  std::printf(
      "{\"name\": \"%s\", \"shape\": \"%s\", \"tokens\": %lld, \"kv\": \"%s\", \"threads\": %d, "
      "\"median_us\": %.2f, \"value\": %.6g, \"unit\": \"%s\", \"roof\": %.6g, \"ratio\": %.6g, \"bound\": \"%s\", "
      "\"batch\": %d, \"queries\": %lld, \"history\": %lld, \"shared\": %lld, \"resident\": \"%s\"",
      row.name.c_str(), c.shape.name.c_str(), static_cast<long long>(c.tokens), KvName(c.kv), c.threads, row.median_us,
      row.value, row.unit, row.roof, ratio, row.bound, c.batch, static_cast<long long>(c.queries),
      static_cast<long long>(c.history), static_cast<long long>(c.shared), ResidencyName(c.residency));
  for (const auto& [name, number] : row.numbers) std::printf(", \"%s\": %.6g", name, number);
  for (const auto& [name, word] : row.words) std::printf(", \"%s\": \"%s\"", name, word.c_str());
  std::printf("}\n");
}

void PrintText(const Case& c, const Row& row, double ratio) {
  std::printf("%-12s %-13s %7lld %-5s %7d %6d %7lld %-6s %11.1f %9.2f %-7s %9.2f %-8s %5.2f", row.name.c_str(),
              c.shape.name.c_str(), static_cast<long long>(c.tokens), KvName(c.kv), c.threads, c.batch,
              static_cast<long long>(c.queries), ResidencyName(c.residency), row.median_us, row.value, row.unit,
              row.roof, row.bound, ratio);
  if (c.history > 0) std::printf("  history=%lld", static_cast<long long>(c.history));
  if (c.shared > 0) std::printf("  shared=%lld", static_cast<long long>(c.shared));
  for (const auto& [name, number] : row.numbers) std::printf("  %s=%.2f", name, number);
  for (const auto& [name, word] : row.words) std::printf("  %s=%s", name, word.c_str());
  std::printf("\n");
}

}  // namespace

void Print(const Case& c, const Row& row) {
  const double ratio = row.roof > 0 ? row.value / row.roof : 0;
  c.json ? PrintJson(c, row, ratio) : PrintText(c, row, ratio);
  std::fflush(stdout);
}

void PrintHeading(bool json) {
  if (json) return;
  std::printf("%-12s %-13s %7s %-5s %7s %6s %7s %-6s %11s %9s %-7s %9s %-8s %5s\n", "name", "shape", "tokens", "kv",
              "threads", "batch", "queries", "from", "median_us", "value", "unit", "roof", "bound", "ratio");
}

}  // namespace attnd::bench
