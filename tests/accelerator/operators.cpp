// Operators: each runs its CPU kernel in the current stream of the device its tensors are on.
//
// The shapes of results come from the operator's meta kernel; where it has none, or results are no
// tensors, the host waits for the stream, as it does for `nonzero` or `item` on a GPU.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Functions.h>
#include <ATen/NativeFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <chrono>
#include <cstring>
#include <thread>
#include <unordered_map>

#include "device.h"
#include "runtime.h"

namespace sim {

bool on_sim(const at::Tensor& t) { return t.defined() && t.is_privateuseone(); }

void Touched::add(const at::Tensor& t, bool write) {
  if (!on_sim(t) || !t.numel()) return;
  auto block = block_at(t.storage().data());
  TORCH_INTERNAL_ASSERT(block, "sim: a tensor without memory of a device");
  int64_t low = 0, high = 0;
  for (int64_t i = 0; i < t.dim(); ++i) {
    int64_t reach = (t.size(i) - 1) * t.stride(i);
    (reach < 0 ? low : high) += reach;
  }
  auto start = reinterpret_cast<uintptr_t>(t.storage().data()) + t.storage_offset() * t.itemsize();
  uses.push_back({start + low * t.itemsize(), start + (high + 1) * t.itemsize(), write});
  blocks.push_back(std::move(block));
}

at::Tensor as_cpu(const at::Tensor& t) {
  auto options = t.options().device(at::kCPU).layout(at::kStrided);
  auto block = block_at(t.storage().data());
  size_t bytes = t.storage().nbytes();
  if (!block) return at::empty_strided(t.sizes(), t.strides(), options);
  auto* owner = new BlockPtr(block);
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), bytes,
      c10::DataPtr(
          t.storage().mutable_data(), owner, [](void* p) { delete static_cast<BlockPtr*>(p); },
          at::kCPU),
      nullptr, false);
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(), t.storage_offset());
  view._set_conj(t.is_conj());
  view._set_neg(t.is_neg());
  return view;
}

namespace {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

c10::DeviceGuard guard_for(int device) {
  return c10::DeviceGuard(c10::Device(at::kPrivateUse1, static_cast<c10::DeviceIndex>(device)));
}

struct Below {  // kernels, not autograd
  at::AutoDispatchBelowADInplaceOrView guard;
};

// -- memory and views -----------------------------------------------------------------------------

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(at::layout_or_default(layout) == at::kStrided, "sim has dense tensors only");
  c10::DeviceGuard guard(*device);
  return at::detail::empty_generic(
      size, c10::GetAllocator(at::kPrivateUse1),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool>) {
  TORCH_CHECK(at::layout_or_default(layout) == at::kStrided, "sim has dense tensors only");
  c10::DeviceGuard guard(*device);
  return at::detail::empty_strided_generic(
      size, stride, c10::GetAllocator(at::kPrivateUse1),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype));
}

const Tensor& resize_(
    const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  size_t needed = (self.storage_offset() + self.numel()) * self.itemsize();
  if (self.numel() && needed > self.storage().nbytes()) resize_storage(self.storage(), needed);
  return self;
}

Tensor& set_storage(
    Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  auto dense = c10::contiguous_strides(size);
  impl->set_sizes_and_strides(size, stride.size() == size.size() ? stride : dense, offset);
  return self;
}
Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  int64_t elements = source.nbytes() / self.itemsize();
  return set_storage(self, std::move(source), 0, {elements}, {1});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) {
  return set_storage(
      self, c10::Storage(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(at::kPrivateUse1), true),
      0, {0}, {1});
}
bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
      self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
      self.strides() == other.strides();
}

void record_stream_(Tensor& self, at::Stream stream) {
  if (auto block = block_at(self.storage().data())) record_stream(block, number_of(stream));
}

// -- copies ---------------------------------------------------------------------------------------

uint64_t digest(const Tensor& t) {  // of host memory that is not to change for a while
  auto dense = t.contiguous();
  uint64_t sum = 14695981039346656037ull;
  auto* bytes = static_cast<const unsigned char*>(dense.const_data_ptr());
  for (size_t i = 0, n = dense.nbytes(); i < n; ++i) sum = (sum ^ bytes[i]) * 1099511628211ull;
  return sum;
}

