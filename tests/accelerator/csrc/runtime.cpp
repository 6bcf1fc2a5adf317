#include "runtime.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iostream>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <tuple>
#include <unordered_map>

namespace sim {
namespace {

constexpr int kMostDevices = 16;
constexpr int64_t kPool = 32;  // streams of a device beside the default one, as torch has for CUDA
constexpr size_t kRounding = 512;
constexpr size_t kAlignment = 64;
constexpr size_t kMostQueued = 1024;  // CUDA's queue of launches is about as long
constexpr size_t kMostReasons = 1000;

struct Task {
  std::string name;
  std::function<void()> work;
};

struct Stream {
  std::deque<Task> queue;
  uint64_t queued = 0, done = 0;
  int hurrying = 0;  // how many wait for it
  bool started = false, running = false;
  std::chrono::steady_clock::time_point due;
};

struct Block {
  size_t size = 0;
  int device = 0;
  int64_t stream = 0;
  std::set<int64_t> other_streams;
  std::vector<MarkPtr> until;  // set when it is freed
};

struct PinnedBlock {
  size_t size = 0;
  bool freed = false;
  std::vector<MarkPtr> until;
};

struct Device {
  std::map<int64_t, Stream> streams;
  int64_t next_stream = 0;
  Counts counts;
  std::vector<std::string> reasons;
  int error = 0;
  std::string words;
  int64_t budget = int64_t{1} << 30;
  MemoryStats memory;
};

// Never destroyed: workers may still run when the process exits.
struct Runtime {
  std::mutex lock;
  std::condition_variable work, progress;
  Device devices[kMostDevices];
  int visible = 2;
  bool initialized = false;
  double latency = 0.002, jitter = 0;
  bool held = false, stopped = false;
  uint64_t released_hangs = 0;
  std::thread::id holder;
  std::unordered_map<void*, Block> blocks;
  std::map<std::tuple<int, int64_t, size_t>, std::vector<void*>> cached;
  std::vector<void*> freed_later;
  std::map<const char*, PinnedBlock> pinned;
};

Runtime& runtime() {
  static Runtime* const it = new Runtime();
  return *it;
}

std::atomic<bool> asked_driver{false}, bad_fork{false};
thread_local int the_device = 0;
thread_local int64_t the_streams[kMostDevices] = {};
thread_local bool waits_forbidden = false;
thread_local bool is_worker = false;

void in_child() {
  if (asked_driver.load()) bad_fork = true;
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, in_child);

[[noreturn]] void raise_device(int code, const std::string& words) {
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, code,
      "SIM error: " + words +
          "\nSIM kernel errors might be asynchronously reported at some other API call, so the "
          "stacktrace below might be incorrect.\n");
}

void check_locked(Device& device) {
  if (device.error != 0) raise_device(device.error, device.words);
}

Device& device_at(int device) {
  TORCH_CHECK(
      device >= 0 && device < runtime().visible, "SIM error: invalid device ordinal ", device);
  return runtime().devices[device];
}

void fail_locked(Device& device, int code, const std::string& words) {
  if (device.error == 0) {
    device.error = code;
    device.words = words;
  }
  runtime().progress.notify_all();
  runtime().work.notify_all();
}

void work_on(int at, int64_t id) {
  is_worker = true;
  the_device = at;
  the_streams[at] = id;
  Runtime& all = runtime();
  Device& device = all.devices[at];
  std::minstd_rand chance(std::random_device{}());
  std::uniform_real_distribution<double> uniform;
  std::unique_lock<std::mutex> guard(all.lock);
  Stream& stream = device.streams[id];
  for (;;) {
    all.work.wait(guard, [&] { return !stream.queue.empty() && !all.stopped; });
    all.work.wait_until(guard, stream.due, [&] {
      return stream.hurrying > 0 || stream.queue.size() >= kMostQueued || all.stopped;
    });
    while (!stream.queue.empty()) {
      all.work.wait(guard, [&] { return !all.held && !all.stopped; });
      Task task = std::move(stream.queue.front());
      stream.queue.pop_front();
      const bool dropped = device.error != 0;
      const double late = all.jitter * uniform(chance);
      stream.running = true;
      guard.unlock();
      if (late > 0) std::this_thread::sleep_for(std::chrono::duration<double>(late));
      int code = 0;
      std::string words;
      if (!dropped) {
        try {
          task.work();
        } catch (const c10::AcceleratorError& error) {
          code = error.get_error_code();
          words = error.what_without_backtrace();
        } catch (const std::exception& error) {
          // What an index out of range is on a GPU.
          code = 710;
          words = "device-side assert triggered";
          const auto* of_torch = dynamic_cast<const c10::Error*>(&error);
          std::cerr << "sim: " << task.name << ": "
                    << (of_torch ? of_torch->what_without_backtrace() : error.what()) << std::endl;
        }
      }
      task.work = nullptr;
      guard.lock();
      if (code != 0) fail_locked(device, code, words);
      ++stream.done;
      stream.running = false;
      all.progress.notify_all();
    }
  }
}

void enqueue_locked(
    std::unique_lock<std::mutex>& guard, int at, int64_t id, std::string name,
    std::function<void()> work) {
  Runtime& all = runtime();
  Device& device = device_at(at);
  check_locked(device);
  Stream& stream = device.streams[id];
  if (!stream.started) {
    stream.started = true;
    std::thread(work_on, at, id).detach();
  }
  // A queue that is full blocks who launches, as CUDA's does.
  all.progress.wait(guard, [&] {
    return stream.queue.size() < kMostQueued || all.held || device.error != 0 || is_worker;
  });
  if (stream.queued == stream.done) {
    stream.due = std::chrono::steady_clock::now() +
        std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                     std::chrono::duration<double>(all.latency));
  }
  stream.queue.push_back({std::move(name), std::move(work)});
  ++stream.queued;
  ++device.counts.launches;
  all.work.notify_all();
}

