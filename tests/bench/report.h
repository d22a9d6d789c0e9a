// Rows of results, each with the roof that was measured in the same run.
#ifndef ATTND_TESTS_BENCH_REPORT_H_
#define ATTND_TESTS_BENCH_REPORT_H_

#include <string>
#include <utility>
#include <vector>

#include "tests/bench/cases.h"

namespace attnd::bench {

struct Row {
  std::string name;
  double median_us = 0;
  double value = 0;  // in `unit`
  const char* unit = "";
  double roof = 0;         // in `unit`: what the machine could do at best, measured in the same run
  const char* bound = "";  // which roof that is: read, multiply, copy, echo
  // What only this mode's rows have: a name, and a number or (quoted by Print) a word.
  std::vector<std::pair<const char*, double>> numbers;
  std::vector<std::pair<const char*, std::string>> words;
};

void Print(const Case& c, const Row& row);

// The line above the rows, where people read them.
void PrintHeading(bool json);

}  // namespace attnd::bench

#endif  // ATTND_TESTS_BENCH_REPORT_H_
