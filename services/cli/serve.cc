#include "services/cli/serve.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <optional>
#include <thread>

#include "CLI/CLI.hpp"
#include "absl/time/clock.h"
#include "runtime/base/checkpoint_marks.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"
#include "runtime/model/config.h"
#include "services/cli/children.h"
#include "services/cli/first_answer.h"
#include "services/cli/run_folder.h"
#include "services/cli/shipped_model.h"
#include "services/common/address.h"
#include "services/common/flag_range.h"
#include "services/common/flags.h"
#include "services/common/process.h"

namespace deltamesh {
namespace {

// A folder for logs and port files, removed at the end.
class RunDir {
 public:
  static absl::StatusOr<std::unique_ptr<RunDir>> Create(const ServeOptions& options) {
    std::string path = options.run_dir;
    if (path.empty() && !options.keep_run_dir) {
      ASSIGN_OR_RETURN(std::unique_ptr<RunFolder> own, RunFolder::Create());
      path = own->path();
      return std::unique_ptr<RunDir>(new RunDir(path, std::move(own)));
    }
    if (path.empty()) {  // one that stays
      std::error_code error;
      path = (std::filesystem::temp_directory_path(error) / "deltamesh-XXXXXX").string();
      if (error || mkdtemp(path.data()) == nullptr) {
        return Unavailable("%s: cannot be created; set TMPDIR to a folder that can be written",
                           path);
      }
      return std::unique_ptr<RunDir>(new RunDir(path, nullptr, /*keep=*/true));
    }
    std::error_code error;
    if (!std::filesystem::create_directories(path, error)) {
      return InvalidArgument("--run-dir: %s exists already or cannot be created", path);
    }
    return std::unique_ptr<RunDir>(new RunDir(path, nullptr, options.keep_run_dir));
  }
  ~RunDir() {
    std::error_code ignored;
    if (!keep_ && own_ == nullptr) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  RunDir(std::string path, std::unique_ptr<RunFolder> own, bool keep = false)
      : path_(std::move(path)), own_(std::move(own)), keep_(keep) {}
  const std::string path_;
  const std::unique_ptr<RunFolder> own_;  // removes itself
  const bool keep_;
};

std::map<std::string, std::string> ReadKeyValues(const std::string& path) {
  std::map<std::string, std::string> out;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) {
    if (const size_t eq = line.find('='); eq != std::string::npos) {
      out[line.substr(0, eq)] = line.substr(eq + 1);
    }
  }
  return out;
}

std::string Shorten(const std::string& line) {
  return line.size() <= 100 ? line : line.substr(0, 97) + "...";
}

// This program as any shell can call it, whatever its path holds.
std::string OwnPath() {
  std::error_code error;
  const auto path = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) return "deltamesh";
  std::string quoted;
  for (const char c : path.string()) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted.find_first_of(" '\"$`\\*?()&;|<>~#!") == quoted.npos ? quoted : "'" + quoted + "'";
}

class Serve {
 public:
  Serve(const ServeOptions& options, const SignalWaiter& signals, RunDir* run_dir)
      : options_(options), signals_(signals), run_dir_(*run_dir), children_(run_dir->path()) {}

  ~Serve() { children_.StopAll(absl::Seconds(5)); }

  // Returns when asked to stop (ABORTED) or when something went wrong.
  absl::Status Run();

 private:
  struct Member {
    std::string name;
    std::map<std::string, std::string> ports;  // empty until the process is up
    bool ready = false, lost = false;
    std::string last_line;
  };

  static int processors() {
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  }
  int threads() const { return options_.threads > 0 ? options_.threads : processors(); }
  std::string ports_file(const std::string& name) const {
    return run_dir_.path() + "/" + name + ".ports";
  }
  absl::Status StartRouter();
  absl::Status StartWorkers(const std::string& router);
  absl::Status StartWorker(const std::string& role, const std::string& name,
                           const std::string& router, std::vector<std::string> more);
  // Waits for signals a little; ABORTED after one, UNAVAILABLE when a child died that the mesh cannot do
  // without.
  absl::Status Pause(absl::Duration wait);
  bool GoesOnWithout(const std::string& name);
  absl::Status AwaitPorts(Member& member);
  absl::Status AwaitReady();
  void ShowProgress(Member& member);
  void PrintEndpoints(const Member& router) const;
  absl::Status FirstAnswer(const std::string& router);