void to_device(const Tensor& host, const Tensor& out, bool non_blocking) {
  int stream = current_stream(out.device().index());
  Touched touched;
  touched.add(out, true);
  Tensor to = as_cpu(out);
  bool late = non_blocking && host.is_pinned();
  Tensor from = late || !non_blocking ? host : host.clone();  // pageable memory is staged at once
  uint64_t before = late ? digest(from) : 0;
  submit(stream, "copy to device", touched.uses, [=]() mutable {
    Below below;
    if (late && digest(from) != before)
      fault("sim: race: the host wrote to pinned memory while its copy to the device was under way");
    to.copy_(from);
  }, touched.blocks);
  if (!non_blocking) synchronize_stream(stream);
}

constexpr auto kLate = std::chrono::milliseconds(2);  // by which a host that does not wait is early

void to_host(const Tensor& source, const Tensor& host, bool non_blocking) {
  int stream = current_stream(source.device().index());
  Touched touched;
  touched.add(source, false);
  Tensor from = as_cpu(source), to = host;
  bool late = non_blocking && host.is_pinned();
  // what the host reads too early is never by luck what it waits for
  if (late && host.is_contiguous()) std::memset(host.mutable_data_ptr(), 0x7d, host.nbytes());
  submit(stream, "copy to host", touched.uses, [=]() mutable {
    Below below;
    if (late) std::this_thread::sleep_for(kLate);
    to.copy_(from);
  }, touched.blocks);
  if (!late) synchronize_stream(stream);
}

void within(const Tensor& source, const Tensor& out) {
  int there = current_stream(out.device().index());
  int stream = current_stream(source.device().index());
  Tensor from = as_cpu(source), to = as_cpu(out);
  Touched touched;
  touched.add(source, false);
  touched.add(out, true);
  // between devices the copy is the source's, and both streams wait for each other
  if (stream != there) wait(stream, record(there));
  submit(stream, "copy", touched.uses, [=]() mutable {
    Below below;
    to.copy_(from);
  }, touched.blocks);
  if (stream != there) wait(there, record(stream));
}

Tensor copy_from(const Tensor& self, const Tensor& out, bool non_blocking) {
  if (!out.numel()) return out;
  Below below;
  Tensor source = self.expand(out.sizes());
  if (on_sim(source) && on_sim(out)) {
    within(source, out);
  } else if (on_sim(out)) {
    to_device(source.detach(), out, non_blocking);
  } else {
    to_host(source, out.detach(), non_blocking);
  }
  return out;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& out) {
  out.resize_(self.sizes());
  return copy_from(self, out, false);
}

at::Scalar local_scalar(const Tensor& self) {
  Tensor host = at::empty(self.sizes(), self.options().device(at::kCPU));
  copy_from(self, host, false);
  return host.item();
}

// -- everything else ------------------------------------------------------------------------------

// The value with each tensor, generator and device in it changed.
template <class OfTensor>
IValue changed(const IValue& value, const OfTensor& of_tensor, const IValue& generator, at::Device device) {
  if (value.isTensor()) {
    const Tensor& t = value.toTensor();
    return t.defined() ? IValue(of_tensor(t)) : value;
  }
  if (value.isTensorList()) {
    c10::List<Tensor> all;
    for (const Tensor& t : value.toTensorList()) all.push_back(of_tensor(t));
    return all;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> all;
    for (const std::optional<Tensor>& t : value.toOptionalTensorList())
      all.push_back(t && t->defined() ? std::optional<Tensor>(of_tensor(*t)) : t);
    return all;
  }
  if (value.isGenerator()) return generator;
  if (value.isDevice() && value.toDevice().is_privateuseone()) return device;
  return value;
}

template <class Do>
void each_tensor(const IValue& value, const Do& act) {
  changed(value, [&](const Tensor& t) { return act(t), t; }, IValue(), at::kCPU);
}

bool takes_host_indices(const std::string& name) {
  return name.find("index") != std::string::npos;
}

struct Operation {
  const c10::OperatorHandle& op;
  const c10::OperatorHandle& kernel;  // the one that the CPU has, mostly `op`
  const std::string name;
  Stack arguments;
  int device = -1;
  int stream = 0;
  Touched touched;
  Stack host;  // the arguments as the CPU kernel gets them
  std::vector<std::pair<Tensor, Tensor>> written;  // arguments: on the device, on the host

