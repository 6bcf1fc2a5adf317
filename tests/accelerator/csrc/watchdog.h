// What a group has beside its collectives: its communicator, the works that it hands out, the
// thread that watches them, and the one that watches that thread.  See docs/gpu.md for sources.
//
// Read from the environment, by NCCL's names and with its defaults:
//   TORCH_NCCL_ASYNC_ERROR_HANDLING      3: 0 none, 1 abort and tear down, 2 abort, 3 tear down
//   TORCH_NCCL_BLOCKING_WAIT             0
//   TORCH_NCCL_RETHROW_CUDA_ERRORS       1
//   TORCH_NCCL_ENABLE_MONITORING         1
//   TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC     480
//   TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC  50, where NCCL has 15000: no test waits for a minute

#pragma once

#include "runtime.h"

#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <iostream>
#include <list>
#include <mutex>
#include <optional>
#include <thread>

namespace sim {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kLook = 50ms;    // how often the watchdog looks; NCCL's does every 100 ms
constexpr auto kListen = 50ms;  // how often its monitor looks; NCCL's does every second
constexpr auto kPoll = 100us;   // how often a kernel looks whether gloo is done

inline int number_from(std::initializer_list<const char*> variables, int otherwise) {
  for (const char* each : variables) {
    const char* text = std::getenv(each);
    if (text != nullptr && *text != 0) return std::atoi(text);
  }
  return otherwise;
}

// What NCCL is told: it outlives the group, its works and its threads.
struct Communicator {
  std::mutex lock;
  std::condition_variable changed;
  std::atomic<bool> aborted{false};
  std::string error;  // as ncclCommGetAsyncError has it
  std::mutex order;   // of calls
  MarkPtr last;       // the end of what was queued last

  std::string what_failed() {
    const std::lock_guard<std::mutex> guard(lock);
    return error;
  }
  // Kernels that are under way end, whatever they have done; nothing can be queued any more.
  void end_kernels() {
    aborted = true;
    changed.notify_all();
  }
  // Returns once the device is through with them: behind a kernel that hangs that is never.
  void abort() {
    const std::lock_guard<std::mutex> guard(in_use_);
    end_kernels();
    drain();
  }
  void finalize() {
    const std::lock_guard<std::mutex> guard(in_use_);
    if (!aborted) drain();
  }

 private:
  void drain() {
    MarkPtr end;
    {
      const std::lock_guard<std::mutex> guard(order);
      end = last;
    }
    try {
      if (end != nullptr) wait_for(end, "communicator");
    } catch (const c10::AcceleratorError&) {
      // A device that has failed is through with everything.
    }
  }

  std::mutex in_use_;  // an abort does not come through while another thread finalizes
};

struct SimWork final : c10d::Work {
  // What the watchdog's copy has in common with the program's: everything but the exception.
  struct Queued {
    std::shared_ptr<Communicator> communicator;
    int device = 0;
    std::chrono::milliseconds limit{0};
    Clock::time_point began = Clock::now();
    MarkPtr start, end;
    uint64_t sequence = 0;
    bool blocks = false;
    c10::intrusive_ptr<c10::ivalue::Future> outcome;
  };

  SimWork(int rank, c10d::OpType type, std::vector<at::Tensor> results, Queued queued)
      : Work(rank, type), results_(std::move(results)), queued(std::move(queued)) {}

  // The watchdog's copy, which keeps no tensors.
  c10::intrusive_ptr<SimWork> copy() const {
    return c10::make_intrusive<SimWork>(rank_, opType_, std::vector<at::Tensor>(), queued);
  }

