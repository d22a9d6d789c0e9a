#include "kernels/isa.h"

#include <cstdint>

#include "hwy/highway.h"
#include "oneapi/dnnl/dnnl.h"

namespace attnd {
namespace {

// oneDNN's instruction sets are bit masks: a set includes those whose bits it contains.
bool Includes(dnnl_cpu_isa_t have, dnnl_cpu_isa_t wanted) { return (unsigned{have} & wanted) == unsigned{wanted}; }

int64_t DisabledTargets(IsaLevel level) {
  // Numerically lower Highway targets are better.
  constexpr int64_t kBf16 = HWY_AVX3_SPR | HWY_AVX3_ZEN4;
  constexpr int64_t kAvx512 = HWY_AVX3 | HWY_AVX3_DL;
  switch (level) {
    case IsaLevel::kBaseline:
      return kBf16 | kAvx512 | HWY_AVX2 | HWY_SSE4 | HWY_SSSE3;
    case IsaLevel::kAvx2:
      return kBf16 | kAvx512;
    case IsaLevel::kAvx512:
      return kBf16;
    case IsaLevel::kAvx512Bf16:
      return 0;
  }
  return 0;
}

}  // namespace

IsaLevel MaxIsaLevel() {
  const dnnl_cpu_isa_t isa = dnnl_get_effective_cpu_isa();
  if (Includes(isa, dnnl_cpu_isa_avx512_core_bf16)) return IsaLevel::kAvx512Bf16;
  if (Includes(isa, dnnl_cpu_isa_avx512_core)) return IsaLevel::kAvx512;
  if (Includes(isa, dnnl_cpu_isa_avx2)) return IsaLevel::kAvx2;
  return IsaLevel::kBaseline;
}

bool OneDnnHasAmx() { return Includes(dnnl_get_effective_cpu_isa(), dnnl_cpu_isa_avx512_core_amx); }

const char* OneDnnIsaName() {
  switch (dnnl_get_effective_cpu_isa()) {
    case dnnl_cpu_isa_sse41:
      return "sse41";
    case dnnl_cpu_isa_avx:
      return "avx";
    case dnnl_cpu_isa_avx2:
      return "avx2";
    case dnnl_cpu_isa_avx2_vnni:
      return "avx2_vnni";
    case dnnl_cpu_isa_avx2_vnni_2:
      return "avx2_vnni_2";
    case dnnl_cpu_isa_avx512_core:
      return "avx512_core";
    case dnnl_cpu_isa_avx512_core_vnni:
      return "avx512_core_vnni";
    case dnnl_cpu_isa_avx512_core_bf16:
      return "avx512_core_bf16";
    case dnnl_cpu_isa_avx512_core_fp16:
      return "avx512_core_fp16";
    case dnnl_cpu_isa_avx512_core_amx:
      return "avx512_core_amx";
    case dnnl_cpu_isa_avx512_core_amx_fp16:
      return "avx512_core_amx_fp16";
    default:
      return Includes(dnnl_get_effective_cpu_isa(), dnnl_cpu_isa_avx512_core) ? "newer than avx512_core" : "baseline";
  }
}

bool InitIsaOnce() {
  hwy::DisableTargets(DisabledTargets(MaxIsaLevel()));
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  return true;
}

const char* HighwayTargetName() {
  InitIsa();
  // The best target that is both supported and compiled.
  const int64_t usable = hwy::SupportedTargets() & HWY_TARGETS;
  return usable == 0 ? "none" : hwy::TargetName(usable & -usable);
}

}  // namespace attnd
