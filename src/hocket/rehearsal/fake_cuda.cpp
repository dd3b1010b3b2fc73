// A CUDA device that does nothing, so that fake CUDA tensors run forward and backward without a GPU.
//
// Autograd asks the guard of a tensor's device for its stream and starts one backward thread for each
// device that a guard counts; a CPU build of torch has no guard for CUDA, and that of a CUDA build
// calls the driver. This guard and these hooks answer without either.
//
// Load before torch: torch asks for its hooks once. On a CUDA build torch registers its own guard
// when it is imported, after this one, and the last registration counts: call hocket_register_guard()
// again after the import. Hooks are registered with a higher priority than torch's.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceIndex kDevices = 8;
thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device before(c10::DeviceType::CUDA, current);
    current = d.index() < 0 ? current : d.index();
    return before;
  }
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, current}; }
  void setDevice(c10::Device d) const override { exchangeDevice(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.index() >= 0) current = d.index();
  }
  c10::Stream getStream(c10::Device d) const override {
    c10::DeviceIndex index = d.index() < 0 ? current : d.index();
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CUDA, index));
  }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return getStream(s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};

Guard guard;

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
};

struct Registered {
  Registered() {
    at::CUDAHooksRegistry()->Register(
        "CUDAHooks",
        [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> {
          return std::make_unique<Hooks>(args);
        },
        c10::REGISTRY_PREFERRED);
  }
} registered;

}  // namespace

extern "C" void hocket_register_guard() {
  c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, &guard);
}
