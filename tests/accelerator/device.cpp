// What torch asks of a device: guard, allocators, hooks, generators; and functions for sim.py.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <cstring>
#include <map>
#include <random>
#include <thread>

#include "device.h"
#include "runtime.h"

namespace sim {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

int index_of(Device device) { return device.has_index() ? device.index() : current_device(); }
Device device_of(int index) {
  return Device(DeviceType::PrivateUse1, static_cast<DeviceIndex>(index));
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::PrivateUse1; }
  Device exchangeDevice(Device d) const override {
    Device before = getDevice();
    set_device(d.index());
    return before;
  }
  Device getDevice() const override { return device_of(current_device()); }
  void setDevice(Device d) const override { set_device(d.index()); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0 && d.index() < device_count()) set_device(d.index());
  }
  Stream getStream(Device d) const override { return stream_of(current_stream(index_of(d))); }
  Stream getDefaultStream(Device d) const override { return stream_of(index_of(d) * kStreams); }
  Stream getStreamFromGlobalPool(Device d, bool) const override {
    return stream_of(next_stream(index_of(d)));
  }
  Stream getNewStream(Device d, int) const override { return stream_of(next_stream(index_of(d))); }
  Stream exchangeStream(Stream s) const override {
    Stream before = getStream(s.device());
    set_stream(number_of(s));
    return before;
  }
  void* getStreamNativeHandle(const Stream s) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(number_of(s)));
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }

  void record(void** event, const Stream& s, const DeviceIndex device, const c10::EventFlag)
      const override {
    TORCH_CHECK(
        device == -1 || device == s.device_index(), "sim: an event of sim:", int(device),
        " can't be recorded on a stream of sim:", int(s.device_index()));
    if (!*event) *event = new MarkPtr;
    *static_cast<MarkPtr*>(*event) = sim::record(number_of(s));
  }
  void block(void* event, const Stream& s) const override {
    if (event) sim::wait(number_of(s), *static_cast<MarkPtr*>(event));
  }
  bool queryEvent(void* event) const override {
    return !event || sim::query(*static_cast<MarkPtr*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) sim::synchronize(*static_cast<MarkPtr*>(event));
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<MarkPtr*>(event);
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(first && second, "sim: both events must be recorded first");
    auto& one = *static_cast<MarkPtr*>(first);
    auto& other = *static_cast<MarkPtr*>(second);
    TORCH_CHECK(sim::query(one) && sim::query(other), "sim: an event is not over yet");
    return (other->seconds - one->seconds) * 1e3;
  }
  bool queryStream(const Stream& s) const override { return query_stream(number_of(s)); }
  void synchronizeStream(const Stream& s) const override { synchronize_stream(number_of(s)); }
  void synchronizeDevice(const DeviceIndex index) const override {
    synchronize_device(index < 0 ? current_device() : index);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override {
    if (auto block = block_at(data.get())) record_stream(block, number_of(s));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t size) override {
    int device = current_device();
    if (!size) return {nullptr, nullptr, &c10::detail::deleteNothing, device_of(device)};
    auto* owner = new BlockPtr(sim::allocate(device, size));
    return {(*owner)->data, owner, &free, device_of(device)};
  }
  static void free(void* context) {
    auto* owner = static_cast<BlockPtr*>(context);
    release(*owner);
    delete owner;
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::vector<Use> uses;
    std::vector<BlockPtr> blocks{block_at(from), block_at(to)};
    auto a = reinterpret_cast<uintptr_t>(from), b = reinterpret_cast<uintptr_t>(to);
    uses = {{a, a + size, false}, {b, b + size, true}};
    submit(
        current_stream(blocks[1]->device), "clone of a storage", uses,
        [=] { std::memcpy(to, from, size); }, blocks);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, Stream s) override {
    if (auto block = block_at(data.get())) record_stream(block, number_of(s));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    auto now = memory(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* one : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes}) {
      auto& all = (*one)[0];
      all.current = now.allocated;
      all.peak = now.peak;
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { reset_peak(device); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    auto now = memory(device);
    return {now.limit - std::min(now.limit, now.allocated), now.limit};
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(DeviceType::PrivateUse1, &allocator)

std::mutex pinned_mutex;
std::map<uintptr_t, size_t>& pinned_ranges() {
  static auto* all = new std::map<uintptr_t, size_t>;
  return *all;
}

// Copies that are under way keep the storage, so memory is never given out too early.
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    if (!size) return {nullptr, nullptr, &c10::detail::deleteNothing, Device(DeviceType::CPU)};
    void* data = std::aligned_alloc(64, (size + 127) / 64 * 64);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned_ranges()[reinterpret_cast<uintptr_t>(data)] = size;
    return {data, data, &free, Device(DeviceType::CPU)};
  }
  static void free(void* data) {
    {
      std::lock_guard<std::mutex> lock(pinned_mutex);
      pinned_ranges().erase(reinterpret_cast<uintptr_t>(data));
    }
    std::free(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free; }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedAllocator pinned_allocator;
at::HostAllocatorRegistry<DeviceType::PrivateUse1> pinned_registered(&pinned_allocator);

}  // namespace

bool is_pinned(const void* data) {
  auto address = reinterpret_cast<uintptr_t>(data);
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto next = pinned_ranges().upper_bound(address);
  return next != pinned_ranges().begin() &&
      address < std::prev(next)->first + std::prev(next)->second;
}

GeneratorImpl::GeneratorImpl(DeviceIndex device)
    : c10::GeneratorImpl(device_of(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
uint64_t GeneratorImpl::draw() {
  std::lock_guard<std::mutex> lock(mutex_);
  std::mt19937_64 mixed(seed_ * 0x9e3779b97f4a7c15ull + offset_++);
  return mixed();
}
uint64_t GeneratorImpl::seed() {
  set_current_seed((static_cast<uint64_t>(std::random_device{}()) << 32) + std::random_device{}());
  return seed_;
}
void GeneratorImpl::set_state(const c10::TensorImpl& given) {
  TORCH_CHECK(given.numel() == 16 && given.itemsize() == 1 && given.is_cpu(), "sim: a state is 16 bytes on the CPU");
  auto* data = static_cast<const uint64_t*>(given.data());
  seed_ = data[0];
  offset_ = data[1];
}
c10::intrusive_ptr<c10::TensorImpl> GeneratorImpl::get_state() const {
  auto bytes = at::empty({16}, at::kByte);
  auto* data = static_cast<uint64_t*>(bytes.data_ptr());
  data[0] = seed_;
  data[1] = offset_;
  return bytes.getIntrusivePtr();
}
GeneratorImpl* GeneratorImpl::clone_impl() const {
  auto* copy = new GeneratorImpl(device().index());
  copy->seed_ = seed_;
  copy->offset_ = offset_;
  return copy;
}

const at::Generator& default_generator(int device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < kDevices; ++i)
      made->push_back(at::make_generator<GeneratorImpl>(static_cast<DeviceIndex>(i)));
    return made;
  }();
  return (*all)[device < 0 ? current_device() : device];
}

namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex device) const override { set_device(device); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    auto before = getCurrentDevice();
    set_device(device);
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  Device getDeviceFromPtr(void* data) const override {
    auto block = block_at(data);
    TORCH_CHECK(block, "sim: no device has memory at ", data);
    return device_of(block->device);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<GeneratorImpl>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    resize_storage(storage, size);
  }
};

const bool hooked = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace
}  // namespace sim

extern "C" {
int sim_device_count() { return sim::device_count(); }
int sim_physical(int device) { return sim::physical(device); }
double sim_busy(int device) { return sim::busy_seconds(device); }
int sim_current_device() { return sim::current_device(); }
void sim_memory(int device, size_t* four) {
  auto now = sim::memory(device);
  size_t all[] = {now.limit, now.allocated, now.peak, now.allocations};
  std::memcpy(four, all, sizeof all);
}
void sim_limit_memory(int device, size_t bytes) { sim::limit_memory(device, bytes); }
void sim_reset_peak(int device) { sim::reset_peak(device); }
void sim_random(int device, uint64_t* two, int set) {  // seed, and how much has been drawn
  auto* random = sim::default_generator(device).unsafeGetGeneratorImpl();
  std::lock_guard<std::mutex> lock(random->mutex_);
  if (set) {
    random->set_current_seed(two[0]);
    random->set_offset(two[1]);
  }
  two[0] = random->current_seed();
  two[1] = random->get_offset();
}
void sim_sleep(double seconds) {  // keeps the current stream busy
  sim::submit(
      sim::current_stream(sim::current_device()), "sleep", {},
      [=] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
}
}
