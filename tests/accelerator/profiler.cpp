// What torch's profiler is told of the devices: which work ran on which stream, and who gave it.
#ifndef USE_KINETO
#define USE_KINETO
#endif
#include <kineto/libkineto.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>
#include <unistd.h>

#include "runtime.h"

namespace sim {
namespace {

using libkineto::ActivityType;

struct Session final : libkineto::IActivityProfilerSession {
  void start() override { keep_spans(true); }
  void stop() override {
    for (int device = 0; device < device_count(); ++device) synchronize_device(device);
    keep_spans(false);
  }
  std::vector<std::string> errors() override { return {}; }
  void processTrace(libkineto::ActivityLogger& logger) override {
    for (const auto& span : spans()) {
      auto& launch = add(ActivityType::PRIVATEUSE1_RUNTIME, "simLaunch", span, span.given, span.taken);
      launch.device = getpid();
      launch.resource = launch.threadId = span.thread;
      auto& kernel = add(ActivityType::CONCURRENT_KERNEL, span.op, span, span.begin, span.end);
      kernel.device = span.stream / kStreams;
      kernel.resource = span.stream % kStreams;
    }
    for (const auto& activity : buffer_->activities) activity->log(logger);
  }
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override { return {}; }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(buffer_); }

 private:
  libkineto::GenericTraceActivity& add(
      ActivityType type, const std::string& name, const Span& span, int64_t begin, int64_t end) {
    buffer_->emplace_activity(buffer_->span, type, name);
    auto& made = *buffer_->activities.back();
    made.startTime = begin;
    made.endTime = end;
    made.id = static_cast<int32_t>(span.number);
    return made;
  }
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
};

struct Profiler final : libkineto::IActivityProfiler {
  const std::string& name() const override { return name_; }
  const std::set<ActivityType>& availableActivities() const override { return types_; }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<ActivityType>& wanted, const libkineto::Config&) override {
    if (!wanted.count(ActivityType::CONCURRENT_KERNEL)) return nullptr;
    return std::make_unique<Session>();
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t, int64_t, const std::set<ActivityType>& wanted, const libkineto::Config& config) override {
    return configure(wanted, config);
  }

 private:
  std::string name_ = "sim";
  std::set<ActivityType> types_{ActivityType::CONCURRENT_KERNEL, ActivityType::PRIVATEUSE1_RUNTIME};
};
REGISTER_PRIVATEUSE1_PROFILER(Profiler);

}  // namespace
}  // namespace sim
