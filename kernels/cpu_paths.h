// Which instruction sets this process computes with, for build_info, GetServerInfo and the tests.
#ifndef ATTND_KERNELS_CPU_PATHS_H_
#define ATTND_KERNELS_CPU_PATHS_H_

#include <string>

#include "kernels/types.h"

namespace attnd {

std::string IsaName();        // e.g. "avx512_core_amx": what oneDNN uses, ONEDNN_MAX_CPU_ISA included
std::string OneDnnVersion();  // e.g. "3.7.2"

// How works of a KV dtype are computed, for people: e.g.
// "up to 32 rows: streaming (AVX3_ZEN4), more: brgemm f32 (avx512_core)".
std::string KernelPath(KvDType dtype);

// Computes small cases (few and many rows, dimensions with and without a rest, 65 keys) on every path that this machine
// uses and compares it with the reference. False means that this machine's products are wrong: the server must not
// serve.
bool SelfTest(std::string* what);

}  // namespace attnd

#endif  // ATTND_KERNELS_CPU_PATHS_H_
