#include "runtime.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <sstream>
#include <thread>

namespace sim {
namespace {

constexpr size_t kWaiting = 1024;  // pieces of work that a stream holds, as on a GPU

struct Queue {  // what a stream has to do, and its thread
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> work;
  uint64_t given = 0, finished = 0;
  std::exception_ptr error;
  std::mt19937 random;
  bool started = false;
};

struct State {
  std::mutex mutex;
  Clock clocks[kDevices * kStreams];
  Clock seen = Clock(kDevices * kStreams);  // what a host thread knows to be over
  Queue queues[kDevices * kStreams];
  std::map<uintptr_t, BlockPtr> blocks;
  std::vector<BlockPtr> freed[kDevices * kStreams];
  size_t limit[kDevices], allocated[kDevices] = {}, peak[kDevices] = {}, allocations[kDevices] = {};
  int next[kDevices] = {};
  std::vector<std::string> faults;
  std::vector<std::shared_ptr<Span>> spans;
  std::atomic<bool> keeps_spans{false};
  uint64_t launches = 0;
  unsigned seed = 0;
  std::atomic<bool> forked{false};
  std::vector<int> visible;

  State() {
    const char* mask = std::getenv("SIM_VISIBLE_DEVICES");
    std::istringstream named(mask ? mask : "0,1,2,3");
    for (std::string one; std::getline(named, one, ',');) {  // the first that is none ends the list
      char* end = nullptr;
      long index = std::strtol(one.c_str(), &end, 10);
      if (end == one.c_str() || index < 0 || index >= kDevices) break;
      if (std::count(visible.begin(), visible.end(), index)) break;
      visible.push_back(static_cast<int>(index));
    }
    const char* bytes = std::getenv("SIM_MEMORY");
    const char* delays = std::getenv("SIM_DELAYS");
    seed = delays ? std::strtoul(delays, nullptr, 10) : 0;
    for (auto& one : limit) one = bytes ? std::strtoull(bytes, nullptr, 10) : size_t(1) << 30;
    for (auto& clock : clocks) clock = Clock(kDevices * kStreams);
    for (int i = 0; i < kDevices * kStreams; ++i) queues[i].random.seed(seed * 1000003u + i);
  }
};

State& state() {  // never destroyed: its threads are not joined
  static State* one = [] {
    auto* made = new State;
    pthread_atfork(nullptr, nullptr, [] { state().forked = true; });
    return made;
  }();
  return *one;
}

using Lock = std::unique_lock<std::mutex>;

void merge(Clock& into, const Clock& from) {
  for (size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], from[i]);
}

// Lets other Python threads run while this one waits.
struct Unlocked {
  PyThreadState* saved = nullptr;
  Unlocked() {
    if (Py_IsInitialized() && PyGILState_Check()) saved = PyEval_SaveThread();
  }
  ~Unlocked() {
    if (saved) PyEval_RestoreThread(saved);
  }
};

void dally(Queue& queue) {  // most work is short; some takes long, so that streams drift apart
  if (!state().seed) return;
  auto roll = queue.random() % 100;
  auto most = roll < 70 ? 20u : roll < 97 ? 300u : 4000u;
  std::this_thread::sleep_for(std::chrono::microseconds(queue.random() % most));
}

int64_t time_of_day() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

struct Busy {  // of one device: since when, and how long before
  std::mutex mutex;
  int streams = 0;
  std::chrono::steady_clock::time_point since;
  double before = 0;
};
Busy& busy_of(int device) {
  static auto* all = new Busy[kDevices];
  return all[device];
}
double so_far(const Busy& busy) {
  if (!busy.streams) return busy.before;
  return busy.before + std::chrono::duration<double>(std::chrono::steady_clock::now() - busy.since).count();
}

// The work with what is counted and kept of it.
std::function<void()> observed(std::function<void()> run, int device, std::shared_ptr<Span> span) {
  return [run = std::move(run), device, span]() mutable {
    Busy& busy = busy_of(device);
    {
      std::lock_guard<std::mutex> lock(busy.mutex);
      if (!busy.streams++) busy.since = std::chrono::steady_clock::now();
    }
    struct End {
      Busy& busy;
      Span* span;
      ~End() {
        if (span) span->end = time_of_day();
        std::lock_guard<std::mutex> lock(busy.mutex);
        busy.before = so_far(busy);
        busy.since = std::chrono::steady_clock::now();
        --busy.streams;
      }
    } end{busy, span.get()};
    if (span) span->begin = time_of_day();
    run();
  };
}

void serve(Queue& queue) {
  while (true) {
    std::function<void()> run;
    {
      Lock lock(queue.mutex);
      queue.changed.wait(lock, [&] { return !queue.work.empty(); });
      run = std::move(queue.work.front());
      queue.work.pop_front();
    }
    std::exception_ptr error;
    try {
      dally(queue);
      run();
    } catch (...) {
      error = std::current_exception();
    }
    run = nullptr;
    Lock lock(queue.mutex);
    if (error && !queue.error) queue.error = error;
    ++queue.finished;
    queue.changed.notify_all();
  }
}

void push(int stream, std::function<void()> run) {
  Queue& queue = state().queues[stream];
  Lock lock(queue.mutex);
  if (!queue.started) {
    queue.started = true;
    std::thread(serve, std::ref(queue)).detach();
  }
  queue.work.push_back(std::move(run));
  ++queue.given;
  queue.changed.notify_all();
}

// A device takes so much; who gives more waits.
void await_room(int stream) {
  Queue& queue = state().queues[stream];
  {
    Lock lock(queue.mutex);
    if (queue.work.size() < kWaiting) return;
  }
  Unlocked others;
  Lock lock(queue.mutex);
  queue.changed.wait(lock, [&] { return queue.work.size() < kWaiting; });
}

void check_fork() {
  TORCH_CHECK(!state().forked, "sim: the device was used before the process was forked; use spawn");
}

bool ordered(const Access& access, const Clock& clock) {
  return clock[access.stream] >= access.at;
}

// The next two under the mutex.

// What still uses memory that was freed, other than the stream that gives it out again, which the
// allocator waits for, or knows to have waited.
const Access* user_of(const Block& block) {
  const auto& s = state();
  for (const auto& access : block.accesses)
    if (access.stream != block.stream && !ordered(access, block.kept) && !ordered(access, s.seen) &&
        !ordered(access, s.clocks[block.stream]))
      return &access;
  return nullptr;
}
std::string used_after_free(const Block& block, const Access& user) {
  return "sim: use after free: memory allocated on " + name_of(block.stream) + " was freed " +
      "while " + user.op + " on " + name_of(user.stream) +
      " still uses it, and would be given out again; no record_stream said so";
}

std::string race(const BlockPtr& block, const Use& use, int stream, const std::string& op) {
  for (const auto& before : block->accesses) {
    if (before.use.high <= use.low || use.high <= before.use.low) continue;
    if (!before.use.write && !use.write) continue;
    if (before.stream == stream || ordered(before, state().clocks[stream])) continue;
    return "sim: race: " + op + " on " + name_of(stream) + (use.write ? " writes" : " reads") +
        " what " + before.op + " on " + name_of(before.stream) +
        (before.use.write ? " writes" : " reads") +
        ", and nothing has made the one stream wait for the other";
  }
  return "";
}

void note(const BlockPtr& block, const Use& use, int stream, const std::string& op) {
  auto& all = block->accesses;
  const Clock& clock = state().clocks[stream];
  all.erase(
      std::remove_if(
          all.begin(), all.end(),
          [&](const Access& before) {
            if (ordered(before, state().seen)) return true;
            bool covered = use.low <= before.use.low && before.use.high <= use.high;
            bool stronger = use.write || !before.use.write;
            return covered && stronger && ordered(before, clock);
          }),
      all.end());
  all.push_back({use, stream, clock[stream], op});
}

}  // namespace

