// The simulated accelerator: devices, memory, streams, events, and who may touch what when.
//
// Work is given to a stream and done later by the stream's thread. Whether two accesses to the same
// memory are ordered is not left to luck: each stream has a vector clock, which events, waits and
// synchronisations carry on, and every access is compared with those before it when it is *given*.
// One mutex guards all clocks, accesses and blocks. Nothing runs, and no tensor dies, under it.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace sim {

constexpr int kDevices = 4;
constexpr int kStreams = 33;  // of a device: the default one and a pool that is given out in turn

using Clock = std::vector<uint64_t>;  // how much of each stream has happened before

// The memory that an operation reads or writes: a stretch of bytes of one block.
struct Use {
  uintptr_t low, high;
  bool write;
};

struct Access {
  Use use;
  int stream;
  uint64_t at;  // the stream's own time
  std::string op;
};

// Device memory. `DataPtr`s own it as long as tensors need it, work that is given keeps the bytes.
struct Block {
  char* data = nullptr;
  size_t size = 0;
  int device = 0;
  int stream = 0;  // on which it was allocated
  std::set<int> recorded;
  Clock kept;  // what is waited for before it is given out again: the recorded streams, as it was freed
  std::vector<Access> accesses;
  ~Block();
};
using BlockPtr = std::shared_ptr<Block>;

// One recording of an event.
struct Mark {
  Clock clock;
  int stream = 0;
  double seconds = 0;
  bool done = false;
  std::mutex mutex;
  std::condition_variable changed;
};
using MarkPtr = std::shared_ptr<Mark>;

// Streams are numbered through all devices: device * kStreams + index.
int number_of(const c10::Stream& stream);
c10::Stream stream_of(int number);
std::string name_of(int number);

// How many of the devices this process sees, and which: SIM_VISIBLE_DEVICES, as "2,0". Everything
// else goes by the place in that list.
int device_count();
int physical(int device);

int current_device();
void set_device(int device);  // checks that there is such a device
int current_stream(int device);
void set_stream(int number);
int next_stream(int device);

BlockPtr allocate(int device, size_t size);
void release(const BlockPtr& block);
BlockPtr block_at(const void* data);
void record_stream(const BlockPtr& block, int stream);

// Give `run` to a stream. Throws, and notes a fault, if a use is not ordered after those before.
void submit(
    int stream,
    const std::string& op,
    const std::vector<Use>& uses,
    std::function<void()> run,
    const std::vector<BlockPtr>& blocks = {});
MarkPtr record(int stream);
void wait(int stream, const MarkPtr& mark);
bool query(const MarkPtr& mark);
void synchronize(const MarkPtr& mark);
bool query_stream(int stream);
void synchronize_stream(int stream);  // throws what work on the stream has thrown
void synchronize_device(int device);

// What ran when, for the profiler: of work that is given while it is asked for.
struct Span {
  std::string op;
  int stream;
  uint64_t number;  // of the launch
  int thread;  // the operating system's, that gave it
  int64_t given, taken;  // ns of the day: the call by which it was given
  int64_t begin = 0, end = 0;  // and the work itself
};
void keep_spans(bool on);  // forgets those before
std::vector<Span> spans();  // of what is done
double busy_seconds(int device);  // so far, in which at least one stream had something to do

void fault(const std::string& text);  // note it
[[noreturn]] void fail(const std::string& text);  // note it and throw

struct Memory {
  size_t limit, allocated, peak, allocations;
};
Memory memory(int device);
void limit_memory(int device, size_t bytes);
void reset_peak(int device);

}  // namespace sim