void count_wait(Device& device, const std::string& reason) {
  Runtime& all = runtime();
  if (is_worker) return;
  ++device.counts.waits;
  if (device.reasons.size() < kMostReasons) device.reasons.push_back(reason);
  TORCH_CHECK(!waits_forbidden, "sim: the host waits, which is forbidden here: ", reason);
  TORCH_CHECK(
      !all.held || all.holder != std::this_thread::get_id(),
      "sim: the host waits for a device that it has put on hold: ", reason);
}

// For all that was queued on the stream until now.
void drain_locked(std::unique_lock<std::mutex>& guard, Device& device, int64_t id) {
  Runtime& all = runtime();
  auto found = device.streams.find(id);
  if (found == device.streams.end()) return;
  Stream& stream = found->second;
  const uint64_t until = stream.queued;
  ++stream.hurrying;
  all.work.notify_all();
  all.progress.wait(guard, [&] {
    return stream.done >= until || (device.error != 0 && !stream.running);
  });
  --stream.hurrying;
}

void drain_device(std::unique_lock<std::mutex>& guard, Device& device) {
  std::vector<int64_t> ids;
  for (auto& [id, stream] : device.streams) ids.push_back(id);
  for (int64_t id : ids) drain_locked(guard, device, id);
}

bool all_reached(const std::vector<MarkPtr>& marks) {
  return std::all_of(marks.begin(), marks.end(), [](const MarkPtr& m) { return m->reached; });
}

MarkPtr mark_locked(std::unique_lock<std::mutex>& guard, int at, int64_t id) {
  auto made = std::make_shared<Mark>();
  made->device = at;
  made->stream = id;
  enqueue_locked(guard, at, id, "event", [made] {
    std::lock_guard<std::mutex> inner(runtime().lock);
    made->when = std::chrono::steady_clock::now();
    made->reached = true;
  });
  --runtime().devices[at].counts.launches;
  return made;
}

void cache_block(void* pointer, Block& block) {
  block.other_streams.clear();
  block.until.clear();
  runtime().cached[{block.device, block.stream, block.size}].push_back(pointer);
}

void collect_freed() {
  Runtime& all = runtime();
  auto& later = all.freed_later;
  later.erase(
      std::remove_if(
          later.begin(), later.end(),
          [&](void* pointer) {
            Block& block = all.blocks[pointer];
            if (!all_reached(block.until)) return false;
            cache_block(pointer, block);
            return true;
          }),
      later.end());
}

// Gives back what is cached now, once the device is through with it.  What other threads free
// meanwhile stays: kernels that use it may be queued still.
void drop_cached(std::unique_lock<std::mutex>& guard, int at) {
  Runtime& all = runtime();
  Device& device = all.devices[at];
  std::vector<void*> dropped;
  for (auto& [key, pointers] : all.cached) {
    if (std::get<0>(key) != at) continue;
    dropped.insert(dropped.end(), pointers.begin(), pointers.end());
    pointers.clear();
  }
  drain_device(guard, device);
  for (void* pointer : dropped) {
    device.memory.reserved -= static_cast<int64_t>(all.blocks[pointer].size);
    all.blocks.erase(pointer);
    std::free(pointer);
  }
}