  bool isCompleted() override {
    if (!queued.communicator->aborted) check_communicator();
    return exception() != nullptr || reached(queued.end);
  }
  bool isSuccess() const override {
    C10_THROW_ERROR(NotImplementedError, "WorkSIMCCL::isSuccess() is deprecated");
  }
  std::exception_ptr exception() const override {
    const std::lock_guard<std::mutex> guard(mutex_);
    return exception_;
  }
  std::vector<at::Tensor> result() override { return results_; }
  void synchronize() override {
    let_wait(queued.device, current_stream(queued.device), queued.end);
  }
  // The current stream waits; the host only where it is told to, and for a barrier.
  bool wait(std::chrono::milliseconds timeout) override {
    synchronize();
    if (queued.blocks || timeout != kNoTimeout) {
      while (!isCompleted()) {
        if (check_timeout(timeout == kNoTimeout ? queued.limit : timeout)) {
          say(described() + " timed out in blocking wait.");
          break;
        }
        std::this_thread::sleep_for(kPoll);
      }
    } else if (opType_ == c10d::OpType::BARRIER && !isCompleted()) {
      wait_for_stream(queued.device, current_stream(queued.device), "barrier");
    }
    if (exception() != nullptr) {
      queued.communicator->abort();
      handle(true);
    }
    return true;
  }
  void abort() override { queued.communicator->abort(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override { return queued.outcome; }
  float getDuration() const override {
    TORCH_CHECK(queued.start != nullptr, "getDuration only works if timing was enabled");
    TORCH_CHECK(
        reached(queued.start) && reached(queued.end), "the collective is under way");
    return std::chrono::duration<float, std::milli>(queued.end->when - queued.start->when).count();
  }
  uint64_t getSequencenumber() const override { return queued.sequence; }

  void check_communicator() {
    if (exception() != nullptr) return;
    const std::string error = queued.communicator->what_failed();
    if (error.empty()) return;
    fail("SIMCCL error: remote process exited or there was a network error: " + error);
    became(c10d::WorkResult::COMM_ERROR);
  }
  bool check_timeout(std::chrono::milliseconds limit) {
    const auto took =
        std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - queued.began);
    if (took < limit) return false;
    const std::string words = "Watchdog caught collective operation timeout: " + described() +
        " ran for " + std::to_string(took.count()) + " milliseconds before timing out.";
    say(words);
    fail(words);
    became(c10d::WorkResult::TIMEOUT);
    return true;
  }
  void handle(bool tear_down) {
    if (exception() == nullptr) return;
    say("Some SIMCCL operations have failed or timed out. Due to the asynchronous nature of SIM "
        "kernels, subsequent operations might run on corrupted/incomplete data.");
    if (!tear_down) return;
    say("To avoid data inconsistency, we are taking the entire process down.");
    std::rethrow_exception(exception());
  }
  void became(c10d::WorkResult result) {
    if (!queued.outcome->completed()) {
      queued.outcome->markCompleted(at::IValue(static_cast<uint8_t>(result)));
    }
  }

 private:
  std::string described() const {
    return "WorkSIMCCL(SeqNum=" + std::to_string(queued.sequence) + ", OpType=" +
        c10d::opTypeToString(opType_) + ", Timeout(ms)=" + std::to_string(queued.limit.count()) +
        ")";
  }
  void say(const std::string& words) const {
    std::cerr << "[Rank " + std::to_string(rank_) + "] " + words + "\n" << std::flush;
  }
  void fail(const std::string& words) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!exception_) {
      exception_ = std::make_exception_ptr(c10::DistBackendError(
          {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, words));
    }
  }

  std::vector<at::Tensor> results_;

 public:
  const Queued queued;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

// Ends the process a while after a watchdog of it has found something, unless its group is ended
// before.  The first group of a process has it.  NCCL's looks, too, whether the watchdog is stuck.
class Monitor {
 public:
  static void signal() { found_ = true; }

  void start() {
    static std::atomic<int> groups{0};
    if (groups++ == 0) thread_ = std::thread([this] { run(); });
  }
  void stop() {
    {
      const std::lock_guard<std::mutex> guard(lock_);
      stopped_ = true;
    }
    changed_.notify_all();
  }
  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  void run() {
    std::unique_lock<std::mutex> guard(lock_);
    const auto stopped = [this] { return stopped_; };
    while (!found_) {
      if (changed_.wait_for(guard, kListen, stopped)) return;
    }
    const auto patience =
        std::chrono::seconds(number_from({"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"}, 480));
    if (changed_.wait_for(guard, patience, stopped)) return;
    if (number_from({"TORCH_NCCL_ENABLE_MONITORING"}, 1) == 0) return;
    std::cerr << "Terminating the process after attempting to dump debug info, due to collective "
                 "timeout or exception."
              << std::endl;
    std::abort();
  }

