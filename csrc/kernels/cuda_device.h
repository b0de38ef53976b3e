// Which CUDA device the calling thread works on.
#pragma once

namespace pycomm {

// Makes a device the current one for as long as this lives. Throws kError, in words, where there is
// no driver or no such device.
class UseDevice {
 public:
  explicit UseDevice(int device);
  ~UseDevice();
  UseDevice(const UseDevice&) = delete;
  UseDevice& operator=(const UseDevice&) = delete;

 private:
  int before_ = 0;
};

}  // namespace pycomm
