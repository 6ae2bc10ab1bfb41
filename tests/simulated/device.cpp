// A simulated accelerator: torch's PrivateUse1 device, with queues that run late and memory of its own.
//
// Note: Operators are those of the CPU
//     An operator is enqueued on the current stream of its device. When its turn comes, the CPU's kernel runs
//     on tensors that have the same shapes and the memory at its true address. As on a GPU, what is enqueued
//     holds addresses, and no references.
//
// Note: When the host waits
//     What an operator returns is allocated at once, in the shape that the Meta kernel tells. Where there is
//     none, or where the values decide (`nonzero`, `item`), and where random numbers are drawn, the host waits
//     for the current stream, for no other, and computes itself.
//
// Note: Copies between host and device
//     They are ordered as CUDA's are. `non_blocking` runs beside the host where the host's memory is
//     page-locked and row-major: it is read or written when the queue gets there. Of other host memory a source
//     is read before the call returns, and a destination is filled. Where the device's memory is not row-major,
//     the elements arrive in order, and the queue puts them in place later: the host never waits for that.
#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/headeronly/core/enum_tag.h>
#include <torch/library.h>

namespace simulated {
namespace {

using at::Tensor;
using c10::IValue;
using Values = torch::jit::Stack;

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<int64_t, kDevices> current_queue{};
std::atomic<bool> used{false};

int checked(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "there is no simulated device ", int(index));
  return index;
}

int index_of(c10::Device device) { return device.has_index() ? checked(device.index()) : current_device; }

Queue& current(c10::Device device) { return queue(index_of(device), current_queue[index_of(device)]); }

Queue& queue_of(const c10::Stream& stream) { return queue(checked(stream.device_index()), stream.id()); }

void wait(Queue& of) { of.synchronize(of.enqueued()); }

void* true_address(const void* address) {
  return address == nullptr ? nullptr : reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) - kShift);
}

// ---- Memory -------------------------------------------------------------------------------------------------

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    used = true;
    const c10::Device device(kDevice, current_device);
    if (nbytes == 0) return {nullptr, nullptr, &give, device};
    auto* block = device_memory().take(nbytes, current(device));
    auto* address = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(block->memory) + kShift);
    return {address, block, &give, device};
  }

  static void give(void* block) {
    if (block != nullptr) device_memory().give(static_cast<Block*>(block));
  }

  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    if (auto* block = static_cast<Block*>(memory.get_context())) device_memory().record(block, queue_of(stream));
  }

  void copy_data(void* to, const void* from, size_t nbytes) const override {
    current({kDevice, current_device}).enqueue([=] {
      std::memcpy(true_address(to), true_address(from), nbytes);
    });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return {}; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {}
};

Allocator& allocator() {
  static auto* all = new Allocator;
  return *all;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, &give, at::kCPU};
    auto* memory = pinned_memory().take(nbytes);
    return {memory, memory, &give, at::kCPU};
  }

  static void give(void* memory) {
    if (memory != nullptr) pinned_memory().give(memory);
  }

  void copy_data(void* to, const void* from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }
};

void resize_storage(c10::StorageImpl& storage, size_t nbytes) {
  const c10::DeviceGuard guard(storage.device());
  auto larger = allocator().allocate(nbytes);
  if (const auto kept = std::min(nbytes, storage.nbytes())) allocator().copy_data(larger.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(larger));
  storage.set_nbytes(nbytes);
}

