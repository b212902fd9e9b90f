// A prefill worker sends while it computes: the state of each KDA layer leaves before the layers after
// it have run, not when the step is over.
#include <gtest/gtest.h>

#include <map>

#include "runtime/expert/local_experts.h"
#include "services/prefill/prefill_core.h"
#include "tests/mesh/requests.h"
#include "tests/mesh/test_mesh.h"

namespace deltamesh::testing {
namespace {

// Counts the MoE layers computed, and lets each take time.
class CountingExperts final : public ExpertBackend {
 public:
  CountingExperts(const ExpertSet* set, ThreadPool* pool, ManualClock* clock)
      : experts_(set, pool), clock_(clock) {}
  absl::StatusOr<uint64_t> Start(const ExpertBatch& batch) override {
    ++layers_;
    clock_->Advance(absl::Milliseconds(100));
    return experts_.Start(batch);
  }
  absl::Status Finish(uint64_t ticket) override { return experts_.Finish(ticket); }
  int64_t layers() const { return layers_; }

 private:
  LocalExperts experts_;
  ManualClock* const clock_;
  int64_t layers_ = 0;
};

// The last action that `core` wants sent, of the kind that `has` accepts.
template <typename Has>
const mesh::WorkerMessage* Last(const std::vector<SendToRouter>& actions, Has has) {
  const mesh::WorkerMessage* last = nullptr;
  for (const SendToRouter& action : actions) {
    if (has(action.message)) last = &action.message;
  }
  return last;
}

TEST(OverlapTest, LayersLeaveWhileTheLastChunkComputes) {
  constexpr int64_t kPrompt = 64;  // one step
  constexpr LinkId kLink = 1;
  Model& model = SharedModel(Golden("kimi_k3"), {});
  ManualClock clock;
  SeededEntropy entropy(3);
  ThreadPool pool(1);
  CountingExperts experts(&model.experts(), &pool, &clock);
  auto engine = *Engine::Create(&model, &experts, &pool,
                                {.slabs = 1, .latent_blocks = 8, .context_tokens_max = 512});
  const StatePools landing_pools = *StatePools::Create(model.state_layout(), 1, 8);
  InprocNetwork network;  // delivers at once
  auto to = *network.Open("decode");
  auto from = *network.Open("prefill");

  std::unique_ptr<SequenceState> arrived;
  HandoffReceiverOptions receive;
  receive.identity.digest = model.digest();
  receive.layout = model.state_layout();
  HandoffReceiver receiver(to.get(), &clock, &entropy, receive, [&](HandoffEvent event) {
    if (auto* completed = std::get_if<HandoffCompleted>(&event))
      arrived = std::move(completed->state);
  });
  HandoffSenderOptions send;
  send.identity = receive.identity;
  send.layout = receive.layout;
  std::vector<HandoffSent> results;
  HandoffSender sender(from.get(), &clock, send,
                       [&](HandoffSent result) { results.push_back(std::move(result)); });
  PrefillOptions options;
  options.kda_index = KdaIndexOfLayers(model.config());
  options.clock = &clock;
  PrefillCore core(options, mesh::Register(), engine.get(),
                   {.sender = &sender, .receiver = nullptr, .fetch = nullptr}, nullptr);

  // MoE layers computed when each region left.
  const RegionPlan plan(model.state_layout(), kPrompt, 0);
  std::map<int64_t, int64_t> left_at;
  network.SetFault([&](const InprocMessage& message) {
    mesh::Segment segment;
    if (message.type == MessageType::kHandoffSegment) {
      EXPECT_TRUE(
          segment.ParseFromArray(message.header.data(), static_cast<int>(message.header.size())));
      left_at[segment.region()] = experts.layers();
    }
    return InprocFault();
  });

  core.OnLinkOpened(kLink, clock.Now());
  HandoffGrant grant;
  grant.request_id = "a";
  grant.position = kPrompt;
  grant.buffers = *HandoffBuffers::Reserve(landing_pools, kPrompt);
  mesh::RouterMessage message;
  mesh::StartPrefill* start = message.mutable_start_prefill();
  start->set_request_id("a");
  *start->mutable_landing() = *receiver.Grant(std::move(grant));
  for (const TokenId token : MakeRequest("a", kPrompt, 1, 5).prompt) start->add_tokens(token);
  const absl::Time began = clock.Now();
  core.OnRouterMessage(kLink, message, clock.Now());
  while (core.Step(clock.Now())) {
  }

  const int64_t all = experts.layers();
  ASSERT_GE(all, 2);
  ASSERT_EQ(left_at.size(), static_cast<size_t>(plan.size())) << "every region left";
  int64_t before = 0, early = 0;
  for (int64_t layer = 0; layer < model.state_layout().kda_layers; ++layer) {
    const int64_t at = left_at[plan.StateIndex(layer)];
    EXPECT_EQ(left_at[plan.ConvIndex(layer)], at);
    EXPECT_GE(at, before) << "layers leave in order";
    before = at;
    early += at < all;
  }
  EXPECT_LT(left_at[plan.StateIndex(0)], all) << "the first layer left after the whole step";
  EXPECT_GE(early, model.state_layout().kda_layers - 1);
  EXPECT_NE(arrived, nullptr);
  ASSERT_EQ(results.size(), 1u);
  EXPECT_TRUE(results[0].status.ok()) << results[0].status;

  // The one step counts as a whole, and nothing else took time.
  const std::vector<SendToRouter> actions = core.TakeActions();
  const mesh::WorkerMessage* finished =
      Last(actions, [](const mesh::WorkerMessage& m) { return m.has_prefill_finished(); });
  ASSERT_NE(finished, nullptr);
  EXPECT_DOUBLE_EQ(finished->prefill_finished().seconds(),
                   absl::ToDoubleSeconds(clock.Now() - began));
  EXPECT_NEAR(finished->prefill_finished().seconds(), 0.1 * static_cast<double>(all), 1e-9);
  from.reset();
  to.reset();
}

}  // namespace
}  // namespace deltamesh::testing
