#include "runtime/store/disk_store.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr std::string_view kStateSuffix = ".state";
constexpr int64_t kHeadersForRoom = 65536;  // new files that are looked at when room is made
constexpr size_t kEntriesAtOnce = 256;      // of a listing, between which others get the lock
constexpr int kWritesMax = 3;               // of one state whose parent others take away

bool KeyOfName(const std::string& name, PrefixKey* key) {
  return name.ends_with(kStateSuffix) &&
         ParseKeyHex(std::string_view(name).substr(0, name.size() - kStateSuffix.size()), key);
}

int64_t Sum(const std::vector<FolderEntry>& entries) {
  int64_t bytes = 0;
  for (const FolderEntry& entry : entries) bytes += entry.bytes;
  return bytes;
}

}  // namespace

absl::StatusOr<std::unique_ptr<DiskStore>> DiskStore::Open(DiskStoreOptions options,
                                                           const Clock* clock) {
  if (options.bytes_max <= 0) {
    return InvalidArgument("--store-gib: %d bytes for %s; give the store some room",
                           options.bytes_max, options.folder);
  }
  ASSIGN_OR_RETURN(std::unique_ptr<StoreFolder> folder,
                   StoreFolder::Open(options.folder, options.reserve, options.lock_max));
  {
    // A folder that can only be read serves what it has; every write to it will say so.
    const absl::StatusOr<FolderLock> lock = folder->Lock();
    if (lock.ok()) {
      if (const int64_t swept = folder->SweepLeftovers(); swept > 0) {
        LogInfo("store.swept", {{"folder", options.folder}, {"files", swept}});
      }
    } else {
      LogWarning("store.read_only",
                 {{"folder", options.folder}, {"error", lock.status().ToString()}});
    }
  }
  return std::unique_ptr<DiskStore>(new DiskStore(std::move(options), std::move(folder), clock));
}

// ---- what is there -------------------------------------------------------------------------------

bool DiskStore::Scan() {
  bool more = false;
  const auto listed = Survey(options_.headers_per_scan, &more);
  if (!listed.ok()) LogWarning("store.scan", {{"error", listed.status().ToString()}});
  return more;
}

absl::StatusOr<std::vector<FolderEntry>> DiskStore::Survey(int64_t headers, bool* more) {
  ASSIGN_OR_RETURN(std::vector<FolderEntry> entries, folder_->List());
  std::vector<std::pair<const FolderEntry*, PrefixKey>> states, fresh;
  absl::flat_hash_set<PrefixKey> there;
  for (const FolderEntry& entry : entries) {
    PrefixKey key;
    if (!KeyOfName(entry.name, &key)) continue;
    there.insert(key);
    states.emplace_back(&entry, key);
  }
  for (size_t begin = 0; begin < states.size(); begin += kEntriesAtOnce) {
    const size_t end = std::min(states.size(), begin + kEntriesAtOnce);
    absl::MutexLock lock(&mu_);
    for (size_t i = begin; i < end; ++i) {
      if (!Known(*states[i].first, states[i].second)) fresh.push_back(states[i]);
    }
  }
  {
    absl::MutexLock lock(&mu_);
    stats_.bytes = Sum(entries);
    stats_.records = CountRecords(entries);
    for (StoreIndex* index : {&index_, &foreign_}) {
      std::vector<PrefixKey> gone;
      index->ForEach([&](const StoredState& state) {
        if (!there.contains(state.key)) gone.push_back(state.key);
      });
      for (const PrefixKey& key : gone) index->Remove(key);
    }
  }
  *more = static_cast<int64_t>(fresh.size()) > headers;
  if (*more) fresh.resize(static_cast<size_t>(headers));
  for (const auto& [entry, key] : fresh) Learn(*entry, key);
  return entries;
}

bool DiskStore::Known(const FolderEntry& entry, const PrefixKey& key) {
  bool known = unusable_.contains(entry.name);
  for (StoreIndex* index : {&index_, &foreign_}) {
    const StoredState* state = index->Find(key);
    if (state == nullptr) continue;
    if (state->version == entry.version) {
      index->Touch(key, entry.used);
      known = true;
    } else {
      index->Remove(key);  // another process wrote it anew, perhaps below another parent
    }
  }
  return known;
}

