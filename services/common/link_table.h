// The streams of one end of Mesh.Link that are alive, by the id each was given when it began.
//
// Thread-safe. A stream is in the table from before its first reaction until after its last one, so that the
// table's share of it is what keeps it alive.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "runtime/base/status.h"
#include "services/common/link.h"

namespace deltamesh {

template <typename Stream>
class LinkTable {
 public:
  // `make(id)` returns the new stream, a std::shared_ptr; it must not look into the table.
  template <typename Make>
  std::shared_ptr<Stream> Add(Make make) {
    absl::MutexLock lock(&mu_);
    const LinkId id = next_++;
    return streams_[id] = make(id);
  }

  // Null when it has ended.
  std::shared_ptr<Stream> Find(LinkId link) const {
    absl::MutexLock lock(&mu_);
    auto it = streams_.find(link);
    return it == streams_.end() ? nullptr : it->second;
  }

  // Takes a stream out, once.
  std::shared_ptr<Stream> Take(LinkId link) {
    absl::MutexLock lock(&mu_);
    auto it = streams_.find(link);
    CHECK(it != streams_.end());
    std::shared_ptr<Stream> stream = std::move(it->second);
    streams_.erase(it);
    return stream;
  }

  std::vector<std::shared_ptr<Stream>> All() const {
    absl::MutexLock lock(&mu_);
    std::vector<std::shared_ptr<Stream>> all;
    for (const auto& [id, stream] : streams_) all.push_back(stream);
    return all;
  }

 private:
  mutable absl::Mutex mu_;
  LinkId next_ ABSL_GUARDED_BY(mu_) = 1;
  absl::flat_hash_map<LinkId, std::shared_ptr<Stream>> streams_ ABSL_GUARDED_BY(mu_);
};

}  // namespace deltamesh
