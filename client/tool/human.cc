#include "client/tool/human.h"

#include <cmath>
#include <iterator>

#include "absl/strings/str_format.h"

namespace attnd::tool {

std::string HumanBytes(double bytes) {
  const char* const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(units)) {
    bytes /= 1024;
    ++unit;
  }
  if (bytes == std::floor(bytes)) return absl::StrFormat("%.0f %s", bytes, units[unit]);
  return absl::StrFormat("%.2f %s", bytes, units[unit]);
}

}  // namespace attnd::tool