void DiskStore::Learn(const FolderEntry& entry, const PrefixKey& key) {
  // What cannot be read further than its version stands alone, as far as this process knows.
  StoredState state;
  state.key = key;
  state.blocks = 1;
  state.bytes = entry.bytes;
  state.used = entry.used;
  state.version = entry.version;
  const auto look = [&]() -> absl::Status {
    ASSIGN_OR_RETURN(const auto reader, folder_->OpenFile(entry.name));
    ASSIGN_OR_RETURN(const StateHeader header, ReadStateHeader(*reader));
    state = StoredState::Of(header, entry.used, entry.version);
    return CheckStateHeader(header, options_.identity, key);
  };
  const absl::Status status = look();
  const std::optional<StoreRefusal> refusal = RefusalOf(status);
  const bool foreign = refusal && IsForeign(*refusal);
  if (status.ok() || foreign) {
    absl::MutexLock lock(&mu_);
    (foreign ? foreign_ : index_).Add(std::move(state));
    if (foreign) ++stats_.refused[static_cast<size_t>(*refusal)];
  } else if (!absl::IsNotFound(status)) {
    Failed(status, entry.name);
  }
}

void DiskStore::Count(const absl::Status& status, const std::string& name) {
  const std::optional<StoreRefusal> refusal = RefusalOf(status);
  if (!absl::IsNotFound(status)) {
    LogWarning(refusal ? "store.refused" : "store.unreadable",
               {{"file", name}, {"error", status.ToString()}});
  }
  absl::MutexLock lock(&mu_);
  if (refusal) {
    ++stats_.refused[static_cast<size_t>(*refusal)];
  } else if (absl::IsNotFound(status)) {
    ++stats_.missed;
  } else {
    ++stats_.read_failures;
  }
}

void DiskStore::Failed(const absl::Status& status, const std::string& name) {
  Count(status, name);
  const std::optional<StoreRefusal> refusal = RefusalOf(status);
  if (!refusal && !absl::IsNotFound(status)) return;
  // A foreign one is learned anew, as such, by the next survey.
  const bool remove = refusal && !IsForeign(*refusal);
  const absl::Status removed = remove ? folder_->Remove(name) : absl::OkStatus();
  absl::MutexLock lock(&mu_);
  if (!removed.ok()) unusable_.insert(name);
  PrefixKey key;
  if (KeyOfName(name, &key)) index_.Remove(key);
}

StoreMatch DiskStore::Find(std::span<const PrefixKey> path) const {
  absl::MutexLock lock(&mu_);
  return index_.Match(path);
}

bool DiskStore::Has(const PrefixKey& key) const {
  absl::MutexLock lock(&mu_);
  return index_.Complete(key);
}

std::vector<DiskStore::File> DiskStore::FilesOf(const PrefixKey& key) const {
  absl::MutexLock lock(&mu_);
  std::vector<File> files;
  if (!index_.Complete(key)) return files;
  for (const StoredPart& part : index_.Chain(key))
    files.push_back({part.file, *index_.Find(part.file)});
  std::reverse(files.begin(), files.end());
  return files;
}

absl::StatusOr<std::unique_ptr<ByteReader>> DiskStore::OpenState(const StoredState& state) {
  const std::string name = NameOf(state.key);
  const auto open = [&]() -> absl::StatusOr<std::unique_ptr<ByteReader>> {
    ASSIGN_OR_RETURN(std::unique_ptr<ByteReader> reader, folder_->OpenFile(name));
    ASSIGN_OR_RETURN(const StateHeader header, ReadStateHeader(*reader));
    RETURN_IF_ERROR(CheckStateHeader(header, options_.identity, state.key));
    if (header.from != state.from) return NotFound("%s was written anew", name);
    return reader;
  };
  absl::StatusOr<std::unique_ptr<ByteReader>> reader = open();
  if (!reader.ok()) Failed(reader.status(), name);
  return reader;
}

