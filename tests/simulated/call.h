// Operators of the simulated device.
//
// Note: Operators are those of the CPU
//     An operator is enqueued on the current stream of its device. When its turn comes, the CPU's kernel runs
//     on tensors that have the same shapes and the memory at its true address. As on a GPU, enqueued work
//     holds addresses, and no references.
//
// Note: When the host waits
//     Results are allocated at once, in the shape that the Meta kernel gives. If there is no Meta kernel, if
//     the result depends on values (`nonzero`, `item`), or if random numbers are drawn, the host waits for
//     the current stream only, and computes the result itself.
#pragma once

#include "backend.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/headeronly/core/enum_tag.h>
#include <torch/library.h>

namespace simulated {

using at::Tensor;
using c10::IValue;
using Values = torch::jit::Stack;

inline bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

inline Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  const c10::DeviceGuard guard(c10::Device(kDevice, index_of(device.value_or(kDevice))));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator(), keys, c10::dtype_or_default(dtype));
}

inline Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>,
    std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::Device(kDevice, index_of(device.value_or(kDevice))));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator(), keys, c10::dtype_or_default(dtype), format);
}

inline Tensor empty_as(const Tensor& other, c10::Device device) {
  const auto dtype = other.scalar_type();
  if (other.is_non_overlapping_and_dense())
    return empty_strided(other.sizes(), other.strides(), dtype, {}, device, {});
  return empty(other.sizes(), dtype, {}, device, {}, {});
}

// A Python number does not decide the dtype.
inline Tensor numbered_as(const Tensor& other, Tensor tensor) {
  if (other.unsafeGetTensorImpl()->is_wrapped_number())
    tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

// A CPU tensor over the same memory, which it does not own.
class Aliases {
 public:
  Tensor operator()(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    auto& alias = tensors_[tensor.unsafeGetTensorImpl()];
    if (!alias.defined()) {
      const auto& storage = storage_of(tensor);
      alias = at::detail::make_tensor<c10::TensorImpl>(
          c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
      alias.unsafeGetTensorImpl()->set_sizes_and_strides(
          tensor.sizes(), tensor.strides(), tensor.storage_offset());
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

// Enqueues work in the inference mode of its caller: outside of it, no work may write to a tensor made in it.
template <class Work>
uint64_t enqueue(Queue& queue, Work work) {
  return queue.enqueue([work = std::move(work), is_inference = c10::InferenceMode::is_enabled()]() mutable {
    const c10::InferenceMode guard(is_inference);
    work();
  });
}

// The shape without values. A scalar of the host stays one.
inline Tensor described(const Tensor& tensor) {
  if (!is_here(tensor)) return tensor;
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

template <class Convert>
inline IValue converted(const IValue& value, Convert&& convert) {
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

inline void resize_to(const Tensor& tensor, c10::IntArrayRef size) {
  const auto nbytes =
      at::detail::computeStorageNbytesContiguous(size, tensor.itemsize(), tensor.storage_offset());
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
  // As on a GPU, only scalars and indices may be on the host.
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

  static bool is_written(const c10::Argument& of) {
    return of.alias_info() != nullptr && of.alias_info()->isWrite();
  }

  static const at::Generator& on_cpu(const at::Generator& generator) {
    return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->on_cpu;
  }

  bool writes_only() const {
    for (const auto& argument : schema_.arguments())
      if (argument.is_out()) return false;
    for (const auto& result : schema_.returns())
      if (!is_written(result)) return false;
    return !draws();
  }

  // The argument that an operator returns as a result.
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
        all.emplace_back(on_cpu(value.toGenerator()));
      else
        all.push_back(converted(value, convert));
    }
    return all;
  }

  // Views change no memory, so they need no queue.
  Values viewed() {
    Aliases alias;
    auto values = arguments(alias, at::kCPU);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &values);
    const auto& source = returned(schema_.returns()[0]).toTensor();
    const auto& result = values.at(0).toTensor();
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(source.storage()), source.key_set(), result.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(
        result.sizes(), result.strides(), result.storage_offset());
    return {view};
  }

  // Results without values, or nothing if only the CPU's kernel can determine them.
  std::optional<Values> described_results() const {
    if (draws() || op_.hasTag(at::Tag::data_dependent_output) || op_.hasTag(at::Tag::dynamic_output_shape) ||
        !op_.hasKernelForDispatchKey(c10::DispatchKey::Meta) ||
        schema_.name() == "aten::native_batch_norm")  // Meta's has a GPU's dtypes
      return std::nullopt;
    auto values = arguments(described, at::kMeta);
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &values);
    } catch (const std::exception&) {  // the CPU's kernel raises the error, or does what Meta's cannot
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
          const auto shape = described_as[at].toTensor().sizes();
          if (results[at].toTensor().sizes() != shape) resize_to(results[at].toTensor(), shape);
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
    enqueue(current(*device_), [op = op_, values, targets]() mutable {
      const at::AutoDispatchBelowADInplaceOrView guard;
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &values);
      for (size_t at = 0; at < targets.size(); ++at) fill(targets[at], values[at]);
    });
    return results;
  }

  static void fill(const IValue& target, const IValue& value) {
    const auto copy = [](const Tensor& to, const Tensor& from) {
      const bool alike = to.dtype() == from.dtype() && to.sizes() == from.sizes();
      TORCH_CHECK(alike, "Meta's kernel tells another result");
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
        values[at] = on_cpu(default_generator(index_of(*device_)));
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
    enqueue(current(*device_), [value, target = Aliases()(there)] { target.copy_(value); });
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  Values given_;
  std::optional<c10::Device> device_;
};

}  // namespace simulated
