// Compares the sampled answers with float64 on a thread of its own, at the lowest priority: it must neither delay the
// load nor take the server's processor where they share one.
#ifndef ATTND_CLIENT_ATTNLOAD_CHECKER_H_
#define ATTND_CLIENT_ATTNLOAD_CHECKER_H_

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>

#include "client/attnload/data.h"
#include "client/attnload/plan.h"
#include "client/attnload/recorder.h"
#include "client/cpp/types.h"

namespace attnd::attnload {

// Thread-safe.
class Checker {
 public:
  struct Task {
    Plan plan;
    std::string session_id;
    PlannedStep step;
    int kv_head;
    client::Tensor out;
  };

  Checker(const client::SessionConfig& config, const TensorPool* pool, Recorder* recorder);
  ~Checker();

  // Takes the task, or counts it as skipped when too many wait already.
  void Add(Task task);
  void Finish();  // returns once all tasks taken are done

 private:
  void Work();

  const client::SessionConfig config_;
  const TensorPool* const pool_;
  Recorder* const recorder_;
  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  std::deque<Task> tasks_;
  bool busy_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace attnd::attnload

#endif  // ATTND_CLIENT_ATTNLOAD_CHECKER_H_
