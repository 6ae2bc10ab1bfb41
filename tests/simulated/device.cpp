// A simulated accelerator: torch's PrivateUse1 device, with queues that run late and memory of its own.
//
// Note: Copies between host and device
//     They are ordered as CUDA's are. `non_blocking` runs beside the host if the host's memory is page-locked
//     and row-major: the memory is read or written when the queue reaches the copy. Other host memory is read
//     or filled before the call returns. If the device's memory is not row-major, the elements arrive in
//     order, and the queue puts them in place later: the host never waits for that.
#include "call.h"

#include <ATen/ops/empty_like.h>

namespace simulated {
namespace {

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
  const auto pinned = [](const Tensor& host) {
    return host.is_contiguous() && pinned_memory().holds(host.data_ptr());
  };
  Aliases alias;
  const auto copy = [&](const Tensor& source) {
    return enqueue(own, [to = alias(to), source] { to.copy_(source); });
  };
  const auto record = [&](const Tensor& host) {
    if (!pinned_memory().record(host.storage().data_ptr().get_context(), own))
      pinned_memory().record(host.data_ptr(), own);
  };
  if (from_host && !to.is_contiguous()) {
    auto arrived = empty(to.sizes(), to.scalar_type(), {}, to.device(), {}, {});
    copy_(to, copy_(arrived, from, non_blocking), non_blocking);
  } else if (to_host) {
    const auto number = copy(alias(from));
    record(to);
    if (!non_blocking || !pinned(to)) own.synchronize(number);
  } else if (from_host) {
    const bool late = !non_blocking || (pinned(from) && from.dtype() == to.dtype());
    const auto number = copy(late ? alias(from) : from.clone());
    record(from);
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

Tensor& set_part(
    Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
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

void record_stream(Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

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

// Functions for Python, beside torch's own interfaces.
TORCH_LIBRARY(simulated, library) {
  library.def("set_delays(float seconds, int seed) -> ()", [](double most, int64_t seed) {
    delays().set(most, seed);
  });
  library.def("hold(int device, int stream, bool held) -> ()", [](int64_t device, int64_t stream, bool held) {
    queue(int(device), stream).hold(held);
  });
  library.def("device_count() -> int", [] { return int64_t{kDevices}; });
  library.def("is_used() -> bool", [] { return used.load(); });
  library.def("generator(int device) -> Generator?", [](int64_t device) {
    return default_generator(c10::DeviceIndex(device));
  });
}

}  // namespace
}  // namespace simulated