Block::~Block() { std::free(data); }

int number_of(const c10::Stream& stream) {
  return stream.device_index() * kStreams + static_cast<int>(stream.id());
}
c10::Stream stream_of(int number) {
  return c10::Stream(
      c10::Stream::UNSAFE,
      c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(number / kStreams)),
      number % kStreams);
}
std::string name_of(int number) {
  return "sim:" + std::to_string(number / kStreams) + " stream " + std::to_string(number % kStreams);
}

namespace {
thread_local int device_now = 0;
thread_local int streams_now[kDevices] = {};
}  // namespace

int device_count() { return static_cast<int>(state().visible.size()); }
int physical(int device) { return state().visible.at(device); }
int current_device() { return device_now; }
void set_device(int device) {
  TORCH_CHECK(
      0 <= device && device < device_count(), "sim: there is no device ", device, ", of ",
      device_count());
  device_now = device;
}
int current_stream(int device) { return device * kStreams + streams_now[device]; }
void set_stream(int number) { streams_now[number / kStreams] = number % kStreams; }
int next_stream(int device) {
  Lock lock(state().mutex);
  return device * kStreams + 1 + state().next[device]++ % (kStreams - 1);
}

void fault(const std::string& text) {
  Lock lock(state().mutex);
  state().faults.push_back(text);
}
void fail(const std::string& text) {
  fault(text);
  TORCH_CHECK(false, text);
}