std::string mebibytes(int64_t bytes) {
  char text[64];
  std::snprintf(text, sizeof text, "%.2f MiB", static_cast<double>(bytes) / (1 << 20));
  return text;
}

}  // namespace

// -- devices -------------------------------------------------------------------------------------

int visible_devices() { return runtime().visible; }

void show_devices(int count) { runtime().visible = std::min(count, kMostDevices); }

bool available() {
  if (runtime().visible == 0) return false;
  asked_driver = true;
  return !bad_fork.load();
}

bool initialized() { return runtime().initialized && !bad_fork.load(); }

void initialize() {
  TORCH_CHECK(
      !bad_fork.load(),
      "Cannot re-initialize SIM in forked subprocess. To use SIM with multiprocessing, you must "
      "use the 'spawn' start method");
  if (runtime().initialized) return;
  TORCH_CHECK(runtime().visible > 0, "No SIM devices are available");
  asked_driver = true;
  runtime().initialized = true;
}

bool in_bad_fork() { return bad_fork.load(); }

int current_device() { return the_device; }

int exchange_device(int device) {
  const int before = the_device;
  if (device >= 0) the_device = device;
  return before;
}

// -- streams and events --------------------------------------------------------------------------

int64_t current_stream(int device) { return the_streams[device]; }

int64_t exchange_stream(int device, int64_t stream) {
  return std::exchange(the_streams[device], stream);
}

int64_t new_stream(int device) {
  initialize();
  std::lock_guard<std::mutex> guard(runtime().lock);
  return 1 + device_at(device).next_stream++ % kPool;
}

void enqueue(int device, int64_t stream, std::string name, std::function<void()> work) {
  initialize();
  std::unique_lock<std::mutex> guard(runtime().lock);
  enqueue_locked(guard, device, stream, std::move(name), std::move(work));
}

MarkPtr mark(int device, int64_t stream) {
  initialize();
  std::unique_lock<std::mutex> guard(runtime().lock);
  return mark_locked(guard, device, stream);
}

void let_wait(int device, int64_t stream, const MarkPtr& mark) {
  if (mark->device == device && mark->stream == stream) return;
  enqueue(device, stream, "wait for an event", [mark] {
    std::unique_lock<std::mutex> guard(runtime().lock);
    Runtime& all = runtime();
    Device& other = all.devices[mark->device];
    Stream& others = other.streams[mark->stream];
    ++others.hurrying;
    all.work.notify_all();
    all.progress.wait(guard, [&] { return mark->reached || other.error != 0; });
    --others.hurrying;
  });
}

bool reached(const MarkPtr& mark) {
  initialize();
  std::lock_guard<std::mutex> guard(runtime().lock);
  check_locked(runtime().devices[mark->device]);
  return mark->reached;
}

void wait_for(const MarkPtr& mark, const std::string& reason) {
  initialize();
  std::unique_lock<std::mutex> guard(runtime().lock);
  Runtime& all = runtime();
  Device& device = all.devices[mark->device];
  check_locked(device);
  count_wait(device, reason);
  Stream& stream = device.streams[mark->stream];
  ++stream.hurrying;
  all.work.notify_all();
  all.progress.wait(guard, [&] { return mark->reached || device.error != 0; });
  --stream.hurrying;
  check_locked(device);
}

void wait_for_stream(int at, int64_t stream, const std::string& reason) {
  initialize();
  std::unique_lock<std::mutex> guard(runtime().lock);
  Device& device = device_at(at);
  check_locked(device);
  count_wait(device, reason);
  drain_locked(guard, device, stream);
  check_locked(device);
}

void finish(int at, int64_t stream) {
  std::unique_lock<std::mutex> guard(runtime().lock);
  Device& device = device_at(at);
  drain_locked(guard, device, stream);
  check_locked(device);
}

void wait_for_device(int at, const std::string& reason) {
  initialize();
  std::unique_lock<std::mutex> guard(runtime().lock);
  Device& device = device_at(at);
  check_locked(device);
  count_wait(device, reason);
  drain_device(guard, device);
  check_locked(device);
}

bool stream_is_done(int at, int64_t id) {
  initialize();
  std::lock_guard<std::mutex> guard(runtime().lock);
  Device& device = device_at(at);
  check_locked(device);
  Stream& stream = device.streams[id];
  return stream.done == stream.queued;
}

// -- memory --------------------------------------------------------------------------------------

