#include "services/worker/early_checks.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "runtime/base/status.h"
#include "runtime/store/s3_client.h"
#include "runtime/store/store_folder.h"
#include "services/common/address.h"

namespace deltamesh {
namespace {

constexpr size_t kNameBytesMax = 256;  // routers take no longer one

// Other forms, "dns:///router:8081" for one, are gRPC's to understand.
absl::Status CheckRouter(const std::string& router) {
  if (router.find("://") != router.npos || router.starts_with("unix:") ||
      router.starts_with("dns:")) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const auto at, ParseHostPort("--router", router));
  if (at.second > 0) return absl::OkStatus();
  return InvalidArgument("--router: \"%s\" has port 0; name the router's gRPC port", router);
}

absl::Status CheckStores(const AttentionFlags& flags, const EnvironmentReader& environment) {
  if (flags.store_dir.empty() && flags.store_s3.empty()) return absl::OkStatus();
  if (flags.cache_mib == 0) {
    return InvalidArgument(
        "--store-dir, --store-s3: states come from the prefix cache and go there; raise "
        "--cache-mib above 0");
  }
  if (!flags.store_s3.empty()) RETURN_IF_ERROR(ParseS3(flags.store_s3, environment).status());
  if (flags.store_dir.empty()) return absl::OkStatus();
  const absl::Status folder = StoreFolder::Open(flags.store_dir).status();
  if (folder.ok() || MessageOf(folder).starts_with("--store-dir")) return folder;
  return Annotate(folder, "--store-dir");
}

}  // namespace

std::string ReadEnvironment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

absl::Status CheckBeforeLoading(const WorkerFlags& flags) {
  if (flags.name.size() > kNameBytesMax) {
    return InvalidArgument("--name: %d bytes; use at most %d", flags.name.size(), kNameBytesMax);
  }
  for (const std::string& router : flags.routers) RETURN_IF_ERROR(CheckRouter(router));
  struct stat found;
  if (flags.packed_dir != "auto" && flags.packed_dir != "off" &&
      stat(flags.packed_dir.c_str(), &found) == 0 && !S_ISDIR(found.st_mode)) {
    return InvalidArgument("--packed-dir: \"%s\" is not a folder; name one, auto or off",
                           flags.packed_dir);
  }
  return CheckFileToWrite("--ports-file", flags.ports_file);
}

absl::Status CheckBeforeLoading(const AttentionFlags& flags, const EnvironmentReader& environment) {
  RETURN_IF_ERROR(CheckBeforeLoading(flags.worker));
  return CheckStores(flags, environment);
}

}  // namespace deltamesh
