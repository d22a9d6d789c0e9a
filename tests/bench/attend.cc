#include "tests/bench/attend.h"

#include <string>

#include "tests/bench/measure.h"
#include "tests/bench/read_stream.h"

namespace attnd::bench {

AttendWorks::AttendWorks(const Case& c, Layers* layers)
    : case_(c), layers_(layers), pool_(c.threads), batch_(c.threads), peak_(&pool_, c.kv) {}

void AttendWorks::Attend() {
  batch_.Clear();
  for (const AttentionWork& work : layers_->Works(layers_->Next())) batch_.Add(work);
  pool_.Run(batch_.Plan(), [this](int task, int thread) { batch_.Run(task, thread); });
}

std::vector<std::function<void()>> AttendWorks::works() {
  return {[this] { Attend(); }, [this] { ReadStream(&pool_, layers_->data(layers_->Next()), layers_->bytes()); },
          [this] { peak_.Run(); }};
}

// Every query multiplies with the keys up to its own, once for the scores and once for the values.
double AttendWorks::flops() const {
  const double queries = static_cast<double>(case_.queries), context = static_cast<double>(case_.context());
  const double pairs = queries * context - 0.5 * queries * (queries - 1);
  return 4.0 * case_.batch * case_.shape.num_q_heads * case_.shape.head_dim * pairs;
}

Roofline AttendWorks::RooflineOf(const double* medians) const {
  const double read = medians[1], multiply = flops() / (peak_.flops() / medians[2]);
  return read > multiply ? Roofline{read, "read"} : Roofline{multiply, "multiply"};
}

Row AttendWorks::MakeRow(const char* name, const double* medians, bool flops_per_second) const {
  const Roofline roofline = RooflineOf(medians);
  const double amount = (flops_per_second ? flops() : bytes()) / 1e9;
  Row row;
  row.name = name;
  row.median_us = medians[0] * 1e6;
  row.value = amount / medians[0];
  row.unit = flops_per_second ? "GFLOP/s" : "GB/s";
  row.roof = amount / roofline.seconds;
  row.bound = roofline.bound;
  row.numbers = {{"read_gbs", bytes() / medians[1] / 1e9}, {"multiply_gflops", peak_.flops() / medians[2] / 1e9}};
  return row;
}

int RunAttend(const char* mode, const Options& options, bool flops_per_second) {
  PrintHeading(options.json);
  const bool all = ForEachCase(mode, options, [&](const Case& c) {
    Layers layers(c);
    AttendWorks works(c, &layers);
    const std::vector<double> medians = MediansInterleaved(c.seconds, works.works());
    Print(c, works.MakeRow(mode, medians.data(), flops_per_second));
  });
  return all ? 0 : 1;
}

}  // namespace attnd::bench