void* allocate(int at, int64_t stream, size_t bytes) {
  initialize();
  if (bytes == 0) return nullptr;
  std::unique_lock<std::mutex> guard(runtime().lock);
  Runtime& all = runtime();
  Device& device = device_at(at);
  check_locked(device);
  MemoryStats& memory = device.memory;
  const size_t size = (bytes + kRounding - 1) / kRounding * kRounding;
  collect_freed();
  void* pointer = nullptr;
  auto& cached = all.cached[{at, stream, size}];
  if (!cached.empty()) {
    pointer = cached.back();
    cached.pop_back();
  } else {
    if (memory.reserved + static_cast<int64_t>(size) > device.budget) {
      ++memory.retries;
      count_wait(device, "allocation with memory full");
      drain_device(guard, device);
      collect_freed();
      drop_cached(guard, at);
      check_locked(device);
    }
    if (memory.reserved + static_cast<int64_t>(size) > device.budget) {
      ++memory.failures;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "SIM out of memory. Tried to allocate ",
          mebibytes(static_cast<int64_t>(size)), ". GPU ", at, " has a total capacity of ",
          mebibytes(device.budget), " of which ", mebibytes(device.budget - memory.reserved),
          " is free. Of the allocated memory ", mebibytes(memory.allocated),
          " is allocated by PyTorch, and ", mebibytes(memory.reserved - memory.allocated),
          " is reserved by PyTorch but unallocated.");
    }
    pointer = std::aligned_alloc(kAlignment, size);
    TORCH_CHECK(pointer != nullptr, "sim: the host has no memory");
    std::memset(pointer, 0xff, size);  // NaN, if it is read before it is written
    Block block;
    block.size = size;
    block.device = at;
    block.stream = stream;
    all.blocks.emplace(pointer, std::move(block));
    memory.reserved += static_cast<int64_t>(size);
    memory.reserved_peak = std::max(memory.reserved_peak, memory.reserved);
  }
  memory.allocated += static_cast<int64_t>(size);
  memory.allocated_peak = std::max(memory.allocated_peak, memory.allocated);
  ++memory.blocks;
  return pointer;
}

void release(void* pointer) {
  if (pointer == nullptr || bad_fork.load()) return;
  std::unique_lock<std::mutex> guard(runtime().lock);
  Runtime& all = runtime();
  Block& block = all.blocks.at(pointer);
  Device& device = all.devices[block.device];
  device.memory.allocated -= static_cast<int64_t>(block.size);
  --device.memory.blocks;
  if (device.error == 0) {
    for (int64_t stream : block.other_streams) {
      block.until.push_back(mark_locked(guard, block.device, stream));
    }
  }
  if (block.until.empty()) {
    cache_block(pointer, block);
  } else {
    all.freed_later.push_back(pointer);
  }
}

void record_stream(void* pointer, int64_t stream) {
  std::lock_guard<std::mutex> guard(runtime().lock);
  auto found = runtime().blocks.find(pointer);
  if (found != runtime().blocks.end() && found->second.stream != stream) {
    found->second.other_streams.insert(stream);
  }
}

void empty_cache() {
  if (!initialized()) return;
  std::unique_lock<std::mutex> guard(runtime().lock);
  for (int at = 0; at < runtime().visible; ++at) {
    Device& device = runtime().devices[at];
    check_locked(device);
    if (device.memory.reserved == device.memory.allocated) continue;
    count_wait(device, "empty_cache");
    drain_device(guard, device);
    collect_freed();
    drop_cached(guard, at);
    check_locked(device);
  }
}

MemoryStats memory_stats(int device) {
  std::lock_guard<std::mutex> guard(runtime().lock);
  return device_at(device).memory;
}

std::vector<int64_t> blocks_in_use(int device) {
  std::lock_guard<std::mutex> guard(runtime().lock);
  std::set<void*> idle(runtime().freed_later.begin(), runtime().freed_later.end());
  for (auto& [key, pointers] : runtime().cached) idle.insert(pointers.begin(), pointers.end());
  std::vector<int64_t> sizes;
  for (auto& [pointer, block] : runtime().blocks) {
    if (block.device == device && !idle.count(pointer)) {
      sizes.push_back(static_cast<int64_t>(block.size));
    }
  }
  return sizes;
}

void reset_peaks(int at) {
  std::lock_guard<std::mutex> guard(runtime().lock);
  MemoryStats& memory = device_at(at).memory;
  memory.allocated_peak = memory.allocated;
  memory.reserved_peak = memory.reserved;
}

void set_budget(int device, int64_t bytes) {
  std::lock_guard<std::mutex> guard(runtime().lock);
  device_at(device).budget = bytes;
}

