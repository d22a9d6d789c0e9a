// How far this process may go in instruction sets: what the CPU has, cut by ONEDNN_MAX_CPU_ISA. oneDNN follows that
// variable by itself; InitIsa makes Highway's dynamic dispatch follow it too, so that one setting decides every path.
#ifndef ATTND_KERNELS_ISA_H_
#define ATTND_KERNELS_ISA_H_

namespace attnd {

enum class IsaLevel { kBaseline, kAvx2, kAvx512, kAvx512Bf16 };  // AMX is asked for apart: OneDnnHasAmx

IsaLevel MaxIsaLevel();
const char* OneDnnIsaName();
bool OneDnnHasAmx();  // tiles of bf16 and s8; oneDNN has asked the system for leave to use them

// REQUIRES: called before any HWY_DYNAMIC_DISPATCH of this library. Thread-safe, cheap after the first call.
bool InitIsaOnce();
inline void InitIsa() {
  static const bool kDone = InitIsaOnce();
  (void)kDone;
}

// Name of the Highway target that dynamic dispatch chooses, e.g. "AVX3_SPR".
const char* HighwayTargetName();

}  // namespace attnd

#endif  // ATTND_KERNELS_ISA_H_