// ---- Streams, events, generators ----------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kDevice;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return kDevice; }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Device getDevice() const override { return {kDevice, current_device}; }
  void setDevice(c10::Device device) const override { current_device = checked(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kDevice, std::exchange(current_device, checked(device.index()))};
  }

  static c10::Stream stream(c10::Device device, int64_t number) {
    return c10::Stream(c10::Stream::UNSAFE, {kDevice, c10::DeviceIndex(index_of(device))}, number);
  }
  c10::Stream getStream(c10::Device device) const override { return stream(device, current_queue[index_of(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::array<std::atomic<int64_t>, kDevices> next{};
    used = true;
    return stream(device, 1 + next[index_of(device)]++ % (kQueues - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream other) const override {
    return stream(other.device(), std::exchange(current_queue[checked(other.device_index())], other.id()));
  }
  bool queryStream(const c10::Stream& of) const override { return Mark::now(queue_of(of)).reached(); }
  void synchronizeStream(const c10::Stream& of) const override { wait(queue_of(of)); }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    for (int number = 0; number < kQueues; ++number) wait(queue(checked(device), number));
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& of) const override {
    allocator().recordStream(memory, of);
  }

  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Mark;
    *static_cast<Mark*>(*event) = Mark::now(queue_of(on));
  }
  void block(void* event, const c10::Stream& other) const override {
    if (event != nullptr) static_cast<Mark*>(event)->block(queue_of(other));
  }
  bool queryEvent(void* event) const override { return event == nullptr || static_cast<Mark*>(event)->reached(); }
  void synchronizeEvent(void* event) const override {
    if (auto* mark = static_cast<Mark*>(event); mark != nullptr && mark->of != nullptr)
      mark->of->synchronize(mark->number);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
};

// The CPU's generator under the device's name, for the CPU's kernels refuse one of another device.
struct Generator final : c10::GeneratorImpl {
  Generator(c10::DeviceIndex device, at::Generator within)
      : GeneratorImpl({kDevice, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), on_cpu(within) {}

  void set_current_seed(uint64_t seed) override { on_cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { on_cpu.set_offset(offset); }
  uint64_t get_offset() const override { return on_cpu.get_offset(); }
  uint64_t current_seed() const override { return on_cpu.current_seed(); }
  uint64_t seed() override { return on_cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { on_cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return on_cpu.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device().index(), on_cpu.clone()); }

  at::Generator on_cpu;
};

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = new std::array<at::Generator, kDevices>{new_generator(0), new_generator(1)};
  return all->at(index_of({kDevice, device}));
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return used; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = checked(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, checked(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* memory) const override { return pinned_memory().holds(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* all = new PinnedAllocator;
    used = true;
    return all;
  }
  c10::Device getDeviceFromPtr(void*) const override { return {kDevice, current_device}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), nbytes);
  }
};

// ---- Tensors ------------------------------------------------------------------------------------------------

bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                     std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::Device(kDevice, index_of(device.value_or(kDevice))));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator(), keys, c10::dtype_or_default(dtype));
}

Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
             std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::Device(kDevice, index_of(device.value_or(kDevice))));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator(), keys, c10::dtype_or_default(dtype), format);
}

Tensor empty_as(const Tensor& other, c10::Device device) {
  const auto dtype = other.scalar_type();
  if (other.is_non_overlapping_and_dense())
    return empty_strided(other.sizes(), other.strides(), dtype, {}, device, {});
  return empty(other.sizes(), dtype, {}, device, {}, {});
}

// What is a number in Python decides on no dtype.
Tensor numbered_as(const Tensor& other, Tensor tensor) {
  if (other.unsafeGetTensorImpl()->is_wrapped_number()) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

// A tensor of the CPU over the same memory, which it does not keep.
class Aliases {
 public:
  Tensor operator()(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    auto& alias = tensors_[tensor.unsafeGetTensorImpl()];
    if (!alias.defined()) {
      const auto& storage = storage_of(tensor);
      alias = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
      alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
      alias._set_conj(tensor.is_conj());
      alias._set_neg(tensor.is_neg());
      numbered_as(tensor, alias);
    }
    return alias;
  }

 private:
  const c10::Storage& storage_of(const Tensor& tensor) {
    const auto& storage = tensor.storage();
    auto& alias = storages_[storage.unsafeGetStorageImpl()];
    if (!alias) {
      auto* memory = const_cast<void*>(storage.data());
      if (is_here(tensor)) memory = true_address(memory);
      alias = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), c10::DataPtr(memory, at::kCPU));
    }
    return alias;
  }

  std::map<c10::TensorImpl*, Tensor> tensors_;
  std::map<c10::StorageImpl*, c10::Storage> storages_;
};

