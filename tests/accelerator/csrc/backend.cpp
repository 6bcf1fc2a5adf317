// torch's view of the made-up accelerator: the backend of PrivateUse1.
//
// An operator is carried out in two parts.  What its results look like is found at once, by the
// kernel for meta tensors; the values are computed when the stream comes to it, by the CPU's kernel
// on the same memory.  An operator whose results depend on values waits for the stream, and so does
// one without a kernel for meta tensors.

#include "runtime.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/bernoulli.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

constexpr auto kSim = c10::DeviceType::PrivateUse1;

int index_of(const c10::Device& device) {
  return device.has_index() ? device.index() : sim::current_device();
}

// -- memory --------------------------------------------------------------------------------------

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = sim::current_device();
    void* pointer = sim::allocate(device, sim::current_stream(device), bytes);
    return {pointer, pointer, &sim::release, {kSim, static_cast<c10::DeviceIndex>(device)}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &sim::release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    const int device = sim::current_device();
    sim::enqueue(device, sim::current_stream(device), "copy of memory", [=] {
      std::memcpy(to, from, bytes);
    });
  }
  bool initialized() override { return sim::initialized(); }
  void emptyCache(c10::MempoolId_t) override { sim::empty_cache(); }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    sim::record_stream(pointer.get(), stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const auto stats = sim::memory_stats(device);
    c10::CachingDeviceAllocator::DeviceStats all;
    all.allocated_bytes[0].current = stats.allocated;
    all.allocated_bytes[0].peak = stats.allocated_peak;
    all.active_bytes[0] = all.allocated_bytes[0];
    all.reserved_bytes[0].current = stats.reserved;
    all.reserved_bytes[0].peak = stats.reserved_peak;
    all.allocation[0].current = stats.blocks;
    all.num_alloc_retries = stats.retries;
    all.num_ooms = stats.failures;
    return all;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { sim::reset_peaks(device); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const auto total = sim::budget(device);
    return {total - sim::memory_stats(device).reserved, total};
  }
};

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = sim::allocate_pinned(bytes);
    return {pointer, pointer, &sim::release_pinned, c10::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &sim::release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

DeviceMemory* device_memory() {
  static auto* const it = new DeviceMemory();
  return it;
}

PinnedMemory* pinned_memory() {
  static auto* const it = new PinnedMemory();
  return it;
}

// -- random numbers ------------------------------------------------------------------------------

// A seed, and how many kernels have drawn from it: as CUDA's Philox, it moves on at the launch.
struct SimGenerator final : at::GeneratorImpl {
  explicit SimGenerator(c10::DeviceIndex device)
      : GeneratorImpl({kSim, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions(at::kByte));
    auto* values = reinterpret_cast<uint64_t*>(state.mutable_data_ptr());
    values[0] = seed_;
    values[1] = offset_;
    return state.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.numel() == 16 && state.dtype() == at::kByte && state.device().is_cpu(),
        "RNG state is wrong size");
    const auto* values = static_cast<const uint64_t*>(state.data());
    seed_ = values[0];
    offset_ = values[1];
  }
  // What one kernel draws from.
  uint64_t next() {
    std::lock_guard<std::mutex> guard(mutex_);
    uint64_t mixed = seed_ + 0x9e3779b97f4a7c15 * ++offset_;
    mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
    mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
    return mixed ^ (mixed >> 31);
  }

 private:
  SimGenerator* clone_impl() const override {
    auto* copy = new SimGenerator(device_.index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

const at::Generator& default_generator(int device) {
  static auto* const all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int index = 0; index < 16; ++index) {
      made->push_back(at::make_generator<SimGenerator>(static_cast<c10::DeviceIndex>(index)));
    }
    return made;
  }();
  return all->at(device < 0 ? sim::current_device() : device);
}

// -- devices, streams, events --------------------------------------------------------------------

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kSim, static_cast<c10::DeviceIndex>(sim::exchange_device(device.index()))};
  }
  c10::Device getDevice() const override {
    return {kSim, static_cast<c10::DeviceIndex>(sim::current_device())};
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(
        device.index() < sim::visible_devices(), "SIM error: invalid device ordinal ",
        static_cast<int>(device.index()));
    sim::exchange_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    sim::exchange_device(device.index());
  }
  static c10::Stream stream(int device, int64_t id) {
    return c10::Stream(
        c10::Stream::UNSAFE, {kSim, static_cast<c10::DeviceIndex>(device)}, id);
  }
  c10::Stream getStream(c10::Device device) const override {
    const int index = index_of(device);
    return stream(index, sim::current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream(index_of(device), sim::new_stream(index_of(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return stream(index_of(device), sim::new_stream(index_of(device)));
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    const int index = to.device_index();
    return stream(index, sim::exchange_stream(index, to.id()));
  }
  void* getStreamNativeHandle(const c10::Stream to) const override {
    return reinterpret_cast<void*>(to.id());
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<sim::MarkPtr*>(event);
  }
  void record(
      void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    auto made = sim::mark(on.device_index(), on.id());
    if (*event == nullptr) *event = new sim::MarkPtr();
    *static_cast<sim::MarkPtr*>(*event) = std::move(made);
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event == nullptr) return;
    sim::let_wait(on.device_index(), on.id(), *static_cast<sim::MarkPtr*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || sim::reached(*static_cast<sim::MarkPtr*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) sim::wait_for(*static_cast<sim::MarkPtr*>(event), "Event.synchronize");
  }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    const auto& from = *static_cast<sim::MarkPtr*>(first);
    const auto& to = *static_cast<sim::MarkPtr*>(second);
    TORCH_CHECK(
        sim::reached(from) && sim::reached(to),
        "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(to->when - from->when).count();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(sim::visible_devices());
  }
  bool queryStream(const c10::Stream& on) const override {
    return sim::stream_is_done(on.device_index(), on.id());
  }
  void synchronizeStream(const c10::Stream& on) const override {
    sim::wait_for_stream(on.device_index(), on.id(), "Stream.synchronize");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    sim::wait_for_device(device, "synchronize");
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& on) const override {
    sim::record_stream(pointer.get(), on.id());
  }
};

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return sim::available(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return sim::initialized(); }
  void init() const override { sim::initialize(); }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(sim::visible_devices());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { sim::exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(sim::current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(sim::exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return sim::is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_memory(); }
  c10::Device getDeviceFromPtr(void*) const override { return {kSim, 0}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<SimGenerator>(
        static_cast<c10::DeviceIndex>(device < 0 ? sim::current_device() : device));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    auto made = device_memory()->allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) device_memory()->copy_data(made.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(made));
    storage.set_nbytes(bytes);
  }
};

// -- operators -----------------------------------------------------------------------------------

// The same memory as a tensor of the CPU; it keeps nothing alive.
at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(
      tensor.unsafeGetTensorImpl()->mutable_data(), tensor.sizes(), tensor.strides(),
      tensor.options().device(at::kCPU));
}

at::Tensor as_meta(const at::Tensor& tensor) {
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta));
}

