// A running attnd, the program itself, and what the system knows of its process.
#ifndef ATTND_TESTS_SERVICE_PROGRAM_H_
#define ATTND_TESTS_SERVICE_PROGRAM_H_

#include <grpcpp/channel.h>
#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace attnd::testing {

class Program {
 public:
  // Starts it, with its output in files. open_files: its limit of open files (ulimit -n), 0 for this process's.
  explicit Program(const std::vector<std::string>& arguments, const std::vector<std::string>& environment = {},
                   int open_files = 0);
  ~Program();  // kills what still runs
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  // On free ports with a small cache, and what else is told; fails the test if it does not start.
  static std::unique_ptr<Program> Serving(const std::vector<std::string>& arguments = {}, int open_files = 0);

  std::string out() const;
  std::string err() const;
  void Signal(int signal_number);
  // Exit status, or 1000 + signal.
  int Wait();
  // Waits for the start-up line and takes the addresses from it.
  bool AwaitStart();

  std::string address, metrics_address;

  // A connection of its own.
  std::shared_ptr<grpc::Channel> NewChannel() const;
  // By series, as scraped.
  std::map<std::string, double> Metrics() const;

  // From /proc.
  int64_t ResidentBytes() const;
  double CpuSeconds() const;  // user and system
  int Threads() const;
  int OpenFiles() const;

 private:
  pid_t pid_;
  std::string out_path_, err_path_;
};

}  // namespace attnd::testing

#endif  // ATTND_TESTS_SERVICE_PROGRAM_H_
