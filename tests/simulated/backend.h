// The interfaces of torch to a device: memory, streams, events, generators.
#pragma once

#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace simulated {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::array<int64_t, kDevices> current_queue{};
inline std::atomic<bool> used{false};

inline int checked(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < kDevices, "there is no simulated device ", int(index));
  return index;
}

inline int index_of(c10::Device device) {
  return device.has_index() ? checked(device.index()) : current_device;
}

inline Queue& current(c10::Device device) { return queue(index_of(device), current_queue[index_of(device)]); }

inline Queue& queue_of(const c10::Stream& stream) {
  return queue(checked(stream.device_index()), stream.id());
}

inline void wait(Queue& of) { of.synchronize(of.enqueued()); }

inline void* true_address(const void* address) {
  if (address == nullptr) return nullptr;
  return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(address) - kShift);
}

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
    auto* block = static_cast<Block*>(memory.get_context());
    if (block != nullptr) device_memory().record(block, queue_of(stream));
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

inline Allocator& allocator() {
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

  void copy_data(void* to, const void* from, size_t nbytes) const override {
    default_copy_data(to, from, nbytes);
  }
};

inline void resize_storage(c10::StorageImpl& storage, size_t nbytes) {
  const c10::DeviceGuard guard(storage.device());
  auto larger = allocator().allocate(nbytes);
  if (const auto kept = std::min(nbytes, storage.nbytes()))
    allocator().copy_data(larger.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(larger));
  storage.set_nbytes(nbytes);
}

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
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_queue[index_of(device)]);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    static std::array<std::atomic<int64_t>, kDevices> next{};
    used = true;
    return stream(device, 1 + next[index_of(device)]++ % (kQueues - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
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
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<Mark*>(event)->reached();
  }
  void synchronizeEvent(void* event) const override {
    if (auto* mark = static_cast<Mark*>(event); mark != nullptr && mark->of != nullptr)
      mark->of->synchronize(mark->number);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
};

// The CPU's generator under the device's name. The CPU's kernels refuse a generator of another device.
struct Generator final : c10::GeneratorImpl {
  Generator(c10::DeviceIndex device, at::Generator within)
      : GeneratorImpl({kDevice, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        on_cpu(std::move(within)) {}

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

inline at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device, at::detail::createCPUGenerator());
}

inline const at::Generator& default_generator(c10::DeviceIndex device) {
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
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), nbytes);
  }
};

}  // namespace simulated
