// What a first token takes beyond what rates tell of, when it comes by one way: steps, messages, connections,
// and queues that heartbeats do not show.
//
// The median of the last ones: the least of them promises what a request rarely gets, a mean is spoiled by
// one that waited for something else. While requests take the other way it fades, so that what was slow is
// tried again, the sooner the less is known. A sample ends the fading; one that comes after a long time
// counts for those that did not come, so that a way that was slow for a while is not shunned for long.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace deltamesh {

class UsualOverhead {
 public:
  void Seen(double seconds) {
    const size_t times = known() == 0 ? 1 : std::min(1 + fades_ / kFadesOfASample, kKept / 2 + 1);
    for (size_t i = 0; i < times; ++i) last_[seen_++ % kKept] = seconds;
    fades_ = 0;
    std::array<double, kKept> sorted = last_;
    const auto end = sorted.begin() + static_cast<std::ptrdiff_t>(known());
    const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>((known() - 1) / 2);
    std::nth_element(sorted.begin(), middle, end);
    seconds_ = std::max(0.0, *middle);
  }
  // A request took the other way.
  void Fade() {
    if (known() == 0) return;
    ++fades_;
    seconds_ *= 1 - 1 / (16 * static_cast<double>(known()));
  }
  // A way that was never taken counts as no quicker than the other. 0: neither was.
  double Or(const UsualOverhead& other) const { return known() > 0 ? seconds_ : other.seconds_; }

 private:
  static constexpr size_t kKept = 32, kFadesOfASample = 64;

  size_t known() const { return std::min(seen_, kKept); }

  std::array<double, kKept> last_ = {};
  size_t seen_ = 0, fades_ = 0;
  double seconds_ = 0;
};

}  // namespace deltamesh
