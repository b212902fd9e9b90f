// The one binary: every role and every tool is a subcommand.
#include <sys/prctl.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iostream>
#include <new>
#include <system_error>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "kernels/base/cpu_features.h"
#include "runtime/base/status.h"
#include "services/cli/bench.h"
#include "services/cli/bench_disaggregation.h"
#include "services/cli/bench_long.h"
#include "services/cli/bench_mesh.h"
#include "services/cli/bench_router.h"
#include "services/cli/bench_scratch.h"
#include "services/cli/bench_sessions.h"
#include "services/cli/call.h"
#include "services/cli/chat.h"
#include "services/cli/chat_mesh.h"
#include "services/cli/explain.h"
#include "services/cli/generate.h"
#include "services/cli/inspect.h"
#include "services/cli/load_progress.h"
#include "services/cli/logits.h"
#include "services/cli/pack.h"
#include "services/cli/plan.h"
#include "services/cli/quality.h"
#include "services/cli/serve.h"
#include "services/cli/simulate.h"
#include "services/common/flags.h"
#include "services/common/process.h"
#include "services/decode/decode_server.h"
#include "services/expert/expert_process.h"
#include "services/prefill/prefill_server.h"
#include "services/router/router_process.h"
#include "services/worker/attention_worker.h"

namespace deltamesh {
namespace {

constexpr char kCpuTargetVariable[] = "DELTAMESH_CPU_TARGET";

// What to run once the flags are parsed; returns the exit code.
using Command = std::function<int()>;

// What was printed must have arrived: a full disk is no success.
int CheckOutput(int code) {
  std::cout.flush();
  if (std::cout && std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  std::cerr
      << "deltamesh: standard output: cannot be written; free its disk or keep its reader alive"
      << std::endl;
  return code != 0 ? code : 1;
}

int ExitCode(const absl::Status& status) {
  if (status.ok()) return 0;
  std::cerr << "deltamesh: " << status.message() << std::endl;
  return 1;
}

// For what writes files that it only needs while it runs: none is left, also after a signal.
int RunInScratch(const std::function<absl::Status()>& run) {
  const absl::Status status = ContinueInScratch();
  return ExitCode(status.ok() ? run() : status);
}

void AddRoles(CLI::App& app, Command& command) {
  auto* router = app.add_subcommand("router", "the front door: clients and workers connect to it");
  auto router_flags = std::make_shared<RouterFlags>();
  AddRouterFlags(router, router_flags.get());
  NameInEnvironment(router);
  router->callback([=, &command] { command = [=] { return RunRouter(*router_flags); }; });

  auto* prefill =
      app.add_subcommand("prefill", "a worker that computes prompts and hands state over");
  auto prefill_flags = std::make_shared<AttentionFlags>(PrefillDefaults());
  AddAttentionFlags(prefill, prefill_flags.get());
  NameInEnvironment(prefill);
  prefill->callback([=, &command] { command = [=] { return RunPrefill(*prefill_flags); }; });

  auto* decode = app.add_subcommand("decode", "a worker that streams tokens");
  auto decode_flags = std::make_shared<AttentionFlags>();
  AddAttentionFlags(decode, decode_flags.get());
  NameInEnvironment(decode);
  decode->callback([=, &command] { command = [=] { return RunDecode(*decode_flags); }; });

  auto* expert = app.add_subcommand("expert", "a shard of the routed experts");
  auto expert_flags = std::make_shared<ExpertFlags>();
  AddExpertFlags(expert, expert_flags.get());
  NameInEnvironment(expert);
  expert->callback([=, &command] { command = [=] { return RunExpert(*expert_flags); }; });
}

void AddServe(CLI::App& app, Command& command) {
  auto* serve = app.add_subcommand("serve", "the whole mesh on this machine");
  auto options = std::make_shared<ServeOptions>();
  AddServeFlags(serve, options.get());
  NameInEnvironment(serve);
  serve->callback([=, &command] { command = [=] { return RunServe(*options); }; });
}

void AddInspect(CLI::App& app, Command& command) {
  auto* inspect = app.add_subcommand("inspect", "print what would be loaded from a checkpoint");
  auto folder = std::make_shared<std::string>();
  inspect->add_option("folder", *folder, "checkpoint folder")->required();
  inspect->callback(
      [=, &command] { command = [=] { return ExitCode(RunInspect(*folder, std::cout)); }; });
}

void AddLogits(CLI::App& app, Command& command) {
  auto* logits = app.add_subcommand("logits", "write the logits of given tokens to a file");
  auto options = std::make_shared<LogitsOptions>();
  logits->add_option("--model", options->model, "checkpoint folder")
      ->envname("DELTAMESH_MODEL")
      ->required();
  logits->add_option("--tokens", options->tokens, "token ids: 1,2,3")->delimiter(',')->required();
  logits->add_option("--feed", options->feed, "all, step or chunks:5,1,7")->capture_default_str();
  logits->add_option("--out", options->out, "file to write, .npy")->required();
  AddToolLoadFlags(logits, &options->weights, &options->activations, &options->packed_dir);
  logits->add_flag("--states", options->states, "also write the final states");
  logits->add_option("--threads", options->threads, "threads")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  logits->callback([=, &command] { command = [=] { return ExitCode(RunLogits(*options)); }; });
}

void AddPack(CLI::App& app, Command& command) {
  auto* pack = app.add_subcommand("pack", "pack weights ahead of time, for all workers to share");
  auto options = std::make_shared<PackOptions>();
  AddPackFlags(pack, options.get());
  pack->callback([=, &command] {
    command = [=] { return ExitCode(RunPack(*options, std::cout, std::cerr)); };
  });
}

void AddPlan(CLI::App& app, Command& command) {
  auto* plan = app.add_subcommand("plan", "sizes, sessions and workers that a model needs");
  auto options = std::make_shared<PlanOptions>();
  AddPlanFlags(plan, options.get());
  plan->callback(
      [=, &command] { command = [=] { return ExitCode(RunPlan(*options, std::cout)); }; });
}

void AddSimulate(CLI::App& app, Command& command) {
  auto* simulate =
      app.add_subcommand("simulate", "the mesh's own policies under traffic, in virtual time");
  auto options = std::make_shared<SimulateOptions>();
  AddSimulateFlags(simulate, options.get());
  simulate->callback([=, &command] {
    command = [=] { return ExitCode(RunSimulate(*options, std::cout, std::cerr)); };
  });
}

// Everything that `bench` may be asked for.
struct BenchFlags {
  BenchOptions speed;
  QualityOptions quality;
  CurveOptions curve;
  HybridOptions hybrid;
  bool compare = false;
};

absl::Status RunBenchCommand(BenchFlags& f) {
  const BenchOptions& o = f.speed;
  const LongRunOptions run = {.threads = o.threads,
                              .weights = o.weights,
                              .activations = o.activations,
                              .packed_dir = o.packed_dir};
  const bool curve = !f.curve.lengths.empty();
  const char* const usual_model = std::getenv("DELTAMESH_MODEL");
  if (f.compare && !o.model.empty() && (usual_model == nullptr || o.model != usual_model)) {
    return InvalidArgument("--model: --hybrid-vs-full makes its own models; leave one of them out");
  }
  if (!f.quality.text.empty()) {
    f.quality.model = o.model;
    f.quality.threads = o.threads;
    if (o.activations != "float") f.quality.weights = o.weights;
    f.quality.activations = o.activations;
    f.quality.packed_dir = o.packed_dir;
    f.quality.json = o.json;
    return RunQuality(f.quality, std::cout);
  }
  if (f.compare || (curve ? o.model.empty() : NeedsScratch(o))) {
    RETURN_IF_ERROR(ContinueInScratch());
  }
  if (f.compare) {
    f.hybrid.run = run;
    f.hybrid.json = o.json;
    return RunHybridVsFull(f.hybrid, std::cout);
  }
  if (!curve) return RunBench(o, std::cout);
  f.curve.model = o.model;
  f.curve.run = run;
  f.curve.chunk_tokens = o.chunk_tokens;
  f.curve.json = o.json;
  return RunCurve(f.curve, std::cout, std::cerr);
}

void AddBench(CLI::App& app, Command& command) {
  auto* bench = app.add_subcommand(
      "bench", "measure engine, hand-off and mesh against the machine's ceilings");
  auto f = std::make_shared<BenchFlags>();
  AddBenchFlags(bench, &f->speed);
  auto* quality = bench->add_option(
      "--quality", f->quality.text,
      "instead of speed: logits of --activations int8 with --weights, or else of 8-bit weights, "
      "against stored weights and float activations on this text file");
  bench->add_option("--quality-tokens", f->quality.tokens, "most tokens of the text")
      ->check(CLI::Range(int64_t{2}, int64_t{1} << 24))
      ->needs(quality)
      ->capture_default_str();
  AddLongFlags(bench, &f->curve, &f->compare, &f->hybrid);
  quality->excludes(bench->get_option("--curve"), bench->get_option("--hybrid-vs-full"));
  bench->callback([=, &command] { command = [=] { return ExitCode(RunBenchCommand(*f)); }; });
}

void AddBenchPeer(CLI::App& app, Command& command) {
  auto* peer = app.add_subcommand("bench-handoff-peer", "the other process of a measured hand-off");
  peer->group("");  // bench starts it
  peer->callback([&command] { command = [] { return RunHandoffPeer(); }; });
}

void AddBenchMesh(CLI::App& app, Command& command) {
  auto* bench = app.add_subcommand("bench-mesh", "measure a running mesh as a client sees it");
  auto options = std::make_shared<BenchMeshOptions>();
  AddBenchMeshFlags(bench, options.get());
  bench->callback(
      [=, &command] { command = [=] { return ExitCode(RunBenchMesh(*options, std::cout)); }; });
}

void AddBenchSessions(CLI::App& app, Command& command) {
  auto* bench = app.add_subcommand(
      "bench-sessions", "measure turns on a long prompt that the mesh has seen against their bars");
  auto options = std::make_shared<SessionBenchOptions>();
  AddSessionBenchFlags(bench, options.get());
  bench->callback([=, &command] {
    command = [=] { return RunInScratch([&] { return RunSessionBench(*options, std::cout); }); };
  });
}

void AddBenchDisaggregation(CLI::App& app, Command& command) {
  auto* bench = app.add_subcommand(
      "bench-disaggregation", "measure planned hand-offs against handing over always and never");
  auto options = std::make_shared<DisaggregationBenchOptions>();
  AddDisaggregationBenchFlags(bench, options.get());
  bench->callback([=, &command] {
    command = [=] {
      return RunInScratch([&] { return RunDisaggregationBench(*options, std::cout); });
    };
  });
}

void AddGenerate(CLI::App& app, Command& command) {
  auto* generate = app.add_subcommand("generate", "one answer from an engine in this process");
  auto options = std::make_shared<GenerateOptions>();
  AddGenerateFlags(generate, options.get());
  generate->callback([=, &command] { command = [=] { return ExitCode(RunGenerate(*options)); }; });
}

void AddBenchRouter(CLI::App& app, Command& command) {
  auto* bench = app.add_subcommand("bench-router", "measure what a router costs against its bars");
  auto options = std::make_shared<RouterBenchOptions>();
  AddRouterBenchFlags(bench, options.get());
  bench->callback([=, &command] {
    command = [=] { return RunInScratch([&] { return RunRouterBench(*options, std::cout); }); };
  });
}

void AddExplain(CLI::App& app, Command& command) {
  auto* explain = app.add_subcommand("explain", "why a router placed requests where it did");
  auto options = std::make_shared<ExplainOptions>();
  AddExplainFlags(explain, options.get());
  explain->callback(
      [=, &command] { command = [=] { return ExitCode(RunExplain(*options, std::cout)); }; });
}

void AddCall(CLI::App& app, Command& command) {
  auto* call = app.add_subcommand("call", "one call of Inference.Generate, JSON in and out");
  auto options = std::make_shared<CallOptions>();
  AddCallFlags(call, options.get());
  call->callback(
      [=, &command] { command = [=] { return ExitCode(RunCall(*options, std::cout)); }; });
}

void AddChat(CLI::App& app, Command& command) {
  auto* chat = app.add_subcommand("chat", "a conversation in the terminal");
  auto options = std::make_shared<ChatOptions>();
  AddChatFlags(chat, options.get());
  chat->callback([=, &command] {
    command = [=] {
      const SignalWaiter signals;  // before gRPC makes threads
      const auto mesh = MeshForChat(options.get(), std::cout,
                                    [&] { return signals.Wait(absl::ZeroDuration()) != 0; });
      if (!mesh.ok()) return ExitCode(mesh.status());
      return RunChat(*options, STDIN_FILENO, std::cout,
                     [&](absl::Duration wait) { return signals.Wait(wait); });
    };
  });
}

// Holds for the kernels of this process and, through the environment, of those it starts.
absl::Status UseCpuTarget(std::string target) {
  if (target.empty()) return absl::OkStatus();
  absl::AsciiStrToUpper(&target);
  if (!kernels::ForceCpuTarget(target)) {
    return InvalidArgument("--cpu-target: %s is not known or not of this CPU; use %s", target,
                           absl::StrJoin(kernels::CpuTargets(), " or "));
  }
  setenv(kCpuTargetVariable, target.c_str(), 1);
  return absl::OkStatus();
}

int Main(int argc, char** argv) {
  CLI::App app("deltamesh: a serving mesh for Kimi-Linear and Kimi K3");
  app.require_subcommand(1);
  app.fallthrough();  // so that it may follow the subcommand too
  std::string cpu_target;
  app.add_option("--cpu-target", cpu_target,
                 "instructions to use, such as AVX2 (default: the best of this CPU)")
      ->envname(kCpuTargetVariable);
  // Packages of abseil may be built to look for cycles of locks with each lock that is taken, gRPC's too.
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
  prctl(PR_SET_NAME, "deltamesh");  // children of serve are started from a link of another name
  app.set_version_flag("--version", "deltamesh 0.1.0");
  Command command;
  AddServe(app, command);
  AddRoles(app, command);
  AddInspect(app, command);
  AddLogits(app, command);
  AddPack(app, command);
  AddPlan(app, command);
  AddSimulate(app, command);
  AddBench(app, command);
  AddBenchPeer(app, command);
  AddBenchMesh(app, command);
  AddGenerate(app, command);
  AddBenchRouter(app, command);
  AddBenchSessions(app, command);
  AddBenchDisaggregation(app, command);
  AddCall(app, command);
  AddExplain(app, command);
  AddChat(app, command);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& e) {
    return CheckOutput(app.exit(e));
  }
  if (const absl::Status status = UseCpuTarget(cpu_target); !status.ok()) return ExitCode(status);
  signal(SIGXFSZ, SIG_IGN);  // a file beyond the limit is an error like a full disk
  try {
    return CheckOutput(command());
  } catch (const std::filesystem::filesystem_error& e) {
    return ExitCode(Unavailable("%s", e.what()));
  } catch (const std::system_error& e) {  // where the standard library starts a thread
    return ExitCode(ResourceExhausted(
        "%s; where threads are meant, use fewer --threads or raise the limit", e.what()));
  } catch (const std::bad_alloc&) {
    return ExitCode(ResourceExhausted("no memory is left; use fewer --threads or smaller numbers"));
  }
}

}  // namespace
}  // namespace deltamesh

int main(int argc, char** argv) { return deltamesh::Main(argc, argv); }
