// Collectives of the made-up accelerator, as ProcessGroupNCCL has them: queued in the order of a
// stream, carried out later (by gloo, on the same memory), with errors that come late.

#include "watchdog.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <pybind11/chrono.h>
#include <torch/csrc/utils/pybind.h>

#include <future>

namespace {

using namespace std::chrono_literals;
using sim::Communicator;
using sim::SimWork;
using Tensors = std::vector<at::Tensor>;

constexpr auto kSim = c10::DeviceType::PrivateUse1;

// Python may run while this waits: the threads of a group may free tensors that have objects.
class WithoutPython {
 public:
  WithoutPython() {
    if (PyGILState_Check()) let_go_.emplace();
  }

 private:
  std::optional<pybind11::gil_scoped_release> let_go_;
};

at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.unsafeGetTensorImpl()->mutable_data(), tensor.sizes(), tensor.strides(),
      tensor.options().device(at::kCPU));
}

Tensors on_host(const Tensors& tensors) {
  Tensors made;
  for (const auto& each : tensors) made.push_back(on_host(each));
  return made;
}

std::vector<Tensors> on_host(const std::vector<Tensors>& lists) {
  std::vector<Tensors> made;
  for (const auto& each : lists) made.push_back(on_host(each));
  return made;
}

using Carrier = std::function<c10::intrusive_ptr<c10d::Work>()>;

// One of gloo's, and what is left to do behind it.
struct Followed final : c10d::Work {
  Followed(c10::intrusive_ptr<Work> first, std::function<void()> then)
      : first(std::move(first)), then(std::move(then)) {}

  bool isCompleted() override { return first->isCompleted(); }
  bool wait(std::chrono::milliseconds timeout) override {
    first->wait(timeout);
    then();
    return true;
  }

  c10::intrusive_ptr<Work> first;
  std::function<void()> then;
};

// One of gloo's that is known to be complete by waiting for it alone: a thread does.
struct Awaited final : c10d::Work {
  struct State {
    std::atomic<bool> done{false};
    std::exception_ptr error;
  };

  explicit Awaited(c10::intrusive_ptr<Work> work) : state(std::make_shared<State>()) {
    std::thread([work = std::move(work), state = state] {
      try {
        work->wait();
      } catch (...) {
        state->error = std::current_exception();
      }
      state->done = true;
    }).detach();
  }
  bool isCompleted() override { return state->done; }
  bool wait(std::chrono::milliseconds) override {
    if (state->error) std::rethrow_exception(state->error);
    return true;
  }

  std::shared_ptr<State> state;
};

class SimGroup final : public c10d::Backend {
 public:
  SimGroup(int rank, int size, std::chrono::milliseconds timeout, c10::intrusive_ptr<Backend> gloo)
      : Backend(rank, size), timeout_(timeout), gloo_(std::move(gloo)),
        blocks_(
            sim::number_from({"TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"}, 0) != 0) {
    if (!blocks_) watchdog_.start();
  }

  ~SimGroup() override {
    const WithoutPython meanwhile;
    if (!watchdog_.is_ending()) communicator_->end_kernels();
    watchdog_.leave();  // waits for nothing: when a process exits, the device does no more work
    watchdog_.join();
    // gloo's own end waits for what is under way.
    if (communicator_->aborted) new c10::intrusive_ptr<Backend>(std::move(gloo_));
  }