BlockPtr allocate(int device, size_t size) {
  check_fork();
  auto& s = state();
  int stream = current_stream(device);
  std::vector<BlockPtr> gone;
  std::string reused;
  auto block = std::make_shared<Block>();
  {
    Lock lock(s.mutex);
    // An allocator gives out what was freed on this stream, to be written after what this stream
    // has been given; it waits for streams that were recorded, and knows of no others.
    gone.swap(s.freed[stream]);
    for (const auto& old : gone)
      if (const auto* user = user_of(*old); user && reused.empty()) reused = used_after_free(*old, *user);
    size_t free = s.limit[device] - std::min(s.limit[device], s.allocated[device]);
    if (reused.empty() && size > free)
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "sim out of memory. Tried to allocate ", size, " bytes on sim:",
          device, ", where ", free, " of ", s.limit[device], " bytes are free");
    if (reused.empty()) {
      s.allocated[device] += size;
      s.peak[device] = std::max(s.peak[device], s.allocated[device]);
      ++s.allocations[device];
    } else {
      s.faults.push_back(reused);
    }
  }
  TORCH_CHECK(reused.empty(), reused);
  block->data = static_cast<char*>(std::aligned_alloc(64, (size + 127) / 64 * 64));
  block->size = size;
  block->device = device;
  block->stream = stream;
  std::memset(block->data, 0x7d, size);  // what nobody has written is not zero
  Lock lock(s.mutex);
  s.blocks[reinterpret_cast<uintptr_t>(block->data)] = block;
  return block;
}

void release(const BlockPtr& block) {
  auto& s = state();
  if (s.forked) return;
  BlockPtr kept;  // dies after the lock
  Lock lock(s.mutex);
  auto found = s.blocks.find(reinterpret_cast<uintptr_t>(block->data));
  if (found == s.blocks.end()) return;
  kept = std::move(found->second);
  s.blocks.erase(found);
  s.allocated[block->device] -= block->size;
  block->kept = Clock(kDevices * kStreams);
  for (int recorded : block->recorded) merge(block->kept, s.clocks[recorded]);
  if (user_of(*block)) s.freed[block->stream].push_back(block);  // what is ordered stays so
}

BlockPtr block_at(const void* data) {
  if (!data) return nullptr;
  auto address = reinterpret_cast<uintptr_t>(data);
  Lock lock(state().mutex);
  auto next = state().blocks.upper_bound(address);
  if (next == state().blocks.begin()) return nullptr;
  const BlockPtr& block = std::prev(next)->second;
  return address < std::prev(next)->first + std::max<size_t>(block->size, 1) ? block : nullptr;
}

void record_stream(const BlockPtr& block, int stream) {
  Lock lock(state().mutex);
  block->recorded.insert(stream);
}

void submit(
    int stream,
    const std::string& op,
    const std::vector<Use>& uses,
    std::function<void()> run,
    const std::vector<BlockPtr>& blocks) {
  check_fork();
  await_room(stream);
  std::string found;
  int64_t given = state().keeps_spans ? time_of_day() : 0;
  {
    auto& s = state();
    Lock lock(s.mutex);
    Clock& clock = s.clocks[stream];
    merge(clock, s.seen);
    for (size_t i = 0; i < uses.size() && found.empty(); ++i)
      found = race(blocks[i], uses[i], stream, op);
    if (found.empty()) {
      ++clock[stream];
      for (size_t i = 0; i < uses.size(); ++i) note(blocks[i], uses[i], stream, op);
      std::shared_ptr<Span> span;
      if (given) {
        int thread = static_cast<int>(syscall(SYS_gettid));
        span = std::make_shared<Span>(Span{op, stream, ++s.launches, thread, given, time_of_day()});
        s.spans.push_back(span);
      }
      push(stream, observed(std::move(run), stream / kStreams, span));
      return;
    }
    s.faults.push_back(found);
  }
  TORCH_CHECK(false, found);
}

