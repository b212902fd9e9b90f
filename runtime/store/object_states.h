// Snapshots and records in an object store that every worker of a mesh shares.
//
// Names, below the configured prefix: states/KEY-PARENT-BLOCKS-FROM-KIND with keys as 32 hex digits (PARENT:
// "root" when FROM is 0), records/NAME. So a listing tells how states hang together, and one worker's
// objects are another's without any of them being opened. The objects are the files of a folder
// (state_file.h); PARENT may be another than the one in the file, where the bucket has that in parts.
//
// What is there is known from listings, at the start and now and then, and from what was put here; a state
// that another worker put since is found by a listing of the names that begin with its key (Look). The bounds
// therefore hold but for what others put since the last listing. Eviction removes what has no children, the
// least valuable first; last use is when an object was put, or read by this process.
//
// A state that is refused is removed, unless it is of another model, layout or format: then it is left, and
// not tried again. A record is never removed; beyond the bound on records new ones are refused.
//
// Find, Has, TakeChanges and stats are thread-safe; everything else blocks. Calls about records, and Confirm,
// may have a thread of their own (records_apart), so that they do not wait for states; all others belong to
// one thread.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "runtime/base/clock.h"
#include "runtime/store/object_store.h"
#include "runtime/store/record_file.h"
#include "runtime/store/state_reader.h"
#include "runtime/store/store_index.h"
#include "runtime/store/store_types.h"

namespace deltamesh {

struct ObjectStatesOptions {
  int64_t bytes_max = 0;  // of states and records
  StateIdentity identity;
  int64_t objects_max = int64_t{1} << 20;
  int64_t records_max = kStoreRecordsDefault;
  double record_group_share = 1;  // of both, for one group of records
};

class ObjectStates {
 public:
  // `clock` must outlive it. `records`: the same bucket once more, for calls about records; null: they go
  // through `store`, and belong to its thread.
  ObjectStates(ObjectStatesOptions options, std::unique_ptr<ObjectStore> store, const Clock* clock,
               std::unique_ptr<ObjectStore> records = nullptr)
      : options_(std::move(options)),
        store_(std::move(store)),
        records_store_(std::move(records)),
        clock_(clock) {}

  bool records_apart() const { return records_store_ != nullptr; }

  // Learns what is there.
  absl::Status List();
  // Learns whether there is a state at `key`, and its parents.
  absl::Status Look(const PrefixKey& key);
  // Looks whether the state at `key`, which Has, is still there. NOT_FOUND: others removed it; Has says so.
  absl::Status Confirm(const PrefixKey& key);

  StoreMatch Find(std::span<const PrefixKey> path) const;
  bool Has(const PrefixKey& key) const;

  // From memory, with all latents that no other object has.
  absl::StatusOr<PutResult> Put(const StateSource& source, const CancelCheck& cancelled);
  // A file as it is; its parent must be here already, in one object or in parts.
  absl::Status PutFile(const StoredState& state, ByteReader& file, const CancelCheck& cancelled);
  absl::StatusOr<int64_t> Read(const StateTarget& target, const CancelCheck& cancelled);

  // Replaces the record as a whole unless it `stays` (null: it does not): CheckReplaceable of record_file.h.
  absl::Status PutRecord(std::string_view name, std::string_view content,
                         const RecordStays& stays = nullptr);
  absl::StatusOr<std::string> GetRecord(std::string_view name);

  // States that Find began or ceased to know since the last call. Call often: they are kept until then.
  std::vector<StoreChange> TakeChanges();

  StoreStats stats() const;

 private:
  struct Record {
    int64_t bytes = 0;
    absl::Time used;
  };

  struct Group {
    int64_t records = 0, bytes = 0;
  };

  void Learn(const ObjectInfo& object) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  ObjectStore& for_records() { return records_apart() ? *records_store_ : *store_; }
  // Removes objects until `bytes` more fit, and counts these in being_put_; none more always do.
  absl::Status MakeRoom(ObjectStore& store, int64_t bytes);
  // The bytes that it made room for.
  absl::StatusOr<int64_t> MakeRecordRoom(std::string_view name, int64_t bytes);
  absl::StatusOr<std::string> ReadRecordObject(std::string_view name,
                                               std::string* version = nullptr);
  // `raced`: another worker put one meanwhile.
  absl::Status PutRecordOnce(std::string_view name, const std::string& encoded,
                             const RecordStays& stays, bool* raced);
  absl::Status PutObject(const StoredState& state, ByteReader& bytes, const CancelCheck& cancelled);
  // Counts a refusal or another failure to read.
  void Count(const absl::Status& status, const std::string& name);
  // The same for a state, and removes what is damaged; `bytes`: as it was known.
  void Failed(const absl::Status& status, const PrefixKey& key, const std::string& name,
              int64_t bytes);
  // The object is there and as long as it was known.
  bool IsStill(const std::string& name, int64_t bytes);

  const ObjectStatesOptions options_;
  const std::unique_ptr<ObjectStore> store_, records_store_;
  const Clock* const clock_;

  mutable absl::Mutex mu_;
  StoreIndex index_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_set<std::string> unusable_ ABSL_GUARDED_BY(mu_);
  // By file name; their bytes count as those of states do.
  absl::flat_hash_map<std::string, Record> records_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<std::string, Group> groups_ ABSL_GUARDED_BY(mu_);  // of them
  int64_t record_bytes_ ABSL_GUARDED_BY(mu_) = 0;
  // Bytes for which room was made and which are not there yet.
  int64_t being_put_ ABSL_GUARDED_BY(mu_) = 0;
  // Must stay until its child is there: set by who finds it, PutObject ends that.
  std::vector<PrefixKey> parent_of_put_ ABSL_GUARDED_BY(mu_);
  // While a listing is made: the records put since it began, which it may lack.
  std::optional<std::vector<ObjectInfo>> put_meanwhile_ ABSL_GUARDED_BY(mu_);
  StoreStats stats_ ABSL_GUARDED_BY(mu_);
};

inline constexpr std::string_view kRecordObjects = "records/";

// The name of a state's object, and what a name tells; false when it is none.
std::string ObjectNameOf(const StoredState& state);
bool ParseObjectName(std::string_view name, StoredState* state);

}  // namespace deltamesh
