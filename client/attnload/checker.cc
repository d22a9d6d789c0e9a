#include "client/attnload/checker.h"

#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <utility>

namespace attnd::attnload {
namespace {

constexpr size_t kMostWaiting = 256;

}  // namespace

Checker::Checker(const client::SessionConfig& config, const TensorPool* pool, Recorder* recorder)
    : config_(config), pool_(pool), recorder_(recorder), thread_([this] { Work(); }) {}

Checker::~Checker() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

void Checker::Add(Task task) {
  bool room = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    room = tasks_.size() < kMostWaiting;
    if (room) tasks_.push_back(std::move(task));
  }
  if (room) {
    wake_.notify_one();
  } else {
    recorder_->CheckSkipped();
  }
}

void Checker::Finish() {
  std::unique_lock<std::mutex> lock(mutex_);
  idle_.wait(lock, [this] { return tasks_.empty() && !busy_; });
}

void Checker::Work() {
  // Of this thread alone: on Linux a nice value is a thread's.
  setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19);
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (stopping_) return;
    const Task task = std::move(tasks_.front());
    tasks_.pop_front();
    busy_ = true;
    lock.unlock();
    recorder_->Check(CheckKind::kReference, task.session_id, task.plan.session(),
                     CheckReference(task.plan, config_, *pool_, task.step, task.kv_head, task.out));
    lock.lock();
    busy_ = false;
    if (tasks_.empty()) idle_.notify_all();
  }
}

}  // namespace attnd::attnload