bool is_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// A scalar of the host is read when the kernel is launched.
at::Tensor read_now(const at::Tensor& tensor) {
  at::Tensor copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return copy;
}

// An argument or result with every tensor in it replaced.
c10::IValue mapped(
    const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& each : value.toTensorList()) made.push_back(map(each));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& each : value.toOptionalTensorList()) {
      made.push_back(each && each->defined() ? std::optional(map(*each)) : std::nullopt);
    }
    return made;
  }
  return value;
}

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  mapped(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

void call_kernel(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  op.callBoxed(stack);
}

struct Call {
  int device = -1;
  torch::jit::Stack values;  // as they were given
  torch::jit::Stack meta;
  at::Generator* draws_from = nullptr;
  int generator_at = -1;
};

Call read_call(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& name = schema.name();
  Call call;
  const auto given = torch::jit::last(*stack, schema.arguments().size());
  call.values.assign(given.begin(), given.end());
  for (const auto& value : call.values) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!is_sim(tensor)) return;
      TORCH_CHECK(
          call.device < 0 || call.device == tensor.device().index(),
          "Expected all tensors to be on the same device, but found at least two devices, sim:",
          call.device, " and ", tensor.device(), "! (", name, ")");
      call.device = tensor.device().index();
    });
    if (call.device < 0 && value.isDevice()) call.device = index_of(value.toDevice());
  }
  TORCH_CHECK(call.device >= 0, name, ": no tensor and no device of type sim is given");
  const bool takes_host_indices = name.find("index") != std::string::npos;
  for (auto& value : call.values) {
    value = mapped(value, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || is_sim(tensor)) return tensor;
      TORCH_CHECK(
          tensor.is_cpu() && (tensor.dim() == 0 || takes_host_indices),
          "Expected all tensors to be on the same device, but found at least two devices, sim:",
          call.device, " and ", tensor.device(), "! (", name, ")");
      return tensor;
    });
  }
  for (size_t at = 0; at < call.values.size(); ++at) {
    const auto& value = call.values[at];
    if (value.isDevice()) {
      call.meta.emplace_back(c10::Device(c10::kMeta));
    } else if (value.isGenerator()) {
      call.meta.emplace_back();
    } else {
      call.meta.push_back(mapped(value, [](const at::Tensor& tensor) {
        return is_sim(tensor) ? as_meta(tensor) : tensor;
      }));
    }
    const auto& type = schema.arguments()[at].type();
    const bool generator = type->isSubtypeOf(*c10::OptionalType::create(c10::GeneratorType::get()));
    if (generator) call.generator_at = static_cast<int>(at);
  }
  return call;
}