  const std::string getBackendName() const override { return "simccl"; }
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void enableCollectivesTiming() override { timing_ = true; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override { return watchdog_.error(); }

  // Where the abort takes longer than the group's limit, it raises, but not before it is done:
  // what std::async returns waits for its thread.
  void abort() override {
    const WithoutPython meanwhile;
    watchdog_.let_end();
    auto done = std::async(std::launch::async, [this] { communicator_->abort(); });
    TORCH_CHECK_WITH(
        DistBackendError, done.wait_for(timeout_) == std::future_status::ready,
        "Future for ProcessGroup abort timed out after ", timeout_.count(), " ms");
    done.get();
    watchdog_.stop_monitor();
  }
  // Waits for all that was queued, however long that takes.
  void shutdown() override {
    const WithoutPython meanwhile;
    communicator_->finalize();
    watchdog_.let_end();
    watchdog_.join();
    communicator_->end_kernels();
  }

  c10::intrusive_ptr<c10d::Work> broadcast(
      Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    auto host = on_host(tensors);
    return queue(c10d::OpType::BROADCAST, tensors, opts.asyncOp, [this, host, opts]() mutable {
      return gloo_->broadcast(host, opts);
    });
  }
  c10::intrusive_ptr<c10d::Work> allreduce(
      Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return reduce_with(c10d::OpType::ALLREDUCE, tensors, opts);
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return reduce_with(c10d::OpType::ALLREDUCE_COALESCED, tensors, opts);
  }
  c10::intrusive_ptr<c10d::Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    auto host = on_host(tensors);
    return queue(c10d::OpType::REDUCE, tensors, opts.asyncOp, [this, host, opts]() mutable {
      return gloo_->reduce(host, opts);
    });
  }
  c10::intrusive_ptr<c10d::Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return queue(
        c10d::OpType::ALLGATHER, outputs.at(0), opts.asyncOp,
        [this, to, from, opts]() mutable { return gloo_->allgather(to, from, opts); }, {}, inputs);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    auto to = on_host(output), from = on_host(input);
    return queue(
        c10d::OpType::_ALLGATHER_BASE, {output}, opts.asyncOp,
        [this, to, from, opts]() mutable { return gloo_->_allgather_base(to, from, opts); }, {},
        {input});
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    c10::intrusive_ptr<c10d::Work> last;
    for (size_t at = 0; at < outputs.size(); ++at) {
      last = _allgather_base(outputs[at], inputs[at], opts);
    }
    return last;
  }
  c10::intrusive_ptr<c10d::Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return queue(
        c10d::OpType::GATHER, inputs, opts.asyncOp,
        [this, to, from, opts]() mutable { return gloo_->gather(to, from, opts); }, {},
        outputs.empty() ? Tensors{} : outputs.at(0));
  }
  c10::intrusive_ptr<c10d::Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    auto to = on_host(outputs);
    auto from = on_host(inputs);
    return queue(
        c10d::OpType::SCATTER, outputs, opts.asyncOp,
        [this, to, from, opts]() mutable { return gloo_->scatter(to, from, opts); }, {},
        inputs.empty() ? Tensors{} : inputs.at(0));
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& opts) override {
    at::Tensor all = at::cat(inputs.at(0));
    return _reduce_scatter_base(outputs.at(0), all, opts);
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    // Kept until the stream has come to it, as record_stream would.
    auto to = on_host(output), from = on_host(input);
    auto plain = opts;
    plain.reduceOp = summed(opts.reduceOp);
    return queue(
        c10d::OpType::_REDUCE_SCATTER_BASE, {output}, opts.asyncOp,
        [this, to, from, plain]() -> c10::intrusive_ptr<c10d::Work> {
          // Not gloo's own, which does not know when it is complete.
          const at::Tensor sum = from.contiguous().clone();
          Tensors one{sum};
          c10d::AllreduceOptions reducing;
          reducing.reduceOp = plain.reduceOp;
          return c10::make_intrusive<Followed>(gloo_->allreduce(one, reducing), [this, to, sum] {
            to.copy_(sum.view(-1).chunk(size_)[rank_].view(to.sizes()));
          });
        },
        averages(opts.reduceOp) ? Tensors{to} : Tensors{}, {input});
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    c10::intrusive_ptr<c10d::Work> last;
    for (size_t at = 0; at < outputs.size(); ++at) {
      last = _reduce_scatter_base(outputs[at], inputs[at], opts);
    }
    return last;
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& out_sizes,
      std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& opts) override {
    auto to = on_host(output), from = on_host(input);
    return queue(
        c10d::OpType::ALLTOALL_BASE, {output}, opts.asyncOp,
        [this, to, from, out_sizes, in_sizes, opts]() mutable {
          return gloo_->alltoall_base(to, from, out_sizes, in_sizes, opts);
        },
        {}, {input});
  }
  c10::intrusive_ptr<c10d::Work> send(Tensors& tensors, int to, int tag) override {
    auto host = on_host(tensors);
    return queue(c10d::OpType::SEND, tensors, true, [this, host, to, tag]() mutable {
      return c10::make_intrusive<Awaited>(gloo_->send(host, to, tag));
    });
  }
  c10::intrusive_ptr<c10d::Work> recv(Tensors& tensors, int from, int tag) override {
    auto host = on_host(tensors);
    return queue(c10d::OpType::RECV, tensors, true, [this, host, from, tag]() mutable {
      return c10::make_intrusive<Awaited>(gloo_->recv(host, from, tag));
    });
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override {
    // As NCCL has none: a sum of ones, on the device.
    const int device = opts.device ? opts.device->index()
        : getBoundDeviceId()       ? getBoundDeviceId()->index()
                                   : sim::current_device();
    Tensors one{at::zeros(
        {1}, at::TensorOptions(at::kFloat).device(c10::Device(kSim, static_cast<c10::DeviceIndex>(device))))};
    auto host = on_host(one);
    return queue(c10d::OpType::BARRIER, one, true, [this, host]() mutable {
      return gloo_->allreduce(host, c10d::AllreduceOptions());
    });
  }

 private:
  static bool averages(const c10d::ReduceOp& op) { return op == c10d::ReduceOp::AVG; }
  static c10d::ReduceOp summed(const c10d::ReduceOp& op) {
    return averages(op) ? c10d::ReduceOp(c10d::ReduceOp::SUM) : op;
  }

  c10::intrusive_ptr<c10d::Work> reduce_with(
      c10d::OpType type, Tensors& tensors, const c10d::AllreduceOptions& opts) {
    auto host = on_host(tensors);
    auto plain = opts;
    plain.reduceOp = summed(opts.reduceOp);
    return queue(
        type, tensors, opts.asyncOp,
        [this, host, plain]() mutable {
          c10::intrusive_ptr<c10d::Work> last;
          for (auto& each : host) {  // gloo takes one tensor
            Tensors one{each};
            if (last) last->wait();
            last = gloo_->allreduce(one, plain);
          }
          return last;
        },
        averages(opts.reduceOp) ? host : Tensors{});
  }

  int64_t stream_of(int device) {
    if (streams_.size() <= static_cast<size_t>(device)) streams_.resize(device + 1, -1);
    if (streams_[device] < 0) streams_[device] = sim::new_stream(device);
    return streams_[device];
  }

  // `carry` begins gloo's collective; `averaged` is divided by the size behind it.
  c10::intrusive_ptr<c10d::Work> queue(
      c10d::OpType type, const Tensors& tensors, bool own_stream, Carrier carry,
      Tensors averaged = {}, const Tensors& inputs = {}) {
    TORCH_CHECK_WITH(
        DistBackendError, !communicator_->aborted, "SIMCCL communicator was aborted on rank ",
        rank_, ".");
    TORCH_CHECK(!tensors.empty() && tensors[0].is_privateuseone(), "Tensors must be SIM and dense");
    const int device = tensors[0].device().index();
    const c10::DeviceGuard guard(tensors[0].device());
    const int64_t current = sim::current_stream(device);
    const int64_t stream = own_stream ? stream_of(device) : current;
    if (stream != current) sim::let_wait(device, stream, sim::mark(device, current));
    std::unique_lock<std::mutex> in_order(communicator_->order);
    // Whatever stream each is queued on: a communicator carries them out in the order of the calls.
    if (communicator_->last != nullptr) sim::let_wait(device, stream, communicator_->last);
    for (const auto& each : tensors) sim::record_stream(each.storage().mutable_data(), stream);
    for (const auto& each : inputs) sim::record_stream(each.storage().mutable_data(), stream);
    SimWork::Queued queued;
    queued.communicator = communicator_;
    queued.device = device;
    queued.limit = timeout_;
    queued.sequence = ++sequence_;
    queued.blocks = blocks_;
    queued.outcome = c10::make_intrusive<c10::ivalue::Future>(c10::AnyEnumType::get());
    if (timing_) queued.start = sim::mark(device, stream);
    const double share = 1.0 / size_;
    sim::enqueue(
        device, stream, "collective",
        [communicator = communicator_, carry = std::move(carry), averaged = std::move(averaged),
         share]() mutable { kernel(*communicator, carry, averaged, share); });
    queued.end = communicator_->last = sim::mark(device, stream);
    in_order.unlock();
    auto work = c10::make_intrusive<SimWork>(rank_, type, tensors, std::move(queued));
    work->future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{tensors[0].device()});
    {
      const c10::StreamGuard on(c10::Stream(c10::Stream::UNSAFE, tensors[0].device(), stream));
      work->future->markCompleted(c10::IValue(tensors));
    }
    const WithoutPython meanwhile;
    watchdog_.watch(work->copy());
    return work;
  }

  // On the thread of the stream: until gloo is done, or the communicator is aborted.
  static void kernel(Communicator& communicator, Carrier& carry, Tensors& averaged, double share) {
    try {
      if (communicator.aborted) return;
      auto work = carry();
      while (!work->isCompleted()) {
        if (communicator.aborted) {
          // gloo goes on: what it writes to is still there, as the allocator gives nothing back.
          static auto* const left = new std::list<c10::intrusive_ptr<c10d::Work>>();
          const std::lock_guard<std::mutex> guard(communicator.lock);
          left->push_back(std::move(work));
          return;
        }
        std::this_thread::sleep_for(sim::kPoll);
      }
      work->wait();
      for (auto& each : averaged) each.mul_(share);
    } catch (const std::exception& error) {
      std::unique_lock<std::mutex> guard(communicator.lock);
      if (communicator.error.empty()) communicator.error = error.what();
      // A kernel whose peer is gone spins until the communicator is aborted.
      communicator.changed.wait(guard, [&] { return communicator.aborted.load(); });
    }
  }

  std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<Backend> gloo_;
  const bool blocks_;
  bool timing_ = false;
  uint64_t sequence_ = 0;
  std::vector<int64_t> streams_;
  const std::shared_ptr<Communicator> communicator_ = std::make_shared<Communicator>();
  sim::Watchdog watchdog_{communicator_};
};

}  // namespace

PYBIND11_MODULE(_group, module) {
  module.def(
      "make_group",
      [](int rank, int size, std::chrono::milliseconds timeout,
         c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<SimGroup>(rank, size, timeout, std::move(gloo));
      });
  // Of torch's own backends a method that others don't have in Python.
  module.def(
      "get_error", [](const c10::intrusive_ptr<c10d::Backend>& group) { return group->getError(); });
}
