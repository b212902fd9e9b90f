#include "runtime/store/object_states.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "runtime/base/log.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr std::string_view kStates = "states/";
constexpr int kParentsMax = 4096;                 // of one state
constexpr size_t kUnusableMax = size_t{1} << 16;  // names of objects that are not tried again

}  // namespace

std::string ObjectNameOf(const StoredState& s) {
  return absl::StrFormat("%s%s-%s-%d-%d-%d", std::string(kStates), s.key.Hex(),
                         s.from == 0 ? "root" : s.parent.Hex(), s.blocks, s.from,
                         static_cast<int>(s.kind));
}

bool ParseObjectName(std::string_view name, StoredState* s) {
  if (!name.starts_with(kStates)) return false;
  const std::vector<std::string> parts =
      absl::StrSplit(ToAbsl(name.substr(kStates.size())), absl::MaxSplits('-', 5));
  int kind = 0;
  if (parts.size() != 5 || !ParseKeyHex(parts[0], &s->key) ||
      !absl::SimpleAtoi(parts[2], &s->blocks) || !absl::SimpleAtoi(parts[3], &s->from) ||
      !absl::SimpleAtoi(parts[4], &kind)) {
    return false;
  }
  if (s->blocks < 1 || s->from < 0 || s->from > s->blocks || kind < 0 || kind >= kSnapshotKinds)
    return false;
  s->kind = static_cast<SnapshotKind>(kind);
  return s->from == 0 ? parts[1] == "root" : ParseKeyHex(parts[1], &s->parent);
}

// ---- what is there -------------------------------------------------------------------------------

void ObjectStates::Learn(const ObjectInfo& object) {
  StoredState state;
  if (ParseObjectName(object.name, &state)) {
    if (unusable_.contains(object.name)) return;
    state.bytes = object.bytes;
    state.used = object.modified;
    const StoredState* known = index_.Find(state.key);
    // Another worker put it anew. One of another name is another object, and both may be there.
    if (known != nullptr && known->bytes != object.bytes && ObjectNameOf(*known) == object.name) {
      index_.Remove(state.key);
      known = nullptr;
    }
    if (known == nullptr || !index_.Complete(state.key)) index_.Add(std::move(state));
  } else if (object.name.starts_with(kRecordObjects) && object.name != kRecordObjects) {
    // Consoles put an object of the folder's own name for a folder that is made: it is no record.
    const auto [found, added] = records_.try_emplace(object.name);
    Record& record = found->second;
    Group& group = groups_[std::string(RecordGroupOf(object.name))];
    group.records += added ? 1 : 0;
    group.bytes += object.bytes - record.bytes;
    record_bytes_ += object.bytes - record.bytes;
    record = {object.bytes, std::max(record.used, object.modified)};
  }
}

absl::Status ObjectStates::List() {
  {
    absl::MutexLock lock(&mu_);
    put_meanwhile_.emplace();
  }
  const auto states = store_->List(std::string(kStates), options_.objects_max, nullptr);
  const auto records =
      states.ok() ? store_->List(std::string(kRecordObjects), options_.objects_max, nullptr)
                  : states;
  absl::MutexLock lock(&mu_);
  const auto put = std::exchange(put_meanwhile_, std::nullopt).value_or(std::vector<ObjectInfo>());
  RETURN_IF_ERROR(records.status());
  absl::flat_hash_map<std::string, bool> there;
  for (const ObjectInfo& object : *states) there[object.name] = true;
  std::vector<PrefixKey> gone;
  index_.ForEach([&](const StoredState& state) {
    if (!there.contains(ObjectNameOf(state))) gone.push_back(state.key);
  });
  for (const PrefixKey& key : gone) index_.Remove(key);
  records_.clear();
  groups_.clear();
  record_bytes_ = 0;
  for (const auto* objects : {&*states, &*records, &put}) {
    for (const ObjectInfo& object : *objects) Learn(object);
  }
  return absl::OkStatus();
}

absl::Status ObjectStates::Look(const PrefixKey& key) {
  PrefixKey at = key;
  for (int i = 0; i < kParentsMax && !Has(at); ++i) {
    ASSIGN_OR_RETURN(const auto found, store_->List(std::string(kStates) + at.Hex(), 16, nullptr));
    if (found.empty()) return NotFound("no object of a state at %s", at.Hex());
    absl::MutexLock lock(&mu_);
    for (const ObjectInfo& object : found) Learn(object);
    const StoredState* state = index_.Find(at);
    if (state == nullptr || state->from == 0) break;
    at = state->parent;
  }
  return Has(key) ? absl::OkStatus()
                  : NotFound("not all objects of the state at %s are there", key.Hex());
}