// The arguments for the CPU's kernel, later.
torch::jit::Stack for_host(const c10::OperatorHandle& op, const Call& call) {
  torch::jit::Stack made;
  for (const auto& value : call.values) {
    if (value.isDevice()) {
      made.emplace_back(c10::Device(c10::kCPU));
      continue;
    }
    made.push_back(mapped(value, [](const at::Tensor& tensor) {
      if (!tensor.defined()) return tensor;
      return is_sim(tensor) ? on_host(tensor) : read_now(tensor);
    }));
  }
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    TORCH_CHECK(call.generator_at >= 0, op.schema().name(), ": draws from no generator of sim's");
    const auto& given = call.values[call.generator_at];
    at::Generator from = given.isGenerator() ? given.toGenerator() : default_generator(call.device);
    TORCH_CHECK(
        from.device().is_privateuseone(), "Expected a 'sim' device type for generator but found '",
        from.device(), "'");
    made[call.generator_at] = at::make_generator<at::CPUGeneratorImpl>(
        static_cast<SimGenerator*>(from.unsafeGetGeneratorImpl())->next());
  }
  return made;
}

// The argument that a result is, or is a view of.
const c10::IValue* aliased(const c10::OperatorHandle& op, const Call& call, size_t result) {
  const auto* alias = op.schema().returns()[result].alias_info();
  if (alias == nullptr) return nullptr;
  for (size_t at = 0; at < call.values.size(); ++at) {
    const auto* other = op.schema().arguments()[at].alias_info();
    if (other != nullptr && other->beforeSets() == alias->beforeSets()) {
      TORCH_CHECK(alias->isWrite(), op.schema().name(), ": a view that sim does not have");
      return &call.values[at];
    }
  }
  return nullptr;
}

// The results on the device: arguments that are written to, and new tensors.
torch::jit::Stack results_like(
    const c10::OperatorHandle& op, const Call& call, const torch::jit::Stack& shapes) {
  torch::jit::Stack made;
  for (size_t at = 0; at < shapes.size(); ++at) {
    if (const c10::IValue* argument = aliased(op, call, at)) {
      made.push_back(*argument);
      continue;
    }
    made.push_back(mapped(shapes[at], [&](const at::Tensor& shape) {
      if (!shape.defined()) return shape;
      return at::empty_strided(
          shape.sizes(), shape.strides(),
          shape.options().device(c10::Device(kSim, static_cast<c10::DeviceIndex>(call.device))));
    }));
  }
  return made;
}

// `out` of another shape than the result's.
void resize_outputs(const c10::OperatorHandle& op, const Call& call) {
  for (size_t at = 0; at < call.values.size(); ++at) {
    const auto& argument = op.schema().arguments()[at];
    if (!argument.is_out() || !call.values[at].isTensor()) continue;
    const auto& out = call.values[at].toTensor();
    const auto& shape = call.meta[at].toTensor();
    if (is_sim(out) && out.sizes() != shape.sizes()) {
      at::native::resize_output(out, shape.sizes());
    }
  }
}

void copy_results(const torch::jit::Stack& from, const torch::jit::Stack& to) {
  at::AutoDispatchBelowADInplaceOrView below;
  for (size_t at = 0; at < from.size(); ++at) {
    std::vector<at::Tensor> sources;
    each_tensor(from[at], [&](const at::Tensor& each) { sources.push_back(each); });
    size_t next = 0;
    each_tensor(to[at], [&](const at::Tensor& each) {
      const at::Tensor& source = sources.at(next++);
      if (each.defined() && source.defined()) each.copy_(source);
    });
  }
}

