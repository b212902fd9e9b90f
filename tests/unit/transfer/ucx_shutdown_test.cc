// A call into UCX that never returns while a transport closes ends the process, too. So that one does, these
// calls go through functions of this program.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <ucp/api/ucp.h>
#include <unistd.h>

#include <atomic>

#include "tests/unit/transfer/ucx_ends.h"

namespace {

enum class Hangs { kNothing, kProgress, kDestroy };
std::atomic<Hangs> hangs{Hangs::kNothing};
thread_local bool closing = false;  // this thread closed a connection

void HangIf(Hangs call) {
  while (closing && hangs == call) pause();
}

template <typename F>
F* Real(const char* name) {
  return reinterpret_cast<F*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

unsigned ucp_worker_progress(ucp_worker_h worker) {
  static auto* const real = Real<unsigned(ucp_worker_h)>("ucp_worker_progress");
  HangIf(Hangs::kProgress);
  return real(worker);
}

void ucp_worker_destroy(ucp_worker_h worker) {
  static auto* const real = Real<void(ucp_worker_h)>("ucp_worker_destroy");
  HangIf(Hangs::kDestroy);
  real(worker);
}

ucs_status_ptr_t ucp_ep_close_nbx(ucp_ep_h ep, const ucp_request_param_t* param) {
  using Close = ucs_status_ptr_t(ucp_ep_h, const ucp_request_param_t*);
  static auto* const real = Real<Close>("ucp_ep_close_nbx");
  closing = true;
  return real(ep, param);
}

}  // extern "C"

namespace deltamesh {
namespace {

// False when the message that makes them busy did not come.
bool CloseWith(Hangs call) {
  UcxTransportOptions options = LoopbackOptions();
  // Then a connection ends once nothing is under way on it any more, which takes looks.
  options.error_mode = UcxErrorMode::kNone;
  UcxTransportOptions watched = options;
  watched.hung_after = absl::Milliseconds(300);
  End a(options), b(watched);
  const PeerId peer = *a.transport->Connect(b.transport->address());
  a.transport->Send(peer, MessageType::kProbe, "x", {}, a.recorder.Count());
  if (!b.recorder.Wait(10, [](const Recorder& r) { return r.messages_.size() == 1; })) {
    return false;
  }
  hangs = call;
  alarm(10);
  b.transport.reset();
  alarm(0);
  return true;
}

TEST(UcxShutdownTest, ATransportThatClosesInTimeEndsNothing) {
  EXPECT_TRUE(CloseWith(Hangs::kNothing));
}

TEST(UcxShutdownDeathTest, ALookThatNeverReturnsEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(CloseWith(Hangs::kProgress), "UCX has not come back for 300ms");
}

TEST(UcxShutdownDeathTest, AWorkerThatIsNeverDestroyedEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(CloseWith(Hangs::kDestroy), "UCX has not come back for 300ms");
}

}  // namespace
}  // namespace deltamesh