// The shape without values. What is a scalar of the host stays one.
Tensor described(const Tensor& tensor) {
  if (!is_here(tensor)) return tensor;
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

template <class Convert>
IValue converted(const IValue& value, Convert&& convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> all;
    for (const Tensor& tensor : value.toTensorVector()) all.push_back(convert(tensor));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (const auto& tensor : value.toOptionalTensorVector())
      all.push_back(tensor ? std::optional<Tensor>(convert(*tensor)) : std::nullopt);
    return all;
  }
  return value;
}

// ---- Operators ----------------------------------------------------------------------------------------------

void resize_to(const Tensor& tensor, c10::IntArrayRef size) {
  const auto nbytes = at::detail::computeStorageNbytesContiguous(size, tensor.itemsize(), tensor.storage_offset());
  auto& storage = *tensor.storage().unsafeGetStorageImpl();
  if (nbytes > storage.nbytes()) resize_storage(storage, nbytes);
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(size);
}

// One call of an operator. See "Operators are those of the CPU" and "When the host waits".
class Call {
 public:
  Call(const c10::OperatorHandle& op, Values& stack) : op_(op), schema_(op.schema()) {
    const auto count = schema_.arguments().size();
    given_ = torch::jit::pop(stack, count);
    for (size_t at = 0; at < count; ++at) {
      const auto& value = given_[at];
      if (value.isDevice()) device_ = value.toDevice();
      converted(value, [&](const Tensor& tensor) {
        if (is_here(tensor) && !device_) device_ = tensor.device();
        return tensor;
      });
    }
    if (!device_) device_ = c10::Device(kDevice, current_device);
    check_devices();
  }

  Values run() {
    if (is_view()) return viewed();
    if (writes_only()) return enqueued({});
    if (auto results = described_results()) return enqueued(std::move(*results));
    return computed();
  }

 private:
  // As on a GPU, where only scalars and indices may be the host's.
  void check_devices() {
    for (size_t at = 0; at < given_.size(); ++at) {
      if (given_[at].isOptionalTensorList()) continue;
      const bool written = is_written(schema_.arguments()[at]);
      converted(given_[at], [&](const Tensor& tensor) {
        const bool scalar = tensor.defined() && tensor.is_cpu() && tensor.dim() == 0 && !written;
        const bool fits = !tensor.defined() || tensor.device() == *device_ || scalar;
        TORCH_CHECK(fits, schema_.name(), " of ", *device_, " was given a tensor of ", tensor.device());
        return tensor;
      });
    }
  }

  bool is_view() const {
    for (const auto& result : schema_.returns())
      if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return true;
    return false;
  }

  bool draws() const { return op_.hasTag(at::Tag::nondeterministic_seeded); }

  static bool is_written(const c10::Argument& of) { return of.alias_info() != nullptr && of.alias_info()->isWrite(); }

  bool writes_only() const {
    for (const auto& argument : schema_.arguments())
      if (argument.is_out()) return false;
    for (const auto& result : schema_.returns())
      if (!is_written(result)) return false;
    return !draws();
  }

  // What an operator returns of what it was given.
  const IValue& returned(const c10::Argument& result) const {
    for (size_t at = 0; at < given_.size(); ++at) {
      const auto* alias = schema_.arguments()[at].alias_info();
      if (alias != nullptr && *alias == *result.alias_info()) return given_[at];
    }
    TORCH_CHECK(false, schema_.name(), " returns nothing that it was given");
  }