std::vector<PrefixKey> DiskStore::Resting(
    absl::Time before, double fill, size_t most,
    const std::function<bool(const StoredState&)>& wanted) const {
  absl::MutexLock lock(&mu_);
  const bool full =
      static_cast<double>(stats_.bytes) > fill * static_cast<double>(options_.bytes_max);
  std::vector<PrefixKey> resting;
  for (const PrefixKey& key : index_.Leaves(SIZE_MAX)) {
    if (!index_.Complete(key)) continue;
    const StoredState& state = *index_.Find(key);
    if ((!full && state.used > before) || !wanted(state)) continue;
    resting.push_back(key);
    if (resting.size() == most) break;
  }
  return resting;
}

std::vector<StoreChange> DiskStore::TakeChanges() {
  absl::MutexLock lock(&mu_);
  return index_.TakeChanges();
}

std::vector<StoreChange> DiskStore::Everything() const {
  absl::MutexLock lock(&mu_);
  return index_.Everything();
}

StoreStats DiskStore::stats() const {
  absl::MutexLock lock(&mu_);
  StoreStats stats = stats_;
  stats.states = index_.size();
  return stats;
}

// ---- room ----------------------------------------------------------------------------------------

bool DiskStore::EvictOneState(std::span<const PrefixKey> keep, int64_t* used) {
  PrefixKey key;
  int64_t bytes = 0;
  {
    absl::MutexLock lock(&mu_);
    const auto ours = index_.Least(keep), theirs = foreign_.Least(keep);
    if (!ours && !theirs) return false;
    const bool take_theirs = theirs && (!ours || foreign_.Worth(*theirs) < index_.Worth(*ours));
    StoreIndex& from = take_theirs ? foreign_ : index_;
    key = take_theirs ? *theirs : *ours;
    bytes = from.Find(key)->bytes;
    from.Remove(key);
    ++stats_.evicted;
    stats_.evicted_bytes += static_cast<uint64_t>(bytes);
  }
  const absl::Status removed = folder_->Remove(NameOf(key));
  if (!removed.ok()) {
    LogWarning("store.evict", {{"error", removed.ToString()}});
    absl::MutexLock lock(&mu_);
    unusable_.insert(NameOf(key));
  } else {
    *used -= bytes;
  }
  return true;
}

absl::Status DiskStore::MakeRoom(int64_t bytes, std::span<const PrefixKey> keep) {
  if (bytes > options_.bytes_max) {
    return ResourceExhausted("a file of %d bytes; the store holds at most %d, raise --store-gib",
                             bytes, options_.bytes_max);
  }
  bool more = false;
  ASSIGN_OR_RETURN(const std::vector<FolderEntry> entries, Survey(kHeadersForRoom, &more));
  int64_t used = Sum(entries);
  while (used + bytes > options_.bytes_max && EvictOneState(keep, &used)) {
  }
  {
    absl::MutexLock lock(&mu_);
    stats_.bytes = used;
  }
  if (bytes > 0 && used + bytes > options_.bytes_max) {
    return ResourceExhausted(
        "%d bytes are needed and %d of %d are held by records, files being written and "
        "files that cannot be removed; raise --store-gib",
        bytes, used, options_.bytes_max);
  }
  return absl::OkStatus();
}

absl::StatusOr<TemporaryFile> DiskStore::MakeFile(int64_t bytes, int64_t growth,
                                                  std::span<const PrefixKey> keep) {
  RETURN_IF_ERROR(MakeRoom(growth, keep));
  for (;;) {
    absl::StatusOr<TemporaryFile> file = folder_->Create(bytes, clock_->Now());
    // Others filled the disk: the bound that the folder was given is not to be had.
    int64_t used = 0;
    if (!IsDiskFull(file.status()) || !EvictOneState(keep, &used)) return file;
    absl::MutexLock lock(&mu_);
    stats_.bytes += used;
  }
}

// ---- states --------------------------------------------------------------------------------------