  const ServeOptions& options_;
  const SignalWaiter& signals_;
  RunDir& run_dir_;
  Children children_;
  std::vector<Member> members_;  // the router first
  bool ready_ = false;           // all of them were up once
  absl::Time begin_ = absl::Now();
};

absl::Status Serve::Run() {
  ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::Load(options_.model));
  std::cout << absl::StrFormat("model     %s (%s, %d layers)\n", options_.model, config.family,
                               config.layer_count());
  if (HasRandomWeights(options_.model)) {
    std::cout << "          its weights are RANDOM: answers are noise and show the path only\n";
  }
  std::cout << "logs      " << run_dir_.path() << "\n" << std::flush;
  RETURN_IF_ERROR(StartRouter());
  RETURN_IF_ERROR(AwaitPorts(members_.front()));
  const bool shards = config.experts > 0 && options_.experts > 0;
  RETURN_IF_ERROR(StartWorkers(members_.front().ports["grpc"]));
  for (int i = 0; shards && i < options_.experts; ++i) {
    RETURN_IF_ERROR(StartWorker(
        "expert", absl::StrFormat("expert-%d", i), members_.front().ports["grpc"],
        {"--shard=" + std::to_string(i), "--shards=" + std::to_string(options_.experts)}));
  }
  RETURN_IF_ERROR(AwaitReady());
  ready_ = true;
  PrintEndpoints(members_.front());
  RETURN_IF_ERROR(FirstAnswer(members_.front().ports["grpc"]));
  std::cout << "Ctrl-C stops everything.\n" << std::flush;
  for (;;) RETURN_IF_ERROR(Pause(absl::Seconds(1)));
}

absl::Status Serve::StartRouter() {
  members_.push_back({.name = "router", .ports = {}, .last_line = ""});
  std::string host = options_.host;  // IPv6 with brackets or without
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  std::vector<std::string> args = {"router",
                                   "--model=" + options_.model,
                                   "--listen=" + JoinHostPort(host, options_.grpc_port),
                                   "--http=" + JoinHostPort(host, options_.http_port),
                                   "--ports-file=" + ports_file("router"),
                                   "--parent=" + std::to_string(getpid())};
  if (!options_.model_name.empty()) args.push_back("--model-name=" + options_.model_name);
  if (threads() * (options_.prefill + options_.decode) > processors()) {
    args.push_back("--shared-processors");
  }
  args.insert(args.end(), options_.router_flags.begin(), options_.router_flags.end());
  return children_.Start("router", std::move(args));
}

absl::Status Serve::StartWorkers(const std::string& router) {
  std::vector<std::string> flags = options_.worker_flags;
  if (options_.experts == 0) flags.push_back("--local-experts");
  const std::pair<const char*, const std::string&> store[] = {
      {"--store-dir=", options_.store_dir},
      {"--store-gib=", options_.store_gib},
      {"--store-after-seconds=", options_.store_after_seconds},
      {"--store-s3=", options_.store_s3},
      {"--store-s3-gib=", options_.store_s3_gib}};
  for (const auto& [flag, value] : store) {
    if (!value.empty()) flags.push_back(flag + value);
  }
  for (int i = 0; i < options_.prefill; ++i) {
    RETURN_IF_ERROR(StartWorker("prefill", absl::StrFormat("prefill-%d", i), router, flags));
  }
  for (int i = 0; i < options_.decode; ++i) {
    RETURN_IF_ERROR(StartWorker("decode", absl::StrFormat("decode-%d", i), router, flags));
  }
  return absl::OkStatus();
}

absl::Status Serve::StartWorker(const std::string& role, const std::string& name,
                                const std::string& router, std::vector<std::string> more) {
  members_.push_back({.name = name, .ports = {}, .last_line = ""});
  std::vector<std::string> args = {role,
                                   "--model=" + options_.model,
                                   "--router=" + router,
                                   "--name=" + name,
                                   "--listen=127.0.0.1:0",
                                   "--http=127.0.0.1:0",
                                   "--transport-listen=127.0.0.1:0",
                                   "--threads=" + std::to_string(threads()),
                                   "--weights=" + options_.weights,
                                   "--activations=" + options_.activations,
                                   "--packed-dir=" + options_.packed_dir,
                                   absl::StrFormat("--packed-max-gib=%g", options_.packed_max_gib),
                                   "--drain-seconds=2",
                                   "--ports-file=" + ports_file(name),
                                   "--parent=" + std::to_string(getpid())};
  args.insert(args.end(), more.begin(), more.end());
  return children_.Start(name, std::move(args));
}

absl::Status Serve::Pause(absl::Duration wait) {
  if (const int signal_number = signals_.Wait(wait); signal_number != 0) {
    return Aborted("signal %d", signal_number);
  }
  const std::optional<Children::Exit> exit = children_.Reap();
  if (!exit) return absl::OkStatus();
  std::string text = absl::StrFormat("%s died: %s. Its last words:\n", exit->name, exit->how);
  for (const std::string& line : children_.Tail(exit->name, 15)) text += "  | " + line + "\n";
  if (!GoesOnWithout(exit->name)) return Unavailable("%s", text);
  std::cout << "\n" << text << "the mesh goes on without it\n" << std::flush;
  return absl::OkStatus();
}

