#include "services/common/flags.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "CLI/CLI.hpp"
#include "runtime/base/cpu_list.h"
#include "runtime/base/safe_message.h"
#include "runtime/base/status.h"
#include "services/common/flag_range.h"

namespace deltamesh {
namespace {

constexpr size_t kNameBytesMax = 256;  // routers take no longer one

// What gRPC can look up or open itself: "dns:router:8081", "dns:///router", "unix:/run/router".
constexpr std::string_view kTargetSchemes[] = {"dns:", "unix:", "unix-abstract:"};

// host:port, also after "ipv4:" or "ipv6:", or a target of these schemes that names something.
absl::Status CheckRouter(const std::string& router) {
  for (const std::string_view scheme : kTargetSchemes) {
    if (!router.starts_with(scheme)) continue;
    if (router.find_first_not_of('/', scheme.size()) != router.npos) return absl::OkStatus();
    return InvalidArgument("--router: \"%s\" names nothing after %s", router, scheme);
  }
  std::string_view address = router;
  if (address.starts_with("ipv4:") || address.starts_with("ipv6:")) address.remove_prefix(5);
  ASSIGN_OR_RETURN(const auto at, ParseHostPort("--router", address));
  if (at.second > 0) return absl::OkStatus();
  return InvalidArgument("--router: \"%s\" has port 0; name the router's gRPC port", router);
}

bool IsNameByte(unsigned char c) { return c > 0x20 && c < 0x7F; }

}  // namespace

void AddWorkerFlags(CLI::App* app, WorkerFlags* f) {
  app->add_option("--model", f->model, "checkpoint folder")->required();
  app->add_option("--router", f->routers, "routers to register with: host:port[,host:port...]")
      ->delimiter(',')
      ->required();
  app->add_option("--name", f->name,
                  "unique in the mesh, printable ASCII; with a store it must be given, and stay "
                  "the same after a restart "
                  "(default: role-host-pid)");
  app->add_option("--listen", f->listen, "gRPC address (health, reflection)")
      ->capture_default_str();
  app->add_option("--http", f->http, "HTTP address (/metrics, /healthz, /readyz)")
      ->capture_default_str();
  app->add_option("--transport-listen", f->transport_listen,
                  "HOST[:PORT[-LAST]] for large buffers (UCX). HOST: a name or address of this "
                  "machine; its network interface carries all transfers, so across machines name "
                  "the address the others reach. PORT-LAST: the first free port of a range to open "
                  "in a firewall; a single fixed PORT is busy for a minute after a crash; 0: any")
      ->capture_default_str();
  app->add_option("--transport-advertise", f->transport_advertise,
                  "name or address of this machine whose interface carries transfers when "
                  "--transport-listen is a wildcard (default: as listened)");
  app->add_option(
         "--transport-peers", f->transport_peers,
         "connections that carry large buffers, in and out: up to four to each worker that "
         "this one exchanges states with, and one to each expert shard")
      ->check(WholeIn(1, 65536, "connections"))
      ->capture_default_str();
  app->add_option("--threads", f->threads, "threads of the step loop")
      ->check(WholeIn(1, 1024, "threads"))
      ->capture_default_str();
  app->add_option("--cpus", f->cpus,
                  "CPUs that all threads of the process run on, 0-3,8; at least --threads of them "
                  "(default: those it was started on)");
  app->add_option(
         "--spin-us", f->spin_us,
         "microseconds a thread that ran out of work looks for more before it sleeps; 0: none")
      ->check(WholeIn(0, 1000000, "microseconds"))
      ->capture_default_str();
  app->add_option("--weights", f->weights, "width of matrices: as stored, or 8bit")
      ->check(CLI::IsMember({"stored", "8bit"}))
      ->capture_default_str();
  app->add_option("--activations", f->activations,
                  "inputs of 8-bit and MXFP4 matrices: float, or int8, which is faster")
      ->check(CLI::IsMember({"float", "int8"}))
      ->capture_default_str();
  app->add_option(
         "--packed-dir", f->packed_dir,
         "folder of packed weights that processes share; auto: the user's cache folder, off: none")
      ->capture_default_str();
  app->add_option(
         "--packed-max-gib", f->packed_max_gib,
         "packed weights in that folder, in 2^30 bytes; when more are packed, those that nobody "
         "uses are removed, the least recently used first")
      ->check(NumberIn(0, 1e6, "GiB"))
      ->capture_default_str();
  app->add_option("--drain-seconds", f->drain_seconds,
                  "longest wait for running requests after SIGTERM")
      ->check(NumberIn(0, 1e9, "seconds"))
      ->capture_default_str();
  app->add_option("--ports-file", f->ports_file, "write the chosen ports here (default: nowhere)");
  app->add_option("--parent", f->parent, "end when this process dies")->group("");
  app->add_option("--log-level", f->log_level, "debug, info, warning or error")
      ->check(CLI::IsMember({"debug", "info", "warning", "error"}))
      ->capture_default_str();
}

void NameInEnvironment(CLI::App* app) {
  for (CLI::Option* option : app->get_options()) {
    const bool for_people = !option->get_group().empty() && option != app->get_help_ptr();
    if (!for_people || option->get_lnames().empty()) continue;
    std::string name = "DELTAMESH_" + option->get_lnames().front();
    for (char& c : name) c = c == '-' ? '_' : static_cast<char>(std::toupper(c));
    option->envname(name);
  }
}

LogLevel ParseLogLevel(std::string_view name) {
  if (name == "debug") return LogLevel::kDebug;
  if (name == "warning") return LogLevel::kWarning;
  if (name == "error") return LogLevel::kError;
  return LogLevel::kInfo;
}

absl::Status CheckProcessName(std::string_view name) {
  if (name.size() > kNameBytesMax) {
    return InvalidArgument("--name: %d bytes; use at most %d", name.size(), kNameBytesMax);
  }
  const auto odd = std::find_if_not(name.begin(), name.end(), IsNameByte);
  if (odd == name.end()) return absl::OkStatus();
  return InvalidArgument(
      "--name: byte %d of \"%s\" is a blank, or not printable ASCII; leave it out",
      odd - name.begin() + 1, SafeMessage(name));
}

absl::Status FinishWorkerFlags(std::string_view role, WorkerFlags* flags) {
  RETURN_IF_ERROR(CheckListen("--listen", flags->listen));
  RETURN_IF_ERROR(CheckListen("--http", flags->http));
  const bool any =
      flags->transport_listen.starts_with("0.0.0.0") || flags->transport_listen.starts_with("[::]");
  if (any && flags->transport_advertise.empty()) {
    return InvalidArgument(
        "--transport-listen: %s names no interface that others reach; add --transport-advertise",
        flags->transport_listen);
  }
  if (flags->routers.empty()) return InvalidArgument("--router: none given; use host:port");
  ASSIGN_OR_RETURN(const std::vector<int> cpus, ParseCpuList(flags->cpus));
  if (!cpus.empty()) {
    if (std::ssize(cpus) < flags->threads) {
      return InvalidArgument(
          "--cpus: %s are fewer than --threads %d; name more, or use fewer threads", flags->cpus,
          flags->threads);
    }
    RETURN_IF_ERROR(BindThisThread(cpus));
  }
  struct stat info;
  if (stat(flags->model.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) {
    return InvalidArgument("--model: \"%s\" is not a folder", flags->model);
  }
  if (flags->name.empty()) {
    char host[256] = "host";
    gethostname(host, sizeof(host) - 1);
    flags->name = absl::StrFormat("%s-%s-%d", role, host, getpid());
    std::replace_if(
        flags->name.begin(), flags->name.end(), [](char c) { return !IsNameByte(c); }, '-');
  }
  RETURN_IF_ERROR(CheckProcessName(flags->name));
  for (const std::string& router : flags->routers) RETURN_IF_ERROR(CheckRouter(router));
  if (flags->packed_dir != "auto" && flags->packed_dir != "off" &&
      stat(flags->packed_dir.c_str(), &info) == 0 && !S_ISDIR(info.st_mode)) {
    return InvalidArgument("--packed-dir: \"%s\" is not a folder; name one, auto or off",
                           flags->packed_dir);
  }
  return CheckFileToWrite("--ports-file", flags->ports_file);
}

void PrintConfiguration(std::string_view title,
                        const std::vector<std::pair<std::string, std::string>>& values) {
  std::string text = absl::StrFormat("%s\n", title);
  for (const auto& [key, value] : values) text += absl::StrFormat("  %-22s %s\n", key, value);
  std::fputs(text.c_str(), stderr);
}

absl::Status CheckFileToWrite(std::string_view flag, const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  const std::string in = folder.empty() ? "." : folder.string();
  struct stat found;
  if (stat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode)) {
    return InvalidArgument("%s: \"%s\" is a folder; name a file", flag, path);
  }
  if (access(in.c_str(), W_OK | X_OK) == 0) return absl::OkStatus();
  return InvalidArgument("%s: \"%s\" cannot be written: %s: %s", flag, path, in, strerror(errno));
}

absl::Status WriteKeyValues(const std::string& path,
                            const std::vector<std::pair<std::string, std::string>>& values) {
  const std::string partial = path + ".partial";
  {
    std::ofstream out(partial, std::ios::trunc);
    for (const auto& [key, value] : values) out << key << '=' << value << '\n';
    out.flush();
    if (!out) return Unavailable("%s: cannot be written", partial);
  }
  if (std::rename(partial.c_str(), path.c_str()) != 0) {
    return Unavailable("%s: cannot be renamed to %s", partial, path);
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