  Operation(const c10::OperatorHandle& op, const c10::OperatorHandle& kernel, Stack* stack)
      : op(op), kernel(kernel), name(op.schema().name()) {
    size_t count = op.schema().arguments().size();
    arguments.assign(stack->end() - count, stack->end());
    torch::jit::drop(*stack, count);
    find_device();
    stream = current_stream(device);
    make_host();
  }

  void find_device() {
    for (const auto& value : arguments) {
      each_tensor(value, [&](const Tensor& t) {
        if (!on_sim(t)) return;
        if (device < 0) device = t.device().index();
        if (t.device().index() != device)
          fail(
              "sim: " + name + " got tensors of sim:" + std::to_string(device) + " and sim:" +
              std::to_string(t.device().index()) + "; expected all tensors to be on the same device");
      });
      if (device < 0 && value.isDevice() && value.toDevice().has_index())
        device = value.toDevice().index();
    }
    if (device < 0) device = current_device();
    for (const auto& value : arguments)
      each_tensor(value, [&](const Tensor& t) {
        TORCH_CHECK(
            on_sim(t) || !t.is_cpu() || !t.dim() || takes_host_indices(name), "sim: ", name,
            " got a tensor on the CPU beside those on sim:", device,
            "; expected all tensors to be on the same device");
      });
  }

  bool writes(size_t i) const {
    auto* alias = op.schema().arguments()[i].alias_info();
    return alias && alias->isWrite();
  }

  IValue seeded(const IValue& generator) const {  // for one call, so that order is that of giving
    auto& own = generator.isGenerator() ? generator.toGenerator() : default_generator(device);
    auto* impl = dynamic_cast<GeneratorImpl*>(own.unsafeGetGeneratorImpl());
    TORCH_CHECK(impl, "sim: expected a generator of sim, got one of ", own.device());
    return at::make_generator<at::CPUGeneratorImpl>(impl->draw());
  }

  void make_host() {
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto& argument = op.schema().arguments()[i];
      bool write = writes(i);
      if (argument.type()->str().find("Generator") != std::string::npos) {
        host.push_back(seeded(arguments[i]));
        continue;
      }
      host.push_back(changed(
          arguments[i],
          [&](const Tensor& t) {
            if (!on_sim(t)) return t.clone();  // read now: the host goes on
            touched.add(t, write);
            Tensor view = as_cpu(t);
            if (write) written.push_back({t, view});
            return view;
          },
          IValue(), at::kCPU));
    }
  }

  // What it returns, without running it; false where that can't be known.
  bool results(Stack& found) {
    if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return false;
    for (const auto& one : op.schema().returns())
      if (!one.type()->isSubtypeOf(*c10::TensorType::get()) &&
          !one.type()->isSubtypeOf(*c10::ListType::ofTensors()))
        return false;
    std::unordered_map<c10::TensorImpl*, Tensor> metas;
    for (const auto& value : arguments)
      found.push_back(changed(
          value,
          [&](const Tensor& t) {
            auto& meta = metas[t.unsafeGetTensorImpl()];
            if (!meta.defined())
              meta = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta));
            return meta;
          },
          IValue(), at::kMeta));
    try {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &found);
    } catch (...) {
      return false;  // the CPU kernel says what is wrong, or there is no meta kernel
    }
    for (const auto& [real, view] : written) {
      auto meta = metas.find(real.unsafeGetTensorImpl());
      if (meta != metas.end() && meta->second.sizes() != real.sizes()) return false;
    }
    return true;
  }

  // Where a result is an argument that was written to, that argument.
  const IValue* same(size_t result) const {
    auto* alias = op.schema().returns()[result].alias_info();
    if (!alias) return nullptr;
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto* own = op.schema().arguments()[i].alias_info();
      if (own && own->beforeSets() == alias->beforeSets() && writes(i)) return &arguments[i];
    }
    TORCH_CHECK(false, "sim has no ", name, ", which returns a view");
  }

  Tensor made_like(const Tensor& t) const {
    return at::empty_strided(
        t.sizes(), t.strides(), t.options().device(at::Device(at::kPrivateUse1, device)));
  }

  void later(const Stack& metas, Stack* stack) {
    Stack out;
    std::vector<Tensor> fresh;  // on the host, in the order in which results come
    std::vector<bool> own;
    for (size_t i = 0; i < metas.size(); ++i) {
      const IValue* argument = same(i);
      own.push_back(!argument);
      out.push_back(
          argument ? *argument
                   : changed(
                         metas[i],
                         [&](const Tensor& t) {
                           Tensor made = made_like(t);
                           touched.add(made, true);
                           fresh.push_back(as_cpu(made));
                           return made;
                         },
                         IValue(), at::kMeta));
    }
    auto kernel = this->kernel;
    submit(stream, name, touched.uses, [kernel, host = host, fresh, own]() mutable {
      Below below;
      kernel.callBoxed(&host);
      size_t next = 0;
      for (size_t i = 0; i < own.size(); ++i)
        if (own[i]) each_tensor(host[i], [&](const Tensor& t) { fresh[next++].copy_(t); });
      host.clear();
    }, touched.blocks);
    for (auto& value : out) stack->push_back(std::move(value));
  }

  void now(Stack* stack) {
    std::exception_ptr error;
    auto kernel = this->kernel;
    Stack& host = this->host;
    submit(stream, name, touched.uses, [kernel, &host, &error]() {
      Below below;
      try {
        kernel.callBoxed(&host);
      } catch (...) {
        error = std::current_exception();
      }
    }, touched.blocks);
    synchronize_stream(stream);
    if (error) std::rethrow_exception(error);
    for (auto& [real, view] : written)
      if (view.sizes() != real.sizes()) {
        Tensor(real).resize_(view.sizes());
        copy_from(view, real, false);
      }
    for (size_t i = 0; i < host.size(); ++i) {
      const IValue* argument = same(i);
      stack->push_back(
          argument ? *argument
                   : changed(
                         host[i],
                         [&](const Tensor& t) {
                           Tensor made = made_like(t);
                           copy_from(t, made, false);
                           return made;
                         },
                         IValue(), at::kCPU));
    }
  }

  void run(Stack* stack) {
    auto guard = guard_for(device);
    Stack metas;
    if (results(metas)) {
      later(metas, stack);
    } else {
      now(stack);
    }
  }
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  Below below;
  Operation(op, op, stack).run(stack);
}

