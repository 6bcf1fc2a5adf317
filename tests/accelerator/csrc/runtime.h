// The made-up accelerator itself: devices, streams, events, memory and faults, without tensors.
//
// Work is queued and done later by a thread of each stream.  Whoever waits is counted.

#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace sim {

// A point in the work of a stream.  Shared by the event that made it and by those who wait.
struct Mark {
  int device = 0;
  int64_t stream = 0;
  bool reached = false;
  std::chrono::steady_clock::time_point when;
};
using MarkPtr = std::shared_ptr<Mark>;

struct Counts {
  int64_t launches = 0;     // tasks that were queued
  int64_t waits = 0;        // times that the host waited, or could have had to
  int64_t copied_async = 0; // copies between host and device that nobody waited for
  int64_t copied_waiting = 0;
};

struct MemoryStats {
  int64_t allocated = 0, allocated_peak = 0, reserved = 0, reserved_peak = 0;
  int64_t blocks = 0, retries = 0, failures = 0;
};

// -- devices -------------------------------------------------------------------------------------

int visible_devices();                  // asks no driver
void show_devices(int count);           // hides all with 0
bool available();                       // asks the driver: forbids a child to use the device
bool initialized();
void initialize();                      // raises where a parent had initialised before the fork
bool in_bad_fork();
int current_device();
int exchange_device(int device);

// -- streams and events --------------------------------------------------------------------------

int64_t current_stream(int device);
int64_t exchange_stream(int device, int64_t stream);
int64_t new_stream(int device);
void enqueue(int device, int64_t stream, std::string name, std::function<void()> work);
MarkPtr mark(int device, int64_t stream);
void let_wait(int device, int64_t stream, const MarkPtr& mark);  // the stream, not the host
bool reached(const MarkPtr& mark);
void wait_for(const MarkPtr& mark, const std::string& reason);
void wait_for_stream(int device, int64_t stream, const std::string& reason);
void wait_for_device(int device, const std::string& reason);
void finish(int device, int64_t stream);  // the rest of a wait that is counted already
bool stream_is_done(int device, int64_t stream);

// -- memory --------------------------------------------------------------------------------------

void* allocate(int device, int64_t stream, size_t bytes);
void release(void* pointer);
void record_stream(void* pointer, int64_t stream);
void empty_cache();
MemoryStats memory_stats(int device);
std::vector<int64_t> blocks_in_use(int device);
void reset_peaks(int device);
void set_budget(int device, int64_t bytes);
int64_t budget(int device);

void* allocate_pinned(size_t bytes);
void release_pinned(void* pointer);
bool is_pinned(const void* pointer);
// Keeps a pinned block from being used again before the mark is reached.
void use_pinned(const void* pointer, const MarkPtr& mark);

// -- what tests do to it -------------------------------------------------------------------------

Counts counts(int device);
void count_copy(int device, bool waiting);
std::vector<std::string> reasons(int device);  // of the waits, in their order
void reset_counts();
void set_latency(double seconds);  // before a stream that was idle begins, unless somebody waits
void set_jitter(double seconds);   // each task begins up to so much later, by chance
void hold(bool held);              // nothing begins any more; who waits on this thread is an error
void forbid_waits(bool forbidden); // any wait on this thread is an error
void hang(int device, int64_t stream);  // a kernel that never ends, until release_hangs
void release_hangs();
void fail(int device, int64_t stream, int code, const std::string& words);  // when it is reached
void check(int device);  // raises what the device has reported
void stop();             // at exit: workers begin nothing any more

}  // namespace sim
