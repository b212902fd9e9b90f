// What else the machine does while a benchmark measures.
#pragma once

namespace deltamesh {

// CPU that others use: neither this process nor what it started, nor what that started. Time a hypervisor
// gave to others counts. The system counts in ticks of about 10 ms for each process, so a measurement of less
// than some tenths of a second says little.
class OtherLoad {
 public:
  OtherLoad();
  double cores() const;  // since construction; -1 when the system does not tell

 private:
  double busy_, own_, start_;
};

}  // namespace deltamesh
