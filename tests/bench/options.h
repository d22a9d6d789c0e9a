// What attnd_bench is asked to measure.
#ifndef ATTND_TESTS_BENCH_OPTIONS_H_
#define ATTND_TESTS_BENCH_OPTIONS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "kernels/types.h"

namespace attnd::bench {

// The attention layer of a known model.
struct ModelShape {
  const char* name;
  int num_q_heads;
  int num_kv_heads;
  int head_dim;
};
const std::vector<ModelShape>& ModelShapes();

struct Options {
  ModelShape shape = {"llama3-8b", 32, 8, 128};
  int64_t tokens = 4096;
  KvDType kv = KvDType::kF32;
  int threads = 0;       // 0: as many as this process may use
  int layers = 0;        // 0: as many as make the cache come from memory
  double seconds = 2.0;  // of measurement
  bool json = false;

  KvShape kv_shape() const { return {shape.head_dim, shape.head_dim, kv}; }
  HeadCounts heads() const { return {shape.num_q_heads, shape.num_kv_heads}; }
};

// Reads --name=value arguments. On error returns false and says why in *error.
bool ParseOptions(const std::vector<std::string>& arguments, Options* options, std::string* error);

std::string OptionsHelp();
const char* KvName(KvDType dtype);

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_OPTIONS_H_