  template <class Convert>
  Values arguments(Convert&& convert, c10::Device device) const {
    Values all;
    for (const auto& value : given_) {
      if (value.isDevice())
        all.emplace_back(device);
      else if (value.isGenerator())
        all.emplace_back(static_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl())->on_cpu);
      else
        all.push_back(converted(value, convert));
    }
    return all;
  }

  // Views change no memory: they need no queue.
  Values viewed() {
    Aliases alias;
    auto values = arguments(alias, at::kCPU);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &values);
    const auto& source = returned(schema_.returns()[0]).toTensor();
    const auto& result = values.at(0).toTensor();
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(source.storage()), source.key_set(), result.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides(), result.storage_offset());
    return {view};
  }

  // Results without values, or nothing where only a run can tell.
  std::optional<Values> described_results() const {
    if (draws() || op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape) ||
        !op_.hasKernelForDispatchKey(c10::DispatchKey::Meta) ||
        schema_.name() == "aten::native_batch_norm")  // Meta's has a GPU's dtypes
      return std::nullopt;
    auto values = arguments(described, at::kMeta);
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &values);
    } catch (const std::exception&) {  // the CPU's kernel says what is wrong, or does what Meta's cannot
      return std::nullopt;
    }
    for (const auto& value : values)
      if (!value.isTensor() && !value.isTensorList()) return std::nullopt;
    return values;
  }

  Values enqueued(Values described_as) {
    Values results, targets;
    Aliases alias;
    for (size_t at = 0; at < schema_.returns().size(); ++at) {
      const auto& result = schema_.returns()[at];
      if (is_written(result)) {
        results.push_back(returned(result));
        if (!described_as.empty() && described_as[at].isTensor()) {
          const auto& shape = described_as[at].toTensor();
          if (results[at].toTensor().sizes() != shape.sizes()) resize_to(results[at].toTensor(), shape.sizes());
        }
        targets.emplace_back();
      } else {
        results.push_back(converted(described_as[at], [&](const Tensor& shape) {
          return shape.defined() ? empty_as(shape, *device_) : shape;
        }));
        targets.push_back(converted(results[at], alias));
      }
    }
    auto values = arguments(
        [&](const Tensor& given) {
          return given.defined() && given.is_cpu() ? numbered_as(given, given.clone()) : alias(given);
        },
        at::kCPU);
    current(*device_).enqueue([op = op_, values, targets]() mutable {
      const at::AutoDispatchBelowADInplaceOrView guard;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &values);
      for (size_t at = 0; at < targets.size(); ++at) fill(targets[at], values[at]);
    });
    return results;
  }

  static void fill(const IValue& target, const IValue& value) {
    const auto copy = [](const Tensor& to, const Tensor& from) {
      TORCH_CHECK(to.dtype() == from.dtype() && to.sizes() == from.sizes(), "Meta's kernel tells another result");
      to.copy_(from);
    };
    if (target.isTensor() && target.toTensor().defined()) copy(target.toTensor(), value.toTensor());
    if (!target.isTensorList()) return;
    const auto values = value.toTensorVector(), targets = target.toTensorVector();
    for (size_t at = 0; at < values.size(); ++at) copy(targets.at(at), values[at]);
  }

  // The host computes, after the current stream.
  Values computed() {
    wait(current(*device_));
    Aliases alias;
    auto values = arguments(alias, at::kCPU);
    for (size_t at = 0; at < given_.size(); ++at) {
      const auto& argument = schema_.arguments()[at];
      if (argument.is_out() && given_[at].isTensor())
        values[at] = Tensor(at::detail::empty_cpu({0}, given_[at].toTensor().scalar_type()));
      if (draws() && given_[at].isNone() && argument.name() == "generator")
        values[at] = static_cast<Generator*>(default_generator(index_of(*device_)).unsafeGetGeneratorImpl())->on_cpu;
    }
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &values);
    Values results;
    for (size_t at = 0; at < schema_.returns().size(); ++at) {
      const auto& result = schema_.returns()[at];
      if (!is_written(result)) {
        results.push_back(converted(values[at], [&](const Tensor& value) { return uploaded(value); }));
        continue;
      }
      results.push_back(returned(result));
      if (is_out_of(result)) {
        resize_to(results[at].toTensor(), values[at].toTensor().sizes());
        upload(values[at].toTensor(), results[at].toTensor());
      }
    }
    return results;
  }

  bool is_out_of(const c10::Argument& result) const {
    for (const auto& argument : schema_.arguments())
      if (argument.is_out() && *argument.alias_info() == *result.alias_info()) return true;
    return false;
  }

  Tensor uploaded(const Tensor& value) const {
    if (!value.defined()) return value;
    auto there = empty_as(value, *device_);
    upload(value, there);
    return there;
  }

  void upload(const Tensor& value, const Tensor& there) const {
    current(*device_).enqueue([value, target = Aliases()(there)] { target.copy_(value); });
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Values given_;
  std::optional<c10::Device> device_;
};