  static inline std::atomic<bool> found_{false};
  std::mutex lock_;
  std::condition_variable changed_;
  bool stopped_ = false;
  std::thread thread_;
};

class Watchdog {
 public:
  explicit Watchdog(std::shared_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)),
        handling_(number_from({"TORCH_NCCL_ASYNC_ERROR_HANDLING", "NCCL_ASYNC_ERROR_HANDLING"}, 3)),
        rethrows_(number_from({"TORCH_NCCL_RETHROW_CUDA_ERRORS"}, 1) != 0),
        for_dumps_(4 * number_from({"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"}, 50)) {}

  void start() {
    monitor_.start();
    thread_ = std::thread([this] { run(); });
  }
  // Waits while the watchdog gives time to write dumps, as NCCL's list is locked meanwhile.
  void watch(c10::intrusive_ptr<SimWork> work) {
    if (!thread_.joinable()) return;
    const std::lock_guard<std::mutex> guard(lock_);
    works_.push_back(std::move(work));
  }
  // Once all works are done it ends.
  void let_end() {
    ending_ = true;
    changed_.notify_all();
  }
  // At once, where the device does nothing any more.
  void leave() {
    left_ = true;
    let_end();
  }
  void join() {
    if (thread_.joinable()) thread_.join();
    monitor_.stop();
    monitor_.join();
  }
  void stop_monitor() { monitor_.stop(); }
  bool is_ending() const { return ending_; }
  c10d::ErrorType error() const { return error_; }

 private:
  void run() {
    try {
      look_until_done();
    } catch (const std::exception& error) {
      const std::string words =
          std::string("Process group watchdog thread terminated with exception: ") + error.what();
      std::cerr << words + "\n" << std::flush;
      if (!rethrows_ && words.find("SIM Error") == std::string::npos) return;
      // Out of a thread: std::terminate.
      throw c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, words);
    }
  }

  void look_until_done() {
    bool done = false;
    while ((!done || !ending_) && !left_) {
      std::unique_lock<std::mutex> guard(lock_);
      changed_.wait_for(guard, kLook, [this] { return ending_.load(); });
      for (auto at = works_.begin(); at != works_.end() && !left_;) {
        SimWork& work = **at;
        if (!ending_) work.check_communicator();
        if (work.exception()) note(c10d::ErrorType::COMM_ERROR);
        if (!work.exception() && work.check_timeout(work.queued.limit)) {
          note(c10d::ErrorType::TIMEOUT);
        }
        if (work.exception()) {
          Monitor::signal();
          std::this_thread::sleep_for(for_dumps_);
          if (handling_ == 1 || handling_ == 2) communicator_->abort();
          work.handle(handling_ == 1 || handling_ == 3);
        }
        if (!work.isCompleted()) {
          ++at;
          continue;
        }
        if (!work.exception()) work.became(c10d::WorkResult::SUCCESS);
        at = works_.erase(at);
      }
      done = works_.empty();
      guard.unlock();
      if (ending_ && !done) std::this_thread::sleep_for(1ms);
    }
  }

  // The first one stays.
  void note(c10d::ErrorType error) {
    if (error_ == c10d::ErrorType::SUCCESS) error_ = error;
  }

  const std::shared_ptr<Communicator> communicator_;
  const int handling_;
  const bool rethrows_;
  const std::chrono::milliseconds for_dumps_;
  std::atomic<bool> ending_{false}, left_{false};
  std::atomic<c10d::ErrorType> error_{c10d::ErrorType::SUCCESS};
  std::mutex lock_;
  std::condition_variable changed_;
  std::list<c10::intrusive_ptr<SimWork>> works_;
  Monitor monitor_;
  std::thread thread_;
};

}  // namespace sim
