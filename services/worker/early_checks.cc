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

}  // namespace deltamesh