void fallback(const c10::OperatorHandle& op, Values* stack) {
  for (auto& result : Call(op, *stack).run()) stack->push_back(std::move(result));
}

// See "Copies between host and device".
Tensor& copy_(Tensor& to, const Tensor& given, bool non_blocking) {
  const auto from = given.expand_as(to);
  if (to.numel() == 0 || to.is_same(given)) return to;
  const auto to_host = to.is_cpu(), from_host = from.is_cpu();
  TORCH_CHECK((to_host || is_here(to)) && (from_host || is_here(from)), "no copy to ", to.device());
  auto& own = current(to_host ? from.device() : to.device());
  const auto pinned = [](const Tensor& host) { return host.is_contiguous() && pinned_memory().holds(host.data_ptr()); };
  Aliases alias;
  const auto copy = [&](const Tensor& source) {
    return own.enqueue([to = alias(to), source] { to.copy_(source); });
  };
  if (from_host && !to.is_contiguous()) {
    auto arrived = empty(to.sizes(), to.scalar_type(), {}, to.device(), {}, {});
    copy_(to, copy_(arrived, from, non_blocking), non_blocking);
  } else if (to_host) {
    const auto number = copy(alias(from));
    if (!non_blocking || !pinned(to)) own.synchronize(number);
  } else if (from_host) {
    const bool late = !non_blocking || (pinned(from) && from.dtype() == to.dtype());
    const auto number = copy(late ? alias(from) : from.clone());
    if (!non_blocking) own.synchronize(number);
  } else {
    auto& other = current(from.device());
    Mark::now(other).block(own);
    copy(alias(from));
    Mark::now(own).block(other);
  }
  return to;
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  resize_to(self, size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

Tensor& set_part(Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr) {
    self.unsafeGetTensorImpl()->set_storage_offset(offset);
    self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
  }
  return self;
}

Tensor& set_storage(Tensor& self, c10::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_part(self, std::move(source), 0, {count}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_part(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void record_stream(Tensor& self, c10::Stream stream) { allocator().recordStream(self.storage().data_ptr(), stream); }

std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double part, std::optional<bool>) {
  const auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - part);
  return {input.mul(mask).div_(1 - part), mask};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("copy_", &copy_);
  library.impl("resize_", &resize_);
  library.impl("set_.source_Storage_storage_offset", &set_part);
  library.impl("set_.source_Storage", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("record_stream", &record_stream);
  library.impl("native_dropout", &native_dropout);
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool registered = [] {
  c10::SetAllocator(kDevice, &allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

// What Python calls beside torch's own interfaces.
TORCH_LIBRARY(simulated, library) {
  library.def("set_delays(float seconds, int seed) -> ()", [](double most, int64_t seed) { delays().set(most, seed); });
  library.def("hold(int device, int stream, bool held) -> ()", [](int64_t device, int64_t stream, bool held) {
    queue(int(device), stream).hold(held);
  });
  library.def("device_count() -> int", [] { return int64_t{kDevices}; });
  library.def("is_used() -> bool", [] { return used.load(); });
  library.def("generator(int device) -> Generator?", [](int64_t device) { return default_generator(device); });
}

}  // namespace
}  // namespace simulated
