// The collective library of the simulated accelerator: a backend of c10d that behaves as NCCL's does.
//
// An operation is given to a stream and done when the stream comes to it: a *kernel*, which holds
// its stream up until the other members' kernels have come too. `wait` has the caller's stream wait,
// not the host. There is a communicator for the device, and one for each pair that sends outside of
// a group, with a stream each; a communicator's kernels run one after the other. Members exchange
// pieces through a file that all map, whether they are threads or processes. Nothing else is common
// to them: an abort ends this member's kernels alone, and nobody's clock is carried to another.
#include <ATen/Functions.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/DeviceGuard.h>
#include <fcntl.h>
#include <pybind11/chrono.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <map>
#include <thread>

#include "device.h"
#include "runtime.h"

namespace sim {
namespace {

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using Milliseconds = std::chrono::milliseconds;
using Instant = std::chrono::steady_clock::time_point;
using Lock = std::unique_lock<std::mutex>;

constexpr size_t kPiece = 1 << 16;
constexpr const char* kName = "simccl";

Instant now() { return std::chrono::steady_clock::now(); }

#define DEMAND(condition, ...) \
  TORCH_CHECK_WITH(DistBackendError, condition, "simccl: ", __VA_ARGS__)

// -- what members share ---------------------------------------------------------------------------

// A piece on its way from one member to another.
struct Cell {
  std::atomic<uint32_t> full;
  char what[44];  // of which operation
  uint64_t whole, size;
  char bytes[kPiece];
};

struct Shared {
  std::atomic<uint32_t> joined, left;
  std::atomic<int32_t> device[64];  // of each member, plus one
};

// One member's part in the communicator of some.
struct Comm {
  Comm(
      c10d::Store& store, const std::string& key, int place, int members, int device,
      Milliseconds patience, const std::function<bool()>& aborted)
      : place(place), members(members), device(device), stream(next_stream(device)) {
    DEMAND(members <= 64, "there are places for 64 members");
    size = sizeof(Shared) + sizeof(Cell) * members * members;
    std::string path;
    if (place == 0) {
      path = make();
      store.set(key, std::vector<uint8_t>(path.begin(), path.end()));
    } else {
      auto found = store.get(key);
      path.assign(found.begin(), found.end());
    }
    int file = open(path.c_str(), O_RDWR);
    DEMAND(file >= 0, "there is no ", path);
    void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    DEMAND(mapped != MAP_FAILED, "can't map ", path);
    shared = static_cast<Shared*>(mapped);
    cells = reinterpret_cast<Cell*>(shared + 1);
    shared->device[place] = physical(device) + 1;
    if (++shared->joined == uint32_t(members)) unlink(path.c_str());
    for (Instant end = now() + patience; shared->joined < uint32_t(members);) {
      if (now() > end || aborted()) {
        unlink(path.c_str());
        munmap(shared, size);
        DEMAND(false, "not all members came to connect", aborted() ? "; it was aborted" : " in time");
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    for (int one = 0; one < members; ++one)
      for (int other = 0; other < one; ++other)
        if (shared->device[one] == shared->device[other]) {
          int both = shared->device[one] - 1;
          munmap(shared, size);
          DEMAND(false, "duplicate device: rank ", other, " and rank ", one, " are both on sim:", both);
        }
  }
  ~Comm() { munmap(shared, size); }

  std::string make() const {
    struct stat found;
    std::string folder = stat("/dev/shm", &found) == 0 ? "/dev/shm" : "/tmp";
    std::string path = folder + "/simccl-XXXXXX";
    int file = mkstemp(path.data());
    DEMAND(file >= 0 && ftruncate(file, size) == 0, "can't make ", path);  // it is of zeros
    close(file);
    return path;
  }

  Cell& cell(int from, int to) const { return cells[from * members + to]; }

  void fail(const std::string& text) {  // the first reason stays
    Lock lock(mutex);
    if (why.empty()) why = text;
    ended = true;
  }
  std::string reason() {
    Lock lock(mutex);
    return why;
  }

  const int place, members, device, stream;
  size_t size;
  Shared* shared;
  Cell* cells;
  std::atomic<bool> ended{false};
  std::atomic<uint64_t> given{0}, turn{0};
  std::mutex mutex;
  std::string why;
};
using CommPtr = std::shared_ptr<Comm>;

// -- kernels --------------------------------------------------------------------------------------

struct Transfer {
  int peer;
  bool out;
  char* data;
  size_t whole;
  std::string what;
  size_t at = 0;
  bool begun = false;
  bool over() const { return begun && at == whole; }
};

struct Kernel {
  std::string name;
  Tensors host;  // keep the bytes that it reads and writes
  Tensors outs;
  std::vector<Transfer> transfers;
  std::vector<std::function<void()>> finish;
  MarkPtr end;
  Instant deadline;
  Milliseconds patience;
  std::atomic<bool> failed{false}, done{false};

  bool step(const Comm& comm, Transfer& one) {
    Cell& cell = one.out ? comm.cell(comm.place, one.peer) : comm.cell(one.peer, comm.place);
    if (bool(cell.full.load(std::memory_order_acquire)) == one.out) return false;
    if (one.out) {
      std::snprintf(cell.what, sizeof cell.what, "%s", one.what.c_str());
      cell.whole = one.whole;
      cell.size = std::min(kPiece, one.whole - one.at);
      std::memcpy(cell.bytes, one.data + one.at, cell.size);
    } else {
      TORCH_CHECK(
          cell.whole == one.whole && one.what == cell.what, name, " on rank ", comm.place, " waits for ",
          one.whole, " bytes of ", one.what, " from rank ", one.peer, ", which gives ", cell.whole,
          " bytes of ", cell.what, ": on a GPU this hangs, or gives wrong numbers");
      std::memcpy(one.data + one.at, cell.bytes, cell.size);
    }
    one.at += cell.size;
    one.begun = true;
    cell.full.store(one.out, std::memory_order_release);
    return true;
  }

  // Whether all is done; false where the communicator was ended before.
  bool move(Comm& comm) {
    unsigned idle = 10;  // microseconds
    while (!comm.ended) {
      bool moved = false, left = false;
      std::set<std::pair<int, bool>> busy;  // what goes one way comes in order
      for (auto& one : transfers) {
        if (one.over() || busy.count({one.peer, one.out})) continue;
        moved |= step(comm, one);
        if (one.over()) continue;
        left = true;
        busy.insert({one.peer, one.out});
      }
      if (!left) return true;
      idle = moved ? 10 : std::min(idle * 2, 500u);
      if (!moved) std::this_thread::sleep_for(std::chrono::microseconds(idle));
    }
    return false;
  }

  void run(Comm& comm, uint64_t place) {
    at::AutoDispatchBelowADInplaceOrView below;
    while (comm.turn != place && !comm.ended) std::this_thread::sleep_for(std::chrono::microseconds(20));
    try {
      if (comm.turn == place && move(comm)) {
        for (auto& one : finish) one();
        done = true;
        ++comm.turn;
      }
    } catch (const std::exception& error) {
      fault(std::string("simccl: ") + error.what());
      comm.fail(error.what());
    }
    if (!done) {  // what it leaves behind is never by luck what was waited for
      for (auto& out : outs)
        if (out.is_contiguous()) std::memset(out.mutable_data_ptr(), 0x7d, out.nbytes());
      failed = true;
    }
    host.clear(), outs.clear(), finish.clear(), transfers.clear();
  }
};
using KernelPtr = std::shared_ptr<Kernel>;

struct Work final : c10d::Work {
  Work(int rank, OpType type) : c10d::Work(rank, type) {}
  ~Work() override { let_go(true); }

  bool isCompleted() override { return kernel->failed || query(kernel->end); }
  bool isSuccess() const override { return !kernel->failed; }
  std::exception_ptr exception() const override {
    if (!kernel->failed) return nullptr;
    return std::make_exception_ptr(c10::DistBackendError({__func__, __FILE__, __LINE__}, text()));
  }
  void synchronize() override {
    sim::wait(current_stream(comm->device), kernel->end);
    let_go(false);
  }
  bool wait(Milliseconds) override {
    DEMAND(!kernel->failed, text());
    synchronize();
    if (opType_ == OpType::BARRIER) {
      synchronize_stream(current_stream(comm->device));
      DEMAND(!kernel->failed, text());
    }
    return true;
  }
  Tensors result() override { return outs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  std::string text() const { return kernel->name + " was ended: " + comm->reason(); }
  // Tensors are kept until somebody has waited; what nobody waits for the allocator is told of.
  void let_go(bool untold) {
    if (untold)
      for (auto& tensor : stash)
        if (auto block = block_at(tensor.storage().data())) record_stream(block, stream);
    stash.clear();
  }

  CommPtr comm;
  KernelPtr kernel;
  int stream = 0;
  Tensors stash, outs;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// -- the watchdog ---------------------------------------------------------------------------------

// Ends the communicator of a kernel that takes longer than it may, and the process unless
// TORCH_NCCL_ASYNC_ERROR_HANDLING says otherwise: 2 spares it, 0 has no watchdog.
class Watchdog {
 public:
  Watchdog() {
    const char* text = std::getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING");
    mode_ = text ? std::atoi(text) : 3;
  }
  ~Watchdog() {
    {
      Lock lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  void watch(const CommPtr& comm, const KernelPtr& kernel) {
    if (!mode_) return;
    Lock lock(mutex_);
    watched_.push_back({comm, kernel});
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }

 private:
  void run() {
    Lock lock(mutex_);
    while (!stop_) {
      for (auto one = watched_.begin(); one != watched_.end();) {
        auto& [comm, kernel] = *one;
        bool over = kernel->done || kernel->failed;
        if (!over && now() > kernel->deadline) {
          auto text = "the watchdog: " + kernel->name + " on rank " + std::to_string(comm->place) +
              " took longer than " + std::to_string(kernel->patience.count()) + " ms";
          comm->fail(text);
          if (mode_ != 2) {
            std::fprintf(stderr, "simccl: %s; the process is ended\n", text.c_str());
            std::abort();
          }
          over = true;
        }
        one = over ? watched_.erase(one) : std::next(one);
      }
      changed_.wait_for(lock, Milliseconds(20));
    }
  }

  int mode_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::pair<CommPtr, KernelPtr>> watched_;
  bool stop_ = false;
  std::thread thread_;
};

// -- operations -----------------------------------------------------------------------------------

void combine(Tensor& into, const Tensor& other, c10d::ReduceOp::RedOpType op) {
  switch (op) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::AVG: into.add_(other); break;
    case c10d::ReduceOp::PRODUCT: into.mul_(other); break;
    case c10d::ReduceOp::MIN: at::minimum_out(into, into, other); break;
    default: at::maximum_out(into, into, other);
  }
}

void check(const Tensor& tensor, int device) {
  DEMAND(on_sim(tensor) && !tensor.is_sparse(), "tensors must be dense, on sim; got one on ", tensor.device());
  DEMAND(tensor.is_contiguous(), "tensors must be contiguous");
  DEMAND(
      device < 0 || tensor.device().index() == device, "tensors of one call must be on one device; got one on ",
      tensor.device(), " beside those on sim:", device);
  auto type = tensor.scalar_type();
  for (auto none : {at::kShort, at::kUInt16, at::kUInt32, at::kUInt64})
    DEMAND(type != none, "input tensor data type is not supported: ", type);
}

// What one operation gives to others and takes from them, before it is given to a stream.
struct Plan {
  OpType type;
  std::string name;
  int device = -1;
  Touched touched;
  Tensors all, outs;
  std::shared_ptr<Kernel> kernel = std::make_shared<Kernel>();

  Tensor part(const Tensor& tensor, bool write) {
    check(tensor, device);
    device = tensor.device().index();
    touched.add(tensor, write);
    all.push_back(tensor);
    auto view = as_cpu(tensor);
    kernel->host.push_back(view);
    if (write) {
      outs.push_back(tensor);
      kernel->outs.push_back(view);
    }
    return view;
  }
  void move(int peer, bool out, const Tensor& bytes, const std::string& what) {
    kernel->transfers.push_back({peer, out, static_cast<char*>(bytes.data_ptr()), bytes.nbytes(), what});
  }
  void give(int peer, const Tensor& tensor, const std::string& what) {
    move(peer, true, part(tensor, false), what);
  }
  void take(int peer, const Tensor& tensor, const std::string& what) {
    move(peer, false, part(tensor, true), what);
  }
  // Of what all members give, once all of it is here.
  void reduce(int members, const Tensor& out, c10d::ReduceOp op, const std::string& what) {
    auto to = part(out, true);
    Tensors rooms;
    for (int peer = 0; peer < members; ++peer) {
      rooms.push_back(at::empty(out.sizes(), out.options().device(at::kCPU)));
      kernel->host.push_back(rooms.back());
      move(peer, false, rooms.back(), what);
    }
    auto kind = op.op_;
    kernel->finish.push_back([=]() mutable {
      for (int peer = 1; peer < members; ++peer) combine(rooms[0], rooms[peer], kind);
      if (kind == c10d::ReduceOp::AVG) rooms[0].div_(members);
      to.copy_(rooms[0]);
    });
  }
};

std::string reduction(const char* name, const Tensor& tensor, const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return std::string(name) + " sum " + toString(tensor.scalar_type());
    case c10d::ReduceOp::AVG: return std::string(name) + " avg " + toString(tensor.scalar_type());
    case c10d::ReduceOp::PRODUCT: return std::string(name) + " prod " + toString(tensor.scalar_type());
    case c10d::ReduceOp::MIN: return std::string(name) + " min " + toString(tensor.scalar_type());
    case c10d::ReduceOp::MAX: return std::string(name) + " max " + toString(tensor.scalar_type());
    default: DEMAND(false, "there is no such reduction here");
  }
}

class Library final : public c10d::Backend {
 public:
  Library(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout)
      : Backend(rank, size), store_(store), timeout_(timeout) {
    init();
  }
  ~Library() override { end("its process group is gone"); }

  const std::string getBackendName() const override { return kName; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(Milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void abort() override { end("it was aborted"); }
  void shutdown() override {
    Lock lock(mutex_);
    for (auto& [key, comm] : comms_) {
      lock.unlock();
      synchronize_stream(comm->stream);
      lock.lock();
    }
    comms_.clear();
  }

  // -- groups of calls
  void startCoalescing() override {
    DEMAND(!group_, "a group has begun already");
    group_ = std::make_unique<Plan>();
    group_->type = OpType::COALESCED;
    group_->name = "group";
  }
  WorkPtr endCoalescing() override {
    DEMAND(group_, "no group has begun");
    auto plan = std::move(*group_);
    group_ = nullptr;
    return launch(plan, c10d::kUnsetTimeout, true);
  }

  // -- collectives
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return all_reduce(OpType::ALLREDUCE, tensors, opts);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return all_reduce(OpType::ALLREDUCE_COALESCED, tensors, opts);
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return run(OpType::REDUCE, "reduce", opts, [&](Plan& plan) {
      auto& tensor = only(tensors);
      auto what = reduction("reduce", tensor, opts.reduceOp);
      plan.give(opts.rootRank, tensor, what);
      if (opts.rootRank == rank_) plan.reduce(size_, tensor, opts.reduceOp, what);
    });
  }
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return run(OpType::BROADCAST, "broadcast", opts, [&](Plan& plan) {
      auto& tensor = only(tensors);
      if (opts.rootRank != rank_) return plan.take(opts.rootRank, tensor, "broadcast");
      for (int peer = 0; peer < size_; ++peer)
        if (peer != rank_) plan.give(peer, tensor, "broadcast");
    });
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& opts) override {
    return run(OpType::_ALLGATHER_BASE, "all_gather", opts, [&](Plan& plan) {
      all_gather(plan, cut(out, in), in);
    });
  }
  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outs, Tensors& ins, const c10d::AllgatherOptions& opts) override {
    return run(OpType::COALESCED, "all_gather", opts, [&](Plan& plan) {
      for (size_t i = 0; i < ins.size(); ++i) all_gather(plan, cut(outs[i], ins[i]), ins[i]);
    });
  }
  WorkPtr allgather(
      std::vector<Tensors>& outs, Tensors& ins, const c10d::AllgatherOptions& opts) override {
    return run(OpType::ALLGATHER, "all_gather", opts, [&](Plan& plan) {
      all_gather(plan, outs.at(0), only(ins));
    });
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& opts) override {
    return run(OpType::_REDUCE_SCATTER_BASE, "reduce_scatter", opts, [&](Plan& plan) {
      reduce_scatter(plan, out, cut(in, out), opts.reduceOp);
    });
  }
  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outs, Tensors& ins, const c10d::ReduceScatterOptions& opts) override {
    return run(OpType::COALESCED, "reduce_scatter", opts, [&](Plan& plan) {
      for (size_t i = 0; i < outs.size(); ++i)
        reduce_scatter(plan, outs[i], cut(ins[i], outs[i]), opts.reduceOp);
    });
  }
  WorkPtr reduce_scatter(
      Tensors& outs, std::vector<Tensors>& ins, const c10d::ReduceScatterOptions& opts) override {
    return run(OpType::REDUCE_SCATTER, "reduce_scatter", opts, [&](Plan& plan) {
      reduce_scatter(plan, only(outs), ins.at(0), opts.reduceOp);
    });
  }
  WorkPtr alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& takes, std::vector<int64_t>& gives,
      const c10d::AllToAllOptions& opts) override {
    return run(OpType::ALLTOALL_BASE, "all_to_all", opts, [&](Plan& plan) {
      exchange(plan, split(out, takes), split(in, gives));
    });
  }
  WorkPtr alltoall(Tensors& outs, Tensors& ins, const c10d::AllToAllOptions& opts) override {
    return run(OpType::ALLTOALL, "all_to_all", opts, [&](Plan& plan) { exchange(plan, outs, ins); });
  }
  WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins, const c10d::GatherOptions& opts) override {
    return run(OpType::GATHER, "gather", opts, [&](Plan& plan) {
      plan.give(opts.rootRank, only(ins), "gather");
      for (int peer = 0; opts.rootRank == rank_ && peer < size_; ++peer)
        plan.take(peer, outs.at(0).at(peer), "gather");
    });
  }
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins, const c10d::ScatterOptions& opts) override {
    return run(OpType::SCATTER, "scatter", opts, [&](Plan& plan) {
      if (opts.rootRank == rank_) {
        for (int peer = 0; peer < size_; ++peer) plan.give(peer, ins.at(0).at(peer), "scatter");
      }
      plan.take(opts.rootRank, only(outs), "scatter");
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    return run(OpType::BARRIER, "barrier", opts, [&](Plan& plan) {
      plan.device = opts.device ? opts.device->index() : current_device();
      auto nothing = at::empty({0});
      plan.kernel->host.push_back(nothing);
      for (int peer = 0; peer < size_; ++peer)
        for (bool out : {true, false}) plan.move(peer, out, nothing, "barrier");
    });
  }

  // -- messages; outside of a group each pair has a communicator of its own
  WorkPtr send(Tensors& tensors, int to, int) override { return message(OpType::SEND, only(tensors), to); }
  WorkPtr recv(Tensors& tensors, int of, int) override { return message(OpType::RECV, only(tensors), of); }

 private:
  static Tensor& only(Tensors& tensors) {
    DEMAND(tensors.size() == 1, "one tensor a call, for one device; got ", tensors.size());
    return tensors[0];
  }
  Tensors cut(const Tensor& whole, const Tensor& part) const {
    DEMAND(
        whole.numel() == part.numel() * size_ && whole.scalar_type() == part.scalar_type(),
        "the larger tensor must have the dtype of the other, and ", size_, " times its elements");
    return whole.view({-1}).split_with_sizes(std::vector<int64_t>(size_, part.numel()));
  }
  Tensors split(const Tensor& whole, const std::vector<int64_t>& sizes) const {
    if (!sizes.empty()) return whole.split_with_sizes(sizes);
    DEMAND(whole.size(0) % size_ == 0, "the first dimension must divide by ", size_);
    return whole.split_with_sizes(std::vector<int64_t>(size_, whole.size(0) / size_));
  }

  template <class Options>
  WorkPtr all_reduce(OpType type, Tensors& tensors, const Options& opts) {
    return run(type, "all_reduce", opts, [&](Plan& plan) {
      for (auto& tensor : tensors) {
        auto what = reduction("all_reduce", tensor, opts.reduceOp);
        for (int peer = 0; peer < size_; ++peer) plan.give(peer, tensor, what);
        plan.reduce(size_, tensor, opts.reduceOp, what);
      }
    });
  }
  void all_gather(Plan& plan, const Tensors& outs, const Tensor& in) {
    for (int peer = 0; peer < size_; ++peer) plan.give(peer, in, "all_gather");
    for (int peer = 0; peer < size_; ++peer) plan.take(peer, outs[peer], "all_gather");
  }
  void reduce_scatter(Plan& plan, const Tensor& out, const Tensors& ins, const c10d::ReduceOp& op) {
    auto what = reduction("reduce_scatter", out, op);
    for (int peer = 0; peer < size_; ++peer) plan.give(peer, ins[peer], what);
    plan.reduce(size_, out, op, what);
  }
  void exchange(Plan& plan, const Tensors& outs, const Tensors& ins) {
    for (int peer = 0; peer < size_; ++peer) plan.give(peer, ins[peer], "all_to_all");
    for (int peer = 0; peer < size_; ++peer) plan.take(peer, outs[peer], "all_to_all");
  }
  WorkPtr message(OpType type, Tensor& tensor, int peer) {
    Plan alone;
    Plan& plan = group_ ? *group_ : alone;
    plan.type = group_ ? plan.type : type;
    plan.name = type == OpType::SEND ? "send" : "recv";
    bool in_pair = !group_ && peer != rank_;
    int place = in_pair ? peer > rank_ : peer;  // of the peer
    type == OpType::SEND ? plan.give(place, tensor, "message") : plan.take(place, tensor, "message");
    if (group_) return nothing();
    if (!in_pair) return launch(plan, c10d::kUnsetTimeout, true);
    auto pair = std::to_string(std::min(peer, rank_)) + ":" + std::to_string(std::max(peer, rank_));
    return launch(plan, c10d::kUnsetTimeout, true, pair, rank_ > peer, 2);
  }

  template <class Options, class Fill>
  WorkPtr run(OpType type, const char* name, const Options& opts, const Fill& fill) {
    if (group_) {
      fill(*group_);
      return nothing();
    }
    Plan plan;
    plan.type = type;
    plan.name = name;
    fill(plan);
    return launch(plan, opts.timeout, opts.asyncOp);
  }
  static WorkPtr nothing() { return c10::make_intrusive<c10d::Work>(); }

  CommPtr comm_for(const std::string& key, int place, int members, int device) {
    Lock lock(mutex_);
    DEMAND(ended_.empty(), ended_);
    auto found = comms_.find(key);
    if (found == comms_.end()) {
      lock.unlock();  // the store may be one of Python
      auto made = std::make_shared<Comm>(
          *store_, std::string(kName) + "/" + key, place, members, device, timeout_, [this] {
            Lock lock(mutex_);
            return !ended_.empty();
          });
      lock.lock();
      found = comms_.emplace(key, made).first;
      if (!ended_.empty()) made->fail(ended_);
    }
    DEMAND(!found->second->ended, found->second->reason());
    DEMAND(
        found->second->device == device, "the communicator is of sim:", found->second->device,
        ", and the tensors are on sim:", device);
    return found->second;
  }

  WorkPtr launch(
      Plan& plan, Milliseconds timeout, bool asynchronous, const std::string& key = "all",
      int place = -1, int members = -1) {
    if (plan.device < 0) return nothing();
    c10::DeviceGuard guard(c10::Device(at::kPrivateUse1, static_cast<c10::DeviceIndex>(plan.device)));
    auto comm = comm_for(key, place < 0 ? rank_ : place, members < 0 ? size_ : members, plan.device);
    int current = current_stream(plan.device);
    int stream = asynchronous ? comm->stream : current;
    auto work = c10::make_intrusive<Work>(rank_, plan.type);
    auto kernel = plan.kernel;
    kernel->name = plan.name;
    kernel->patience = timeout < Milliseconds(0) ? timeout_ : timeout;
    kernel->deadline = now() + kernel->patience;
    {
      Lock lock(given_);  // kernels come to their streams in the order of their turns
      if (asynchronous) sim::wait(stream, record(current));
      uint64_t turn = comm->given;
      submit(
          stream, plan.name, plan.touched.uses, [=] { kernel->run(*comm, turn); }, plan.touched.blocks);
      ++comm->given;
    }
    kernel->end = record(stream);
    watchdog_.watch(comm, kernel);
    work->comm = comm;
    work->kernel = kernel;
    work->stream = stream;
    work->outs = plan.outs;
    if (asynchronous) work->stash = plan.all;
    work->future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{guard.current_device()});
    set_stream(stream);  // on which the future is complete
    work->future->markCompleted(c10::IValue(plan.outs));
    set_stream(current);
    return work;
  }

  void end(const std::string& why) {
    Lock lock(mutex_);
    if (ended_.empty()) ended_ = why;
    for (auto& [key, comm] : comms_) comm->fail(why);
  }

  c10::intrusive_ptr<c10d::Store> store_;
  Milliseconds timeout_;
  std::unique_ptr<Plan> group_;
  std::mutex mutex_, given_;
  std::map<std::string, CommPtr> comms_;
  std::string ended_;
  Watchdog watchdog_;
};

c10::intrusive_ptr<c10d::Backend> connect(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, Milliseconds timeout) {
  return c10::make_intrusive<Library>(store, rank, size, timeout);
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(sim, m) {
  m.def("connect", &sim::connect);
}