// A prefill or decode worker may be lost while another of its role lives; the router and every expert shard
// are needed, and before all are up nothing may be missing.
bool Serve::GoesOnWithout(const std::string& name) {
  const std::string role = name.substr(0, name.find('-'));
  int left = 0;
  for (Member& member : members_) {
    if (member.name == name) member.lost = true;
    left += member.name.starts_with(role) && !member.lost ? 1 : 0;
  }
  return ready_ && (role == "prefill" || role == "decode") && left > 0;
}

absl::Status Serve::AwaitPorts(Member& member) {
  while (member.ports.empty()) {
    if (absl::Now() - begin_ > absl::Seconds(options_.ready_seconds)) {
      return DeadlineExceeded("%s: not up after %g s; see its log, or raise --ready-seconds",
                              member.name, options_.ready_seconds);
    }
    RETURN_IF_ERROR(Pause(absl::Milliseconds(50)));
    ShowProgress(member);
    member.ports = ReadKeyValues(ports_file(member.name));
  }
  return absl::OkStatus();
}

// The newest log line, once a second at most, while a process is not ready.
void Serve::ShowProgress(Member& member) {
  const std::vector<std::string> tail = children_.Tail(member.name, 1);
  if (tail.empty() || tail.front() == member.last_line || member.ready) return;
  member.last_line = tail.front();
  if (member.last_line.find("model.loading") != std::string::npos) {
    std::cout << absl::StrFormat("%-9s ", member.name) << Shorten(member.last_line) << "\n"
              << std::flush;
  }
}

absl::Status Serve::AwaitReady() {
  // The router is ready when its workers are: it comes last.
  std::vector<Member*> order;
  for (size_t i = 1; i < members_.size(); ++i) order.push_back(&members_[i]);
  order.push_back(&members_.front());
  for (Member* next : order) {
    Member& member = *next;
    RETURN_IF_ERROR(AwaitPorts(member));
    while (!IsServing(member.ports["grpc"])) {
      if (absl::Now() - begin_ > absl::Seconds(options_.ready_seconds)) {
        return DeadlineExceeded("%s: not ready after %g s; see its log, or raise --ready-seconds",
                                member.name, options_.ready_seconds);
      }
      RETURN_IF_ERROR(Pause(absl::Milliseconds(50)));
      for (Member& other : members_) ShowProgress(other);
    }
    member.ready = true;
    std::cout << absl::StrFormat("%-9s up after %.1f s   grpc %s   metrics http://%s/metrics\n",
                                 member.name, absl::ToDoubleSeconds(absl::Now() - begin_),
                                 member.ports["grpc"], member.ports["http"])
              << std::flush;
  }
  return absl::OkStatus();
}

void Serve::PrintEndpoints(const Member& router) const {
  const std::string http = router.ports.at("http");
  const std::string grpc = router.ports.at("grpc");
  std::cout << absl::StrFormat("\nready     http  http://%s/v1      grpc  %s\n\n", http, grpc)
            << "try\n  curl -sN http://" << http
            << "/v1/chat/completions -H 'content-type: application/json' \\\n"
            << "    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}], "
               "\"max_tokens\": 48, \"stream\": true}'\n"
            << "  " << OwnPath() << " call --router " << grpc << " \\\n"
            << "    '{\"chat\": {\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}, "
               "\"stop\": {\"max_tokens\": 48}}'\n"
            << "  " << OwnPath() << " chat --router " << grpc << "\n\n"
            << std::flush;
}

absl::Status Serve::FirstAnswer(const std::string& router) {
  if (options_.first_answer.empty()) return absl::OkStatus();
  std::cout << "> " << options_.first_answer << "\n";
  absl::Status interrupted;
  const absl::Status status = StreamFirstAnswer(router, options_.first_answer,
                                                options_.first_answer_tokens, std::cout, [&] {
                                                  if (interrupted.ok())
                                                    interrupted = Pause(absl::Milliseconds(1));
                                                  return !interrupted.ok();
                                                });
  RETURN_IF_ERROR(interrupted);
  if (!status.ok()) return Annotate(status, "the first answer failed");
  std::cout << "\n" << std::flush;
  return absl::OkStatus();
}

absl::Status CheckOptions(const ServeOptions& options) {
  if (options.decode < 1) return InvalidArgument("--decode: %d; use at least 1", options.decode);
  if (options.prefill < 0 || options.experts < 0) {
    return InvalidArgument("--prefill, --experts: %d, %d; use 0 or more", options.prefill,
                           options.experts);
  }
  return absl::OkStatus();
}

