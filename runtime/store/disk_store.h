// Snapshots and records in a folder that the processes of a machine share: everyone reads everything, files
// appear whole, and the folder never holds more than the bound, but for a record while it replaces another.
//
// Names: KEY.state with the key as 32 hex digits, NAME.record with NAME as RecordFileName. Whoever writes
// takes the folder's lock twice for a moment: to make room and reserve it, and to give the file its name
// when its parent is still there. Files without children go first, the least valuable of them
// (store_index.h), whoever wrote or used them.
//
// A state that is refused is removed and counted, and its name with it, except files of another model, layout
// or format: they are left to whoever they belong to, count against the bound and are evicted alike. When the
// disk is full before the bound is reached, states go as they do at the bound.
//
// A record is somebody's conversation: none is ever removed here, damaged or not. Beyond the bounds on
// records new ones are refused.
//
// Thread-safe. Calls marked "disk" wait for it; the others never do.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "runtime/base/clock.h"
#include "runtime/store/record_file.h"
#include "runtime/store/state_reader.h"
#include "runtime/store/store_folder.h"
#include "runtime/store/store_index.h"
#include "runtime/store/store_types.h"

namespace deltamesh {

struct DiskStoreOptions {
  std::string folder;
  int64_t bytes_max = 0;  // of all files together, those being written included but as above
  StateIdentity identity;
  int64_t records_max = kStoreRecordsDefault;
  int64_t records_bytes_max = int64_t{1} << 30;  // within bytes_max
  double record_group_share = 1;                 // of both, for one group of records
  int64_t headers_per_scan = 4096;
  ReserveSpace reserve = ReserveOnDisk;
  absl::Duration lock_max = StoreFolder::kLockMax;
};

class DiskStore {
 public:
  // Disk. Makes the folder and sweeps what a crash left. `clock` must outlive it.
  static absl::StatusOr<std::unique_ptr<DiskStore>> Open(DiskStoreOptions options,
                                                         const Clock* clock);

  // Disk. Learns of the files that others wrote and removed, at most headers_per_scan new ones; true when
  // there are more.
  bool Scan();

  // The deepest state along the path that can be read.
  StoreMatch Find(std::span<const PrefixKey> path) const;
  bool Has(const PrefixKey& key) const;

  // Disk. Writes what is not there yet, with all its latents that no other file has. RESOURCE_EXHAUSTED:
  // larger than the bound, or the disk is full and nothing can go. `cancelled` may be null.
  absl::StatusOr<PutResult> Put(const StateSource& source);
  // Disk. Reads the state at target.path.back(); how many bytes. NOT_FOUND: it is gone. A refusal
  // (refusal.h): what is damaged was removed.
  absl::StatusOr<int64_t> Read(const StateTarget& target, const std::function<bool()>& cancelled);

  // Disk. Replaces the record as a whole unless it `stays` (null: it does not): CheckReplaceable of
  // record_file.h. RESOURCE_EXHAUSTED: there are too many (CheckRecordRoom). `unsent` marks it for another
  // tier, before it has its name: the mark outlives crashes.
  absl::Status PutRecord(std::string_view name, std::string_view content,
                         const RecordStays& stays = nullptr, bool unsent = false);
  absl::StatusOr<std::string> GetRecord(std::string_view name);
  // Disk. Names of marked records, at most `most`; whether one is marked; and takes the mark off one, unless
  // its content is another than `sent` by now.
  std::vector<std::string> Unsent(size_t most) const;
  bool IsUnsent(std::string_view record) const;
  absl::Status MarkSent(std::string_view name, std::string_view sent);

  // For another tier: the files of a state, root first, and the bytes of one whose header is still as it was
  // learned (disk). As for Read: NOT_FOUND, it is gone or was written anew; refused, it was removed.
  struct File {
    PrefixKey key;
    StoredState state;
  };
  std::vector<File> FilesOf(const PrefixKey& key) const;
  absl::StatusOr<std::unique_ptr<ByteReader>> OpenState(const StoredState& state);
  // States without children that rested since `before`, and the next to go when the folder is fuller than
  // `fill` of its bound; at most `most` of those that are `wanted`.
  std::vector<PrefixKey> Resting(absl::Time before, double fill, size_t most,
                                 const std::function<bool(const StoredState&)>& wanted) const;

  // What can be found, as it changes.
  std::vector<StoreChange> TakeChanges();
  std::vector<StoreChange> Everything() const;

  StoreStats stats() const;
  const DiskStoreOptions& options() const { return options_; }

 private:
  DiskStore(DiskStoreOptions options, std::unique_ptr<StoreFolder> folder, const Clock* clock)
      : options_(std::move(options)), folder_(std::move(folder)), clock_(clock) {}

  static std::string NameOf(const PrefixKey& key) { return key.Hex() + ".state"; }
  static std::string NameOf(std::string_view record);
  static int64_t CountRecords(const std::vector<FolderEntry>& entries);

  absl::StatusOr<PutResult> PutOnce(const StateSource& source);
  // Lists the folder and brings the indexes up to date; reads at most `headers` headers of new files.
  absl::StatusOr<std::vector<FolderEntry>> Survey(int64_t headers, bool* more);
  // Whether an index has this very file; forgets another one of its name.
  bool Known(const FolderEntry& entry, const PrefixKey& key) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Learn(const FolderEntry& entry, const PrefixKey& key);
  // Under the folder's lock: removes files until `bytes` more fit; none more always do.
  absl::Status MakeRoom(int64_t bytes, std::span<const PrefixKey> keep);
  // The same for `growth`, and a file of `bytes`; on a full disk states go until it fits.
  absl::StatusOr<TemporaryFile> MakeFile(int64_t bytes, int64_t growth,
                                         std::span<const PrefixKey> keep);
  // RecordRoom's growth, if there is room.
  absl::StatusOr<int64_t> CheckRecordRoom(std::string_view name, int64_t bytes) const;
  bool EvictOneState(std::span<const PrefixKey> keep, int64_t* used);
  absl::StatusOr<std::string> ReadRecordFile(std::string_view name) const;
  absl::Status WriteRecord(std::string_view name, const std::string& bytes,
                           const RecordStays& stays, bool unsent);
  // Counts a refusal or another failure to read.
  void Count(const absl::Status& status, const std::string& name);
  // The same for a state, and removes what is damaged.
  void Failed(const absl::Status& status, const std::string& name);

  const DiskStoreOptions options_;
  const std::unique_ptr<StoreFolder> folder_;
  const Clock* const clock_;

  mutable absl::Mutex mu_;
  StoreIndex index_ ABSL_GUARDED_BY(mu_);
  StoreIndex foreign_ ABSL_GUARDED_BY(mu_){{}, /*tells=*/false};
  std::set<std::string> unusable_ ABSL_GUARDED_BY(mu_);  // refused, and could not be removed
  StoreStats stats_ ABSL_GUARDED_BY(mu_);
};

}  // namespace deltamesh