// After all that is queued, here and now.
void call_waiting(const c10::OperatorHandle& op, const Call& call, torch::jit::Stack* stack) {
  const int64_t stream = sim::current_stream(call.device);
  sim::wait_for_stream(call.device, stream, op.schema().name());
  torch::jit::Stack values = for_host(op, call);
  call_kernel(op, values);
  torch::jit::Stack results;
  for (size_t at = 0; at < values.size(); ++at) {
    const c10::IValue* argument = aliased(op, call, at);
    results.push_back(argument ? *argument : mapped(values[at], [&](const at::Tensor& each) {
      return each.defined()
          ? each.to(c10::Device(kSim, static_cast<c10::DeviceIndex>(call.device)))
          : each;
    }));
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& result : results) stack->push_back(std::move(result));
}

// Whether the results are arguments, and large enough already: torch's own kernels for backends like
// this one have looked at their shapes.
bool writes_into_arguments(const c10::OperatorHandle& op, const Call& call) {
  const auto& schema = op.schema();
  for (size_t at = 0; at < schema.returns().size(); ++at) {
    if (aliased(op, call, at) == nullptr) return false;
  }
  for (size_t at = 0; at < call.values.size(); ++at) {
    if (schema.arguments()[at].is_out() && call.values[at].isTensor() &&
        call.values[at].toTensor().numel() == 0) {
      return false;
    }
  }
  return true;
}

// What is selected by a mask depends on its values.
bool has_mask(const Call& call) {
  bool found = false;
  for (const auto& value : call.values) {
    if (!value.isOptionalTensorList()) continue;
    each_tensor(value, [&](const at::Tensor& each) {
      found = found || each.scalar_type() == at::kBool || each.scalar_type() == at::kByte;
    });
  }
  return found;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  sim::initialize();
  Call call = read_call(op, stack);
  sim::check(call.device);
  const c10::DeviceGuard guard(
      c10::Device(kSim, static_cast<c10::DeviceIndex>(call.device)));
  if (has_mask(call)) {
    call_waiting(op, call, stack);
    return;
  }
  torch::jit::Stack shapes(op.schema().returns().size());
  if (!writes_into_arguments(op, call)) {
    shapes = call.meta;
    try {
      TORCH_CHECK(
          op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta), "no kernel for meta");
      call_kernel(op, shapes);
      for (const auto& shape : shapes) {
        TORCH_CHECK(shape.isTensor() || shape.isTensorList() || shape.isNone(), "a value");
      }
    } catch (const std::exception&) {
      // The same error comes from the CPU's kernel, if it is one of the caller's.
      call_waiting(op, call, stack);
      return;
    }
    resize_outputs(op, call);
  }
  torch::jit::Stack results = results_like(op, call, shapes);
  torch::jit::Stack values = for_host(op, call);
  torch::jit::Stack into;
  for (size_t at = 0; at < results.size(); ++at) {
    const bool is_new = aliased(op, call, at) == nullptr;
    into.push_back(is_new ? mapped(results[at], [](const at::Tensor& each) {
      return each.defined() ? on_host(each) : each;
    }) : c10::IValue());
  }
  sim::enqueue(
      call.device, sim::current_stream(call.device), op.schema().name(),
      [op, values = std::move(values), into = std::move(into)]() mutable {
        call_kernel(op, values);
        for (size_t at = 0; at < into.size(); ++at) {
          if (into[at].isNone()) values[at] = c10::IValue();
        }
        copy_results(values, into);
      });
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& result : results) stack->push_back(std::move(result));
}

// torch has some operators that are for backends like this one alone; the CPU has others for them.

c10::OperatorHandle operator_named(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  fallback(operator_named("aten::convolution"), stack);
}

void convolution_backward(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  constexpr size_t kArguments = 10, kBiasSizes = 3;
  auto given = torch::jit::pop(*stack, kArguments);
  const auto channels = given[0].toTensor().size(1);
  given.insert(given.begin() + kBiasSizes, c10::IValue(std::vector<int64_t>{channels}));
  for (auto& value : given) stack->push_back(std::move(value));
  fallback(operator_named("aten::convolution_backward"), stack);
}