void convolution(const c10::OperatorHandle& op, Stack* stack) {
  static auto kernel = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  Below below;
  Operation(kernel, kernel, stack).run(stack);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, at::IntArrayRef stride,
    at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
    at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  static auto kernel = c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  int64_t outputs = transposed ? weight.size(1) * groups : weight.size(0);
  Stack stack;
  torch::jit::push(
      stack, grad, input, weight, at::OptionalIntArrayRef(at::IntArrayRef(outputs)), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  Below below;
  Operation(kernel, kernel, &stack).run(&stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

}  // namespace

void resize_storage(const c10::Storage& storage, size_t size) {
  auto guard = guard_for(storage.device().index());
  auto* impl = storage.unsafeGetStorageImpl();
  size_t kept = std::min(size, impl->nbytes());
  auto data = c10::GetAllocator(at::kPrivateUse1)->allocate(size);
  if (kept) c10::GetAllocator(at::kPrivateUse1)->copy_data(data.get(), storage.data(), kept);
  impl->set_data_ptr(std::move(data));
  impl->set_nbytes(size);
}

}  // namespace sim

namespace at::native {
// attention is made of other operators
int64_t plain_attention(
    const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &plain_attention)
}  // namespace at::native

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&sim::fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", sim::empty);
  m.impl("empty_strided", sim::empty_strided);
  m.impl("resize_", sim::resize_);
  m.impl("set_.source_Storage_storage_offset", sim::set_storage);
  m.impl("set_.source_Storage", sim::set_whole_storage);
  m.impl("set_.source_Tensor", sim::set_tensor);
  m.impl("set_", sim::set_nothing);
  m.impl("is_set_to", sim::is_set_to);
  m.impl("record_stream", sim::record_stream_);
  m.impl("_copy_from", sim::copy_from);
  m.impl("_copy_from_and_resize", sim::copy_from_and_resize);
  m.impl("_local_scalar_dense", sim::local_scalar);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&sim::convolution>());
  m.impl("convolution_backward_overrideable", sim::convolution_backward);
}

// A copy reads lazily conjugated or negated values itself: torch makes them real by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