MarkPtr record(int stream) {
  check_fork();
  auto mark = std::make_shared<Mark>();
  mark->stream = stream;
  Lock lock(state().mutex);
  Clock& clock = state().clocks[stream];
  merge(clock, state().seen);
  ++clock[stream];
  mark->clock = clock;
  push(stream, [mark] {
    Lock lock(mark->mutex);
    mark->seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    mark->done = true;
    mark->changed.notify_all();
  });
  return mark;
}

void wait(int stream, const MarkPtr& mark) {
  check_fork();
  Lock lock(state().mutex);
  merge(state().clocks[stream], mark->clock);
  if (mark->stream == stream) return;
  push(stream, [mark] {
    Lock lock(mark->mutex);
    mark->changed.wait(lock, [&] { return mark->done; });
  });
}

namespace {
void over(const Clock& clock) {
  std::vector<BlockPtr> gone;
  auto& s = state();
  Lock lock(s.mutex);
  // The last moment to see memory that might have been given out again, as from now on it may be.
  // Any thread may allocate at any time on a default stream; on others whoever made them, who may
  // have them wait first, as FSDP does.
  for (int stream = 0; stream < kDevices * kStreams; stream += kStreams) {
    for (const auto& block : s.freed[stream])
      if (const auto* user = user_of(*block)) s.faults.push_back(used_after_free(*block, *user));
    gone.insert(gone.end(), s.freed[stream].begin(), s.freed[stream].end());
    s.freed[stream].clear();
  }
  merge(s.seen, clock);
}
}  // namespace

bool query(const MarkPtr& mark) {
  {
    Lock lock(mark->mutex);
    if (!mark->done) return false;
  }
  over(mark->clock);
  return true;
}

void synchronize(const MarkPtr& mark) {
  {
    Unlocked others;
    Lock lock(mark->mutex);
    mark->changed.wait(lock, [&] { return mark->done; });
  }
  over(mark->clock);
}

namespace {
Clock clock_of(int stream, uint64_t& given) {
  Lock lock(state().mutex);
  Lock inner(state().queues[stream].mutex);
  given = state().queues[stream].given;
  return state().clocks[stream];
}
}  // namespace

bool query_stream(int stream) {
  uint64_t given;
  Clock clock = clock_of(stream, given);
  {
    Queue& queue = state().queues[stream];
    Lock lock(queue.mutex);
    if (queue.finished < given) return false;
  }
  over(clock);
  return true;
}

void synchronize_stream(int stream) {
  check_fork();
  uint64_t given;
  Clock clock = clock_of(stream, given);
  std::exception_ptr error;
  {
    Unlocked others;
    Queue& queue = state().queues[stream];
    Lock lock(queue.mutex);
    queue.changed.wait(lock, [&] { return queue.finished >= given; });
    std::swap(error, queue.error);
  }
  over(clock);
  if (error) std::rethrow_exception(error);
}

void synchronize_device(int device) {
  for (int i = 0; i < kStreams; ++i) synchronize_stream(device * kStreams + i);
}

void keep_spans(bool on) {
  Lock lock(state().mutex);
  state().keeps_spans = on;
  if (on) state().spans.clear();
}
std::vector<Span> spans() {
  std::vector<Span> found;
  Lock lock(state().mutex);
  for (const auto& span : state().spans)
    if (span->end) found.push_back(*span);
  return found;
}
double busy_seconds(int device) {
  Busy& busy = busy_of(device);
  std::lock_guard<std::mutex> lock(busy.mutex);
  return so_far(busy);
}

Memory memory(int device) {
  auto& s = state();
  Lock lock(s.mutex);
  return {s.limit[device], s.allocated[device], s.peak[device], s.allocations[device]};
}
void limit_memory(int device, size_t bytes) {
  Lock lock(state().mutex);
  state().limit[device] = bytes;
}
void reset_peak(int device) {
  Lock lock(state().mutex);
  state().peak[device] = state().allocated[device];
}

}  // namespace sim

extern "C" {

// The faults since the last call, a line each; how many bytes were written of how many there are.
size_t sim_faults(char* text, size_t size, int forget) {
  std::string all;
  sim::Lock lock(sim::state().mutex);
  for (const auto& one : sim::state().faults) all += one + "\n";
  if (all.size() <= size) {
    std::memcpy(text, all.data(), all.size());
    if (forget) sim::state().faults.clear();
  }
  return all.size();
}

void sim_delays(unsigned seed) {
  auto& s = sim::state();
  s.seed = seed;
  for (int i = 0; i < sim::kDevices * sim::kStreams; ++i) {
    sim::Lock lock(s.queues[i].mutex);
    s.queues[i].random.seed(seed * 1000003u + i);
  }
}
}
