#include "kernels/brgemm.h"

#include <cassert>
#include <map>
#include <mutex>

#include "oneapi/dnnl/dnnl_ukernel.h"

namespace attnd {
namespace {

// oneDNN's C interface: unlike the C++ one it returns its errors, and Execute takes a plain array of offsets.
dnnl_brgemm_t Handle(void* handle) { return static_cast<dnnl_brgemm_t>(handle); }

bool Generate(dnnl_brgemm_t handle) {
  if (dnnl_brgemm_finalize(handle) != dnnl_success) return false;
  size_t scratchpad = 0;
  if (dnnl_brgemm_get_scratchpad_size(handle, &scratchpad) != dnnl_success) return false;
  if (scratchpad > Brgemm::kScratchpadBytes) return false;
  return dnnl_brgemm_generate(handle) == dnnl_success;
}

}  // namespace

std::unique_ptr<Brgemm> Brgemm::Create(const BrgemmShape& s) {
  const dnnl_data_type_t type = s.bf16 ? dnnl_bf16 : dnnl_f32;
  dnnl_brgemm_t handle = nullptr;
  if (dnnl_brgemm_create(&handle, s.m, s.n, s.k, s.batch, s.lda, s.n, s.ldc, type, type, dnnl_f32) != dnnl_success) {
    return nullptr;
  }
  std::unique_ptr<Brgemm> object(new Brgemm(s, handle));
  return Generate(handle) ? std::move(object) : nullptr;
}

const Brgemm* Brgemm::Get(const BrgemmShape& shape) {
  static std::mutex mutex;
  // Never destroyed: threads may still compute while the process exits. Bounded: see shape_kernels.h.
  static auto* objects = new std::map<BrgemmShape, std::unique_ptr<Brgemm>>;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [place, is_new] = objects->try_emplace(shape);
  if (is_new) place->second = Create(shape);
  return place->second.get();
}

Brgemm::~Brgemm() { dnnl_brgemm_destroy(Handle(handle_)); }

void Brgemm::SetContext() const { dnnl_brgemm_set_hw_context(Handle(handle_)); }

void Brgemm::ReleaseContext() { dnnl_brgemm_release_hw_context(); }

bool Brgemm::Execute(const void* a, const void* b, const BrgemmOffsets* offsets, float* c, void* scratchpad) const {
  static_assert(sizeof(BrgemmOffsets) == 2 * sizeof(dnnl_dim_t));
  constexpr BrgemmOffsets kNone;
  if (shape_.batch == 1) {
    // On AMX a batch of one ignores its offsets (oneDNN 3.7.2), so they go into the pointers.
    a = static_cast<const std::byte*>(a) + offsets->a;
    b = static_cast<const std::byte*>(b) + offsets->b;
    offsets = &kNone;
  }
  return dnnl_brgemm_execute(Handle(handle_), a, b, reinterpret_cast<const dnnl_dim_t*>(offsets), c, scratchpad) ==
         dnnl_success;
}

}  // namespace attnd
