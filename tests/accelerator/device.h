#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/Storage.h>

#include "runtime.h"

namespace sim {

bool on_sim(const at::Tensor& t);

// The same memory as a tensor on the CPU, which keeps the bytes but not the allocation.
at::Tensor as_cpu(const at::Tensor& t);

// What memory of devices an operation reads and writes.
struct Touched {
  std::vector<Use> uses;
  std::vector<BlockPtr> blocks;
  void add(const at::Tensor& t, bool write);
};

// Random numbers are a function of (seed, number of the draw), fixed when work is given.
struct GeneratorImpl final : c10::GeneratorImpl {
  explicit GeneratorImpl(c10::DeviceIndex device);
  uint64_t draw();  // a seed for one operation
  void set_current_seed(uint64_t seed) override { seed_ = seed, offset_ = 0; }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_state(const c10::TensorImpl& given) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

 private:
  GeneratorImpl* clone_impl() const override;
  uint64_t seed_ = 67280421310721ull, offset_ = 0;
};

const at::Generator& default_generator(int device);
bool is_pinned(const void* data);
void resize_storage(const c10::Storage& storage, size_t size);

}  // namespace sim
