// Named objects of some bytes that are put and got as a whole: an S3 bucket, or memory in tests.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "runtime/store/byte_reader.h"

namespace deltamesh {

struct ObjectInfo {
  std::string name;
  int64_t bytes = 0;
  absl::Time modified;
};

// Asked while a call runs; true ends it with CANCELLED. May be null.
using CancelCheck = std::function<bool()>;

// Calls block, each with a deadline of its own. Not thread-safe. Names hold letters, digits, '/', '-', '_'
// and '.' only. NOT_FOUND: the store itself said that it has no such object; it never comes from List.
class ObjectStore {
 public:
  virtual ~ObjectStore() = default;

  // What one object may have; a larger one is refused.
  virtual int64_t object_bytes_max() const = 0;
  virtual absl::Status Put(const std::string& name, ByteReader& body,
                           const CancelCheck& cancelled) = 0;
  // The same, if what has the name is still what Get told the version of ("": nothing has it); else ABORTED.
  // A store that cannot tell puts it all the same.
  virtual absl::Status PutIf(const std::string& name, ByteReader& body, const std::string& version,
                             const CancelCheck& cancelled) = 0;
  // All of it, as it was at one time; RESOURCE_EXHAUSTED beyond `bytes_max`. `version` (may be null) tells it
  // from what is put later, "" when that is not known. `magic`: what the object begins with unless it is
  // damaged; UNAVAILABLE when it does not and may have come from elsewhere, such as a proxy's page.
  virtual absl::StatusOr<std::string> Get(const std::string& name, int64_t bytes_max,
                                          const CancelCheck& cancelled,
                                          std::string* version = nullptr,
                                          std::string_view magic = {}) = 0;
  // `bytes`: its size, as listed. The reader asks for ranges, of whatever has the name by then, NOT_FOUND
  // when that has another size; it must not outlive this.
  virtual absl::StatusOr<std::unique_ptr<ByteReader>> Open(const std::string& name, int64_t bytes,
                                                           const CancelCheck& cancelled) = 0;
  // Names that begin with `prefix`, in their order; RESOURCE_EXHAUSTED beyond `most`.
  virtual absl::StatusOr<std::vector<ObjectInfo>> List(const std::string& prefix, int64_t most,
                                                       const CancelCheck& cancelled) = 0;
  // OK when there is none.
  virtual absl::Status Remove(const std::string& name) = 0;
};

}  // namespace deltamesh
