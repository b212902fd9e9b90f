// A bucket in memory that workers of a test share, and that can be made to fail.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "runtime/base/status.h"
#include "runtime/store/object_store.h"

namespace deltamesh::testing {

struct MemoryBucket {
  std::map<std::string, std::string> objects;
  std::map<std::string, int64_t> puts;  // by name
  std::string refuses;                  // calls of names that begin so; "": all, with `down`
  bool down = false;
  absl::Status as = Unavailable("answer 503");  // what calls get then
  int64_t calls = 0;
  std::function<void()> before_put_if;           // once: what another worker does just then
  std::function<void()> before_put, after_list;  // the same
  int64_t object_bytes_max = int64_t{1} << 40;
  absl::Duration opening;  // how long Open takes
};

class MemoryObjects final : public ObjectStore {
 public:
  explicit MemoryObjects(MemoryBucket* bucket) : bucket_(bucket) {}

  int64_t object_bytes_max() const override { return bucket_->object_bytes_max; }
  absl::Status Put(const std::string& name, ByteReader& body, const CancelCheck&) override {
    RETURN_IF_ERROR(Asked(name));
    if (body.size() > bucket_->object_bytes_max) {
      return ResourceExhausted("put %s: %d bytes", name, body.size());
    }
    if (bucket_->before_put) std::exchange(bucket_->before_put, nullptr)();
    std::string bytes(static_cast<size_t>(body.size()), 0);
    RETURN_IF_ERROR(body.ReadOne(0, std::as_writable_bytes(std::span(bytes))));
    bucket_->objects[name] = std::move(bytes);
    ++bucket_->puts[name];
    return absl::OkStatus();
  }
  // A version is the content.
  absl::Status PutIf(const std::string& name, ByteReader& body, const std::string& version,
                     const CancelCheck& cancelled) override {
    if (bucket_->before_put_if) std::exchange(bucket_->before_put_if, nullptr)();
    const auto found = bucket_->objects.find(name);
    const bool same = found == bucket_->objects.end() ? version.empty() : found->second == version;
    return same ? Put(name, body, cancelled) : absl::AbortedError("put " + name + ": answer 412");
  }
  absl::StatusOr<std::string> Get(const std::string& name, int64_t, const CancelCheck&,
                                  std::string* version = nullptr, std::string_view = {}) override {
    RETURN_IF_ERROR(Asked(name));
    const auto found = bucket_->objects.find(name);
    if (found == bucket_->objects.end()) return NotFound("get %s", name);
    if (version != nullptr) *version = found->second;
    return found->second;
  }
  // As long as it was listed, whatever is there by now.
  absl::StatusOr<std::unique_ptr<ByteReader>> Open(const std::string& name, int64_t bytes,
                                                   const CancelCheck&) override {
    RETURN_IF_ERROR(Asked(name));
    absl::SleepFor(bucket_->opening);
    const auto found = bucket_->objects.find(name);
    if (found == bucket_->objects.end()) return NotFound("get %s", name);
    const auto size = std::min(static_cast<size_t>(bytes), found->second.size());
    return std::make_unique<PiecesReader>(
        BytePieces{std::as_bytes(std::span(found->second)).first(size)});
  }
  absl::StatusOr<std::vector<ObjectInfo>> List(const std::string& prefix, int64_t,
                                               const CancelCheck&) override {
    if (bucket_->down && bucket_->refuses.empty()) return Unavailable("list: down");
    std::vector<ObjectInfo> out;
    for (const auto& [name, bytes] : bucket_->objects) {
      if (name.starts_with(prefix)) {
        out.push_back({name, static_cast<int64_t>(bytes.size()), absl::FromUnixSeconds(1)});
      }
    }
    if (bucket_->after_list) std::exchange(bucket_->after_list, nullptr)();
    return out;
  }
  absl::Status Remove(const std::string& name) override {
    RETURN_IF_ERROR(Asked(name));
    bucket_->objects.erase(name);
    return absl::OkStatus();
  }

 private:
  absl::Status Asked(const std::string& name) const {
    ++bucket_->calls;
    if (!bucket_->down || !name.starts_with(bucket_->refuses)) return absl::OkStatus();
    return Annotate(bucket_->as, name);
  }

  MemoryBucket* const bucket_;
};

}  // namespace deltamesh::testing
