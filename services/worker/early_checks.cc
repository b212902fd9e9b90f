#include "services/worker/early_checks.h"

#include <cstdlib>

#include "runtime/base/status.h"
#include "runtime/store/s3_client.h"
#include "runtime/store/store_folder.h"

namespace deltamesh {

std::string ReadEnvironment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
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
  return StoreFolder::Open(flags.store_dir).status();
}

absl::Status CheckStoreName(const AttentionFlags& flags) {
  if (!flags.worker.name.empty()) return absl::OkStatus();
  const char* const store = !flags.store_dir.empty()  ? "--store-dir"
                            : !flags.store_s3.empty() ? "--store-s3"
                                                      : nullptr;
  if (store == nullptr) return absl::OkStatus();
  return InvalidArgument(
      "--name: is missing; with %s routers wait for the worker under its name, so give it one that "
      "stays the same when it is started again, such as --name=decode-0",
      store);
}

}  // namespace deltamesh