int64_t budget(int device) {
  initialize();
  std::lock_guard<std::mutex> guard(runtime().lock);
  check_locked(device_at(device));
  return device_at(device).budget;
}

void* allocate_pinned(size_t bytes) {
  initialize();
  std::lock_guard<std::mutex> guard(runtime().lock);
  const size_t size = (std::max<size_t>(bytes, 1) + kRounding - 1) / kRounding * kRounding;
  for (auto& [pointer, block] : runtime().pinned) {
    if (block.freed && block.size == size && all_reached(block.until)) {
      block.freed = false;
      block.until.clear();
      return const_cast<char*>(pointer);
    }
  }
  void* pointer = std::aligned_alloc(kAlignment, size);
  PinnedBlock block;
  block.size = size;
  runtime().pinned.emplace(static_cast<const char*>(pointer), std::move(block));
  return pointer;
}

void release_pinned(void* pointer) {
  if (bad_fork.load()) return;
  std::lock_guard<std::mutex> guard(runtime().lock);
  auto found = runtime().pinned.find(static_cast<const char*>(pointer));
  if (found != runtime().pinned.end()) found->second.freed = true;
}

namespace {

PinnedBlock* pinned_block(const void* pointer) {
  auto& pinned = runtime().pinned;
  auto after = pinned.upper_bound(static_cast<const char*>(pointer));
  if (after == pinned.begin()) return nullptr;
  auto& [begin, block] = *std::prev(after);
  return static_cast<const char*>(pointer) < begin + block.size ? &block : nullptr;
}

}  // namespace

bool is_pinned(const void* pointer) {
  if (!initialized()) return false;
  std::lock_guard<std::mutex> guard(runtime().lock);
  return pinned_block(pointer) != nullptr;
}

void use_pinned(const void* pointer, const MarkPtr& mark) {
  std::lock_guard<std::mutex> guard(runtime().lock);
  if (PinnedBlock* block = pinned_block(pointer)) {
    auto& until = block->until;
    until.erase(
        std::remove_if(until.begin(), until.end(), [](const MarkPtr& m) { return m->reached; }),
        until.end());
    until.push_back(mark);
  }
}

// -- what tests do to it -------------------------------------------------------------------------

Counts counts(int device) {
  std::lock_guard<std::mutex> guard(runtime().lock);
  return device_at(device).counts;
}

void count_copy(int device, bool waiting) {
  std::lock_guard<std::mutex> guard(runtime().lock);
  Counts& counts = device_at(device).counts;
  ++(waiting ? counts.copied_waiting : counts.copied_async);
}

std::vector<std::string> reasons(int device) {
  std::lock_guard<std::mutex> guard(runtime().lock);
  return device_at(device).reasons;
}

void reset_counts() {
  std::lock_guard<std::mutex> guard(runtime().lock);
  for (Device& device : runtime().devices) {
    device.counts = {};
    device.reasons.clear();
  }
}

void set_latency(double seconds) {
  std::lock_guard<std::mutex> guard(runtime().lock);
  runtime().latency = seconds;
}

void set_jitter(double seconds) {
  std::lock_guard<std::mutex> guard(runtime().lock);
  runtime().jitter = seconds;
}

void hold(bool held) {
  std::lock_guard<std::mutex> guard(runtime().lock);
  runtime().held = held;
  runtime().holder = std::this_thread::get_id();
  runtime().work.notify_all();
  runtime().progress.notify_all();
}

void forbid_waits(bool forbidden) { waits_forbidden = forbidden; }

void hang(int device, int64_t stream) {
  const uint64_t before = runtime().released_hangs;
  enqueue(device, stream, "a kernel that hangs", [before] {
    std::unique_lock<std::mutex> guard(runtime().lock);
    runtime().work.wait(guard, [before] { return runtime().released_hangs > before; });
  });
}

void release_hangs() {
  std::lock_guard<std::mutex> guard(runtime().lock);
  ++runtime().released_hangs;
  runtime().work.notify_all();
}

void fail(int at, int64_t stream, int code, const std::string& words) {
  enqueue(at, stream, "fault", [at, code, words] {
    std::lock_guard<std::mutex> guard(runtime().lock);
    fail_locked(runtime().devices[at], code, words);
  });
}

void check(int device) {
  initialize();
  std::lock_guard<std::mutex> guard(runtime().lock);
  check_locked(device_at(device));
}

void stop() {
  if (!initialized()) return;
  std::lock_guard<std::mutex> guard(runtime().lock);
  runtime().stopped = true;
}

}  // namespace sim