absl::Status ObjectStates::Confirm(const PrefixKey& key) {
  std::vector<std::string> names;
  {
    absl::MutexLock lock(&mu_);
    if (!index_.Complete(key)) return NotFound("no object of a state at %s", key.Hex());
    for (const StoredPart& part : index_.Chain(key)) {
      names.push_back(ObjectNameOf(*index_.Find(part.file)));
    }
  }
  for (const std::string& name : names) {
    ASSIGN_OR_RETURN(const auto found, for_records().List(name, 16, nullptr));
    const bool there = std::any_of(found.begin(), found.end(),
                                   [&](const ObjectInfo& object) { return object.name == name; });
    if (there) continue;
    StoredState gone;
    CHECK(ParseObjectName(name, &gone));
    absl::MutexLock lock(&mu_);
    index_.Remove(gone.key);
    return NotFound("%s was removed", name);
  }
  return absl::OkStatus();
}

StoreMatch ObjectStates::Find(std::span<const PrefixKey> path) const {
  absl::MutexLock lock(&mu_);
  return index_.Match(path);
}

bool ObjectStates::Has(const PrefixKey& key) const {
  absl::MutexLock lock(&mu_);
  return index_.Complete(key);
}

// Of the blocks of a state a name tells only the last: they are no latents without gaps.
std::vector<StoreChange> ObjectStates::TakeChanges() {
  std::vector<StoreChange> changes;
  {
    absl::MutexLock lock(&mu_);
    changes = index_.TakeChanges();
  }
  std::erase_if(changes, [](const StoreChange& change) {
    return change.what == StoreChange::kBlockAdded || change.what == StoreChange::kBlockDropped;
  });
  return changes;
}

StoreStats ObjectStates::stats() const {
  absl::MutexLock lock(&mu_);
  StoreStats stats = stats_;
  stats.states = index_.size();
  stats.bytes = index_.bytes() + record_bytes_;
  stats.records = static_cast<int64_t>(records_.size());
  return stats;
}

// ---- states --------------------------------------------------------------------------------------

absl::Status ObjectStates::MakeRoom(ObjectStore& store, int64_t bytes) {
  for (;;) {
    std::string name;
    {
      absl::MutexLock lock(&mu_);
      if (index_.bytes() + record_bytes_ + being_put_ + bytes <= options_.bytes_max) {
        being_put_ += bytes;
        return absl::OkStatus();
      }
      const auto least = index_.Least(parent_of_put_);
      if (!least) {
        if (bytes == 0) return absl::OkStatus();  // it takes the place of as much
        return ResourceExhausted(
            "an object of %d bytes; the store holds at most %d, raise --store-s3-gib", bytes,
            options_.bytes_max);
      }
      name = ObjectNameOf(*index_.Find(*least));
      stats_.evicted_bytes += static_cast<uint64_t>(index_.Find(*least)->bytes);
      ++stats_.evicted;
      index_.Remove(*least);
    }
    RETURN_IF_ERROR(store.Remove(name));
  }
}

absl::Status ObjectStates::PutObject(const StoredState& state, ByteReader& bytes,
                                     const CancelCheck& cancelled) {
  int64_t room = 0;
  const auto put = [&]() -> absl::Status {
    if (bytes.size() > options_.bytes_max) {
      return ResourceExhausted(
          "an object of %d bytes; the store holds at most %d, raise --store-s3-gib", bytes.size(),
          options_.bytes_max);
    }
    // Before others go for it.
    if (bytes.size() > store_->object_bytes_max()) {
      return ResourceExhausted("an object of %d bytes; one of the store has at most %d",
                               bytes.size(), store_->object_bytes_max());
    }
    RETURN_IF_ERROR(MakeRoom(*store_, bytes.size()));
    room = bytes.size();
    return store_->Put(ObjectNameOf(state), bytes, cancelled);
  };
  const absl::Status status = put();
  absl::MutexLock lock(&mu_);
  parent_of_put_.clear();
  being_put_ -= room;
  if (!status.ok()) {
    ++stats_.write_failures;
    return status;
  }
  ++stats_.writes;
  stats_.written_bytes += static_cast<uint64_t>(bytes.size());
  unusable_.erase(ObjectNameOf(state));
  index_.Add(state);
  return absl::OkStatus();
}

