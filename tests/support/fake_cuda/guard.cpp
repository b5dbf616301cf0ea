// The C++ side of the fake device: torch asks here which CUDA device is current, of every thread by itself.
#include <c10/core/impl/DeviceGuardImplInterface.h>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

namespace {

thread_local DeviceIndex current = 0;
DeviceIndex count = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  Device exchangeDevice(Device device) const override {
    Device before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  void setDevice(Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return Stream(Stream::DEFAULT, stream.device()); }
  DeviceIndex deviceCount() const noexcept override { return count; }
};

}  // namespace

extern "C" {
void fake_cuda_install(int devices) {
  static Guard guard;
  count = static_cast<DeviceIndex>(devices);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(
      devices > 0 ? &guard : nullptr);
}
int fake_cuda_get_device() { return current; }
void fake_cuda_set_device(int index) { current = static_cast<DeviceIndex>(index); }
}