at::Tensor empty_sim(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool> pinned,
    std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(device.value_or(c10::Device(kSim)));
  return at::detail::empty_generic(
      size, device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided_sim(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const c10::DeviceGuard guard(device.value_or(c10::Device(kSim)));
  return at::detail::empty_strided_generic(
      size, stride, device_memory(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

at::Tensor as_strided_sim(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}

at::Tensor view_sim(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias_sim(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const at::Tensor& resize_sim(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor& set_tensor_sim(at::Tensor& self, const at::Tensor& source) {
  return at::native::set_tensor_(self, source);
}

at::Tensor& set_storage_sim(at::Tensor& self, at::Storage source) {
  return at::native::set_(self, std::move(source));
}

at::Tensor& set_storage_offset_sim(
    at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  return at::cpu::set_(self, std::move(storage), offset, size, stride);
}

at::Scalar local_scalar(const at::Tensor& self) {
  const int device = self.device().index();
  sim::wait_for_stream(device, sim::current_stream(device), "aten::_local_scalar_dense");
  return on_host(self).item();
}

void record_stream(at::Tensor& self, c10::Stream on) {
  sim::record_stream(self.storage().mutable_data(), on.id());
}

std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) {
    return {input.clone(), at::empty_like(input, input.options().dtype(at::kBool)).fill_(true)};
  }
  const at::Tensor kept = at::empty_like(input, input.options().dtype(at::kBool));
  kept.bernoulli_(1.0 - p);
  return {input.mul(kept).mul_(p < 1.0 ? 1.0 / (1.0 - p) : 0.0), kept};
}

void queue_copy(int device, int64_t stream, const at::Tensor& to, const at::Tensor& from) {
  sim::enqueue(device, stream, "aten::copy_", [to, from] {
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  });
}

// Between devices: on the stream of the source, with that of the destination waiting before and
// behind it (aten/src/ATen/native/cuda/Copy.cu).
void copy_on_devices(const at::Tensor& from, const at::Tensor& to) {
  const int source = from.device().index(), target = to.device().index();
  const int64_t stream = sim::current_stream(source), others = sim::current_stream(target);
  if (source != target) sim::let_wait(source, stream, sim::mark(target, others));
  queue_copy(source, stream, on_host(to), on_host(from));
  if (source != target) sim::let_wait(target, others, sim::mark(source, stream));
}

bool same_layout(const at::Tensor& one, const at::Tensor& other) {
  return one.dtype() == other.dtype() && one.sizes() == other.sizes() &&
      one.strides() == other.strides() && one.is_non_overlapping_and_dense() &&
      one.is_conj() == other.is_conj() && one.is_neg() == other.is_neg();
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int device = from.device().index();
  const int64_t stream = sim::current_stream(device);
  const bool pinned = sim::is_pinned(to.const_data_ptr());
  const bool waiting = !(non_blocking && pinned);
  sim::count_copy(device, waiting);
  // First, since it may raise: nothing may be queued then that writes into memory of the host.
  if (waiting) sim::wait_for_stream(device, stream, "copy to the host");
  queue_copy(device, stream, on_host(to), on_host(from));
  if (pinned) sim::use_pinned(to.const_data_ptr(), sim::mark(device, stream));
  if (waiting) sim::finish(device, stream);
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int device = to.device().index();
  const int64_t stream = sim::current_stream(device);
  if (sim::is_pinned(from.const_data_ptr())) {
    sim::count_copy(device, !non_blocking);
    if (!non_blocking) sim::wait_for_stream(device, stream, "copy to the device");
    queue_copy(device, stream, on_host(to), on_host(from));
    sim::use_pinned(from.const_data_ptr(), sim::mark(device, stream));
    if (!non_blocking) sim::finish(device, stream);
    return;
  }
  // Pageable memory: the stream is waited for, then the bytes are taken into a buffer.
  sim::wait_for_stream(device, stream, "copy of pageable memory to the device");
  sim::count_copy(device, true);
  queue_copy(device, stream, on_host(to), from.clone());
  if (!non_blocking) sim::finish(device, stream);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  if (self.numel() == 0) return dst;
  const at::Tensor from = self.sizes() == dst.sizes() ? self : self.expand(dst.sizes());
  if (is_sim(from) && is_sim(dst)) {
    const c10::DeviceGuard guard(from.device());
    copy_on_devices(from, dst);
  } else if (same_layout(from, dst)) {
    const c10::DeviceGuard guard(is_sim(from) ? from.device() : dst.device());
    is_sim(from) ? copy_to_host(from, dst, non_blocking)
                 : copy_to_device(from, dst, non_blocking);
  } else if (is_sim(from)) {
    // Converted on the device, sent in one piece, and spread out on the host.
    const at::Tensor sent = from.to(dst.scalar_type()).contiguous();
    const at::Tensor landed =
        dst.is_contiguous() ? dst : at::empty(dst.sizes(), dst.options());
    copy_to_host(sent, landed, non_blocking);
    if (!landed.is_same(dst)) dst.copy_(landed);
  } else {
    const at::Tensor sent = from.resolve_conj().resolve_neg().contiguous();
    const at::Tensor landed = at::empty(dst.sizes(), dst.options().dtype(sent.scalar_type()));
    copy_to_device(sent, landed, non_blocking);
    dst.copy_(landed);
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  at::native::resize_(dst, self.sizes(), std::nullopt);
  return copy_from(self, dst, false);
}

// -- for Python ----------------------------------------------------------------------------------

std::vector<int64_t> counts(int64_t device) {
  const auto counts = sim::counts(static_cast<int>(device));
  return {counts.launches, counts.waits, counts.copied_async, counts.copied_waiting};
}

std::vector<int64_t> memory(int64_t device) {
  const auto stats = sim::memory_stats(static_cast<int>(device));
  return {stats.allocated, stats.allocated_peak, stats.reserved, stats.reserved_peak,
          stats.blocks,    stats.retries,        stats.failures};
}

std::vector<int64_t> blocks(int64_t device) {
  return sim::blocks_in_use(static_cast<int>(device));
}

at::Generator generator(int64_t device) { return default_generator(static_cast<int>(device)); }

}  // namespace

namespace at {
namespace detail {
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard)
}
}  // namespace at

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty_sim);
  m.impl("empty_strided", empty_strided_sim);
  m.impl("as_strided", as_strided_sim);
  m.impl("view", view_sim);
  m.impl("_reshape_alias", reshape_alias_sim);
  m.impl("resize_", resize_sim);
  m.impl("set_.source_Tensor", set_tensor_sim);
  m.impl("set_.source_Storage", set_storage_sim);
  m.impl("set_.source_Storage_storage_offset", set_storage_offset_sim);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", native_dropout);
  m.impl(
      "convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(layer_norm, fp32)
  KERNEL_PRIVATEUSEONE(mse_loss, fp32)
}

TORCH_LIBRARY(sim, m) {
  m.def("device_count() -> int", [] { return static_cast<int64_t>(sim::visible_devices()); });
  m.def("show_devices(int n) -> ()", [](int64_t n) { sim::show_devices(static_cast<int>(n)); });
  m.def("is_available() -> bool", [] { return sim::available(); });
  m.def("is_initialized() -> bool", [] { return sim::initialized(); });
  m.def("in_bad_fork() -> bool", [] { return sim::in_bad_fork(); });
  m.def("init() -> ()", [] { sim::initialize(); });
  m.def("default_generator(int device) -> Generator?", generator);
  m.def("counts(int device) -> int[]", counts);
  m.def("reasons(int device) -> str[]", [](int64_t device) {
    return sim::reasons(static_cast<int>(device));
  });
  m.def("reset_counts() -> ()", [] { sim::reset_counts(); });
  m.def("memory(int device) -> int[]", memory);
  m.def("blocks(int device) -> int[]", blocks);
  m.def("budget(int device) -> int", [](int64_t device) {
    return sim::budget(static_cast<int>(device));
  });
  m.def("set_budget(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) {
    sim::set_budget(static_cast<int>(device), bytes);
  });
  m.def("reset_peaks(int device) -> ()", [](int64_t device) {
    sim::reset_peaks(static_cast<int>(device));
  });
  m.def("set_latency(float seconds) -> ()", [](double seconds) { sim::set_latency(seconds); });
  m.def("set_jitter(float seconds) -> ()", [](double seconds) { sim::set_jitter(seconds); });
  m.def("hold(bool held) -> ()", [](bool held) { sim::hold(held); });
  m.def("forbid_waits(bool forbidden) -> ()", [](bool it) { sim::forbid_waits(it); });
  m.def("hang() -> ()", [] {
    const int device = sim::current_device();
    sim::hang(device, sim::current_stream(device));
  });
  m.def("release_hangs() -> ()", [] { sim::release_hangs(); });
  m.def("fail(int code, str words) -> ()", [](int64_t code, std::string words) {
    const int device = sim::current_device();
    sim::fail(device, sim::current_stream(device), static_cast<int>(code), words);
  });
  m.def("stop() -> ()", [] { sim::stop(); });
}

namespace {

[[maybe_unused]] const bool registered = [] {
  c10::SetAllocator(kSim, device_memory());
  static auto* const hooks = new SimHooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
  return true;
}();

}  // namespace