absl::StatusOr<PutResult> ObjectStates::Put(const StateSource& source,
                                            const CancelCheck& cancelled) {
  // Another worker may have put it since the last listing, below another parent: once is enough.
  const absl::Status found = Look(source.path.back());
  if (!found.ok() && !absl::IsNotFound(found)) {
    absl::MutexLock lock(&mu_);
    ++stats_.write_failures;
    return found;
  }
  StoreIndex::Cover cover;
  {
    absl::MutexLock lock(&mu_);
    if (index_.Complete(source.path.back())) return PutResult();
    cover = index_.Covered(source.path);
    if (cover.blocks > 0) parent_of_put_ = {cover.file};  // from here on
  }
  const StateHeader header = MakeStateHeader(source, options_.identity, cover.blocks, cover.file);
  const std::string encoded = EncodeStateHeader(header);
  PiecesReader bytes(StatePieces(source, encoded, cover.blocks));
  StoredState state = StoredState::Of(header, clock_->Now(), 0);
  state.keys.clear();  // as another worker knows it
  RETURN_IF_ERROR(PutObject(state, bytes, cancelled));
  return PutResult{.written = true, .bytes = bytes.size(), .blocks = header.blocks - header.from};
}

absl::Status ObjectStates::PutFile(const StoredState& file, ByteReader& bytes,
                                   const CancelCheck& cancelled) {
  const absl::Status found = Look(file.key);
  if (found.ok() || !absl::IsNotFound(found)) return found;
  StoredState state = file;
  if (file.from > 0) {
    absl::MutexLock lock(&mu_);
    if (!index_.Complete(file.parent)) {
      return FailedPrecondition("the object of %s comes before that of its parent", file.key.Hex());
    }
    // The parent's object may begin deeper than its file does, where another worker put it in parts: what
    // leads to this file is then in one above. Readers go by the name.
    for (const StoredPart& part : index_.Chain(file.parent)) {
      state.parent = part.file;
      if (part.begin < file.from) break;
    }
    parent_of_put_ = {state.parent};
  }
  state.bytes = bytes.size();
  state.used = clock_->Now();
  state.version = 0;
  state.keys.clear();
  return PutObject(state, bytes, cancelled);
}

absl::StatusOr<int64_t> ObjectStates::Read(const StateTarget& target,
                                           const CancelCheck& cancelled) {
  const PrefixKey& key = target.path.back();
  std::vector<StoredPart> parts;
  {
    absl::MutexLock lock(&mu_);
    if (!index_.Complete(key)) {
      ++stats_.missed;
      return NotFound("no object of a state at %s", key.Hex());
    }
    parts = index_.Chain(key);
  }
  std::string name;
  int64_t bytes = 0;
  const PartRead read = ReadParts(
      parts, options_.identity, target,
      [&](const PrefixKey& file) -> absl::StatusOr<std::unique_ptr<ByteReader>> {
        {
          absl::MutexLock lock(&mu_);
          const StoredState* state = index_.Find(file);
          if (state == nullptr) return NotFound("no object of a state at %s", file.Hex());
          name = ObjectNameOf(*state);
          bytes = state->bytes;
        }
        return store_->Open(name, bytes, cancelled);
      },
      cancelled);
  if (!read.status.ok()) {
    if (!absl::IsCancelled(read.status)) Failed(read.status, read.file, name, bytes);
    return read.status;
  }
  absl::MutexLock lock(&mu_);
  for (const StoredPart& part : parts) index_.Touch(part.file, clock_->Now());
  ++stats_.reads;
  stats_.read_bytes += static_cast<uint64_t>(read.bytes);
  return read.bytes;
}

void ObjectStates::Count(const absl::Status& status, const std::string& name) {
  const std::optional<StoreRefusal> refusal = RefusalOf(status);
  if (refusal) LogWarning("store.refused", {{"object", name}, {"error", status.ToString()}});
  absl::MutexLock lock(&mu_);
  if (refusal) {
    ++stats_.refused[static_cast<size_t>(*refusal)];
  } else if (absl::IsNotFound(status)) {
    ++stats_.missed;
  } else {
    ++stats_.read_failures;
  }
}

// What another worker put anew since must not go for what was there before.
bool ObjectStates::IsStill(const std::string& name, int64_t bytes) {
  const auto found = store_->List(name, 16, nullptr);
  return found.ok() && std::any_of(found->begin(), found->end(), [&](const ObjectInfo& object) {
           return object.name == name && object.bytes == bytes;
         });
}

void ObjectStates::Failed(const absl::Status& status, const PrefixKey& key, const std::string& name,
                          int64_t bytes) {
  Count(status, name);
  const std::optional<StoreRefusal> refusal = RefusalOf(status);
  if (!refusal && !absl::IsNotFound(status)) return;
  const bool foreign = refusal && IsForeign(*refusal);
  const bool damaged = refusal && !foreign && IsStill(name, bytes);
  const bool stays = foreign || (damaged && !store_->Remove(name).ok());
  absl::MutexLock lock(&mu_);
  // The next listing has it again.
  if (stays && unusable_.size() < kUnusableMax) unusable_.insert(name);
  index_.Remove(key);
}

}  // namespace deltamesh