int Report(const absl::Status& status) {
  if (absl::IsAborted(status)) {
    std::cout << "\nstopping" << std::endl;
    return 0;
  }
  std::cerr << "\ndeltamesh serve: " << status.message() << std::endl;
  return 1;
}

}  // namespace

void AddServeFlags(CLI::App* app, ServeOptions* o) {
  app->add_option("--model", o->model,
                  "checkpoint folder (default: the one that comes with deltamesh)");
  app->add_option("--prefill", o->prefill, "prefill workers")->capture_default_str();
  app->add_option("--decode", o->decode, "decode workers")->capture_default_str();
  app->add_option("--experts", o->experts, "expert shards; 0: experts in each worker")
      ->capture_default_str();
  app->add_option("--threads", o->threads,
                  "threads of each worker's step loop; 0: one per processor, since those that have "
                  "work share the machine")
      ->check(WholeIn(0, 1024, "threads"))
      ->capture_default_str();
  app->add_option("--weights", o->weights, "width of matrices: as stored, or 8bit")
      ->check(CLI::IsMember({"stored", "8bit"}))
      ->capture_default_str();
  app->add_option("--activations", o->activations,
                  "inputs of 8-bit and MXFP4 matrices: float, or int8, which is faster")
      ->check(CLI::IsMember({"float", "int8"}))
      ->capture_default_str();
  app->add_option("--packed-dir", o->packed_dir,
                  "folder of the packed weights that workers share; auto: the user's cache folder, "
                  "off: none")
      ->capture_default_str();
  app->add_option(
         "--packed-max-gib", o->packed_max_gib,
         "packed weights in that folder, in 2^30 bytes; when more are packed, those that nobody "
         "uses are removed, the least recently used first")
      ->check(NumberIn(0, 1e6, "GiB"))
      ->capture_default_str();
  app->add_option("--host", o->host, "address the router listens on")->capture_default_str();
  app->add_option("--grpc-port", o->grpc_port, "router's gRPC port; 0: any free one")
      ->capture_default_str();
  app->add_option("--http-port", o->http_port, "router's HTTP port; 0: any free one")
      ->capture_default_str();
  app->add_option(
      "--worker-flag", o->worker_flags,
      "passed on to prefill and decode workers: --worker-flag=--slabs=8 (default: none)");
  app->add_option("--router-flag", o->router_flags,
                  "passed on to the router: --router-flag=--disaggregate=never (default: none)");
  app->add_option(
      "--store-dir", o->store_dir,
      "folder for states that rest, bounded in bytes; the workers share it (default: none)");
  app->add_option("--store-gib", o->store_gib,
                  "2^30 bytes that it may hold (default: the workers' own)");
  app->add_option("--store-after-seconds", o->store_after_seconds,
                  "seconds that a state rests until it is written (default: the workers' own)");
  app->add_option("--store-s3", o->store_s3,
                  "http(s)://host:port/bucket/prefix of an S3-compatible object store for states, "
                  "bounded in bytes "
                  "(default: none)");
  app->add_option("--store-s3-gib", o->store_s3_gib,
                  "2^30 bytes that it may hold (default: the workers' own)");
  app->add_option("--model-name", o->model_name, "as clients name it (default: the folder's name)");
  app->add_option("--first-answer", o->first_answer,
                  "stream an answer to this text once ready (default: none)");
  app->add_option("--first-answer-tokens", o->first_answer_tokens, "its most tokens")
      ->check(WholeIn(1, int64_t{1} << 40, "tokens"))
      ->capture_default_str();
  app->add_option("--run-dir", o->run_dir, "new folder for logs (default: a temporary one)");
  app->add_flag("--keep-run-dir", o->keep_run_dir, "leave the logs behind");
  app->add_option("--ready-seconds", o->ready_seconds, "longest wait until all processes are up")
      ->check(NumberIn(1e-3, 1e9, "seconds"))
      ->capture_default_str();
  app->add_option("--parent", o->parent, "end when this process dies")->group("");
}

int RunServe(ServeOptions options) {
  const SignalWaiter signals;
  if (options.model.empty()) {
    absl::StatusOr<std::string> shipped = ShippedModel();
    if (!shipped.ok()) return Report(shipped.status());
    options.model = *std::move(shipped);
  }
  if (options.parent != 0) DieWithParent(static_cast<pid_t>(options.parent));
  InitLog("serve", LogLevel::kInfo);
  absl::Status status = CheckOptions(options);
  if (!status.ok()) return Report(status);
  absl::StatusOr<std::unique_ptr<RunDir>> run_dir = RunDir::Create(options);
  if (!run_dir.ok()) return Report(run_dir.status());
  {
    Serve serve(options, signals, run_dir->get());
    status = serve.Run();
  }
  return Report(status);
}

}  // namespace deltamesh