absl::StatusOr<PutResult> DiskStore::Put(const StateSource& source) {
  CHECK(!source.path.empty() && source.latents.size() == source.path.size(),
        "%d latents of %d blocks", source.latents.size(), source.path.size());
  absl::StatusOr<PutResult> result = PutOnce(source);
  // Another process took the parent away meanwhile.
  for (int tries = 1; tries < kWritesMax && absl::IsAborted(result.status()); ++tries)
    result = PutOnce(source);
  absl::MutexLock lock(&mu_);
  if (!result.ok()) {
    ++stats_.write_failures;
  } else if (result->written) {
    ++stats_.writes;
    stats_.written_bytes += static_cast<uint64_t>(result->bytes);
    stats_.bytes += result->bytes;
  }
  return result;
}

absl::StatusOr<PutResult> DiskStore::PutOnce(const StateSource& source) {
  const PrefixKey& key = source.path.back();
  StoreIndex::Cover cover;
  {
    absl::MutexLock lock(&mu_);
    if (index_.Complete(key)) {
      index_.Touch(key, clock_->Now());
      return PutResult();
    }
    cover = index_.Covered(source.path);
  }
  const StateHeader header = MakeStateHeader(source, options_.identity, cover.blocks, cover.file);
  const std::string encoded = EncodeStateHeader(header);
  const auto reserve = [&]() -> absl::StatusOr<TemporaryFile> {
    ASSIGN_OR_RETURN(const FolderLock lock, folder_->Lock());
    return MakeFile(header.file_bytes(), header.file_bytes(),
                    {&cover.file, cover.blocks > 0 ? size_t{1} : 0});
  };
  ASSIGN_OR_RETURN(TemporaryFile file, reserve());
  RETURN_IF_ERROR(file.Write(StatePieces(source, encoded, cover.blocks)));
  const absl::Time now = clock_->Now();
  FolderEntry entry;
  {
    ASSIGN_OR_RETURN(const FolderLock lock, folder_->Lock());
    if (cover.blocks > 0 && !folder_->Has(NameOf(cover.file))) {
      absl::MutexLock held(&mu_);
      index_.Remove(cover.file);
      return Aborted("%s was removed meanwhile", NameOf(cover.file));
    }
    ASSIGN_OR_RETURN(entry, folder_->Commit(std::move(file), NameOf(key), now));
    folder_->Flush().IgnoreError();  // without it a crash costs a recomputation
  }
  absl::MutexLock lock(&mu_);
  unusable_.erase(NameOf(key));
  foreign_.Remove(key);
  index_.Add(StoredState::Of(header, now, entry.version));
  return PutResult{
      .written = true, .bytes = header.file_bytes(), .blocks = header.blocks - header.from};
}

absl::StatusOr<int64_t> DiskStore::Read(const StateTarget& target,
                                        const std::function<bool()>& cancelled) {
  CHECK(!target.path.empty() && target.latents.size() == target.path.size(),
        "%d latents of %d blocks", target.latents.size(), target.path.size());
  const PrefixKey& key = target.path.back();
  std::vector<StoredPart> parts;
  {
    absl::MutexLock lock(&mu_);
    if (!index_.Complete(key)) {
      ++stats_.missed;
      return NotFound("no state at %s", key.Hex());
    }
    parts = index_.Chain(key);
  }
  const PartRead read = ReadParts(
      parts, options_.identity, target,
      [this](const PrefixKey& file) { return folder_->OpenFile(NameOf(file)); }, cancelled);
  if (!read.status.ok()) {
    if (!absl::IsCancelled(read.status)) Failed(read.status, NameOf(read.file));
    return read.status;
  }
  const absl::Time now = clock_->Now();
  for (const StoredPart& part : parts) folder_->Touch(NameOf(part.file), now);
  absl::MutexLock lock(&mu_);
  for (const StoredPart& part : parts) index_.Touch(part.file, now);
  ++stats_.reads;
  stats_.read_bytes += static_cast<uint64_t>(read.bytes);
  return read.bytes;
}

}  // namespace deltamesh
