// What attnd_bench is asked to measure: lists of which every combination is a row.
#ifndef ATTND_TESTS_BENCH_OPTIONS_H_
#define ATTND_TESTS_BENCH_OPTIONS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/types.h"

namespace attnd::bench {

// The attention layer of a known model, or of --heads and --head_dim.
struct ModelShape {
  std::string name;
  int num_q_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
};
const std::vector<ModelShape>& ModelShapes();

// Where the cache is found: memory (layers take turns over more bytes than any cache holds) or the CPU's caches (one
// layer again and again).
enum class Residency { kMemory, kCache };

// An empty list was not given; WithDefaults fills it.
struct Options {
  std::vector<ModelShape> shapes;
  std::vector<int> head_dims;     // of --heads: one
  std::vector<ModelShape> heads;  // of --heads: one, without head_dim
  std::vector<int64_t> tokens;
  std::vector<int64_t> histories;
  std::vector<int64_t> shared;
  std::vector<KvDType> kvs;
  std::vector<int> batches;
  std::vector<int> queries;
  std::vector<int> steps;
  std::vector<DType> sources;
  std::vector<int> threads;
  std::vector<Residency> residencies;
  std::vector<std::string> of;
  int layers = 0;  // 0: as many as the residency needs
  std::string directory = "/tmp";
  double seconds = 2.0;
  bool json = false;
  bool sweep = false;
  bool list = false;
  bool help = false;
};

// Reads --name=value arguments of a mode. On error returns false and says in *error which, and what is wrong with it.
bool ParseOptions(std::string_view mode, const std::vector<std::string>& arguments, Options* options,
                  std::string* error);

// The options with everything filled in that was not given: one row's worth, or with --sweep a table's.
Options WithDefaults(std::string_view mode, Options options);

std::string OptionsHelp();
int UsableThreads();
const char* KvName(KvDType dtype);
const char* SourceName(DType dtype);
const char* ResidencyName(Residency residency);

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_OPTIONS_H_
