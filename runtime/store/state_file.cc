#include "runtime/store/state_file.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "runtime/base/crc32c.h"

namespace deltamesh {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little-endian");

constexpr char kMagic[] = "DMSTATE\n";
constexpr int64_t kFixedBytes = 160;
constexpr int64_t kStateBlocksMax = int64_t{1} << 40;
constexpr int64_t kFirstRead = int64_t{64} << 10;  // most headers whole

int64_t Padded(int64_t bytes) { return (bytes + 7) / 8 * 8; }

template <typename T>
void Append(std::string& out, T value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void AppendKey(std::string& out, const PrefixKey& key) {
  out.append(reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size());
}

void Pad(std::string& out) {
  out.resize(static_cast<size_t>(Padded(static_cast<int64_t>(out.size()))));
}

// Takes fields in order from bytes that are known to hold them.
class Fields {
 public:
  explicit Fields(const std::byte* at) : at_(at) {}
  template <typename T>
  T Take() {
    T value;
    std::memcpy(&value, at_, sizeof(value));
    at_ += sizeof(value);
    return value;
  }
  PrefixKey Key() {
    PrefixKey key;
    std::memcpy(key.bytes.data(), at_, key.bytes.size());
    at_ += key.bytes.size();
    return key;
  }
  std::string Text(size_t bytes) {
    std::string text(reinterpret_cast<const char*>(at_), bytes);
    at_ += Padded(static_cast<int64_t>(bytes));
    return text;
  }

 private:
  const std::byte* at_;
};

int64_t HeaderBytes(int64_t model_bytes, int64_t blocks) {
  return kFixedBytes + Padded(model_bytes) + blocks * 16 + Padded(blocks * 4) + 8;
}

// The checksum is right, so what is wrong from here on was written wrong.
absl::StatusOr<StateHeader> Parse(std::span<const std::byte> bytes, int64_t size) {
  StateHeader h;
  Fields in(bytes.data() + 16);
  const auto file_bytes = in.Take<uint64_t>();
  h.blocks = in.Take<int64_t>();
  h.from = in.Take<int64_t>();
  h.key = in.Key();
  h.parent = in.Key();
  h.from_key = in.Key();
  const auto layout_version = in.Take<uint32_t>();
  const auto kind = in.Take<uint32_t>();
  StateLayout& layout = h.identity.layout;
  int64_t* const numbers[] = {&layout.kda_layers, &layout.heads, &layout.dim, &layout.conv_taps,
                              &layout.mla_layers, &layout.rank,  &layout.rope};
  for (int64_t* number : numbers) {
    *number = in.Take<int64_t>();
    if (*number < 0 || *number > int64_t{1} << 14) {
      return Refused(StoreRefusal::kBadHeader, "a layout with %d", *number);
    }
  }
  const auto model_bytes = in.Take<uint32_t>();
  h.slab_checksum = in.Take<uint32_t>();
  // Before any difference or product of them is formed.
  const bool in_range = h.blocks >= 1 && h.from >= 0 && h.from <= h.blocks &&
                        h.blocks <= kStateBlocksMax && model_bytes <= bytes.size();
  const int64_t owned = in_range ? h.blocks - h.from : 0;
  if (!in_range || owned > kStateHeaderBytesMax || kind >= kSnapshotKinds ||
      HeaderBytes(model_bytes, owned) != static_cast<int64_t>(bytes.size())) {
    return Refused(StoreRefusal::kBadHeader, "blocks %d to %d, kind %d, %d bytes of header", h.from,
                   h.blocks, kind, bytes.size());
  }
  h.kind = static_cast<SnapshotKind>(kind);
  h.identity.model = in.Text(model_bytes);
  for (int64_t i = 0; i < owned; ++i) h.keys.push_back(in.Key());
  for (int64_t i = 0; i < owned; ++i) h.checksums.push_back(in.Take<uint32_t>());
  if ((owned > 0 ? h.keys.back() : h.from_key) != h.key) {
    return Refused(StoreRefusal::kBadHeader, "the last block's key is not the file's");
  }
  if (layout_version != kStateLayoutVersion) {
    return Refused(StoreRefusal::kForeignLayout, "version %d; this is %d", layout_version,
                   kStateLayoutVersion);
  }
  if (static_cast<int64_t>(file_bytes) != h.file_bytes() || size != h.file_bytes()) {
    return Refused(StoreRefusal::kTruncated,
                   "%d bytes; the header says %d and its content needs %d", size, file_bytes,
                   h.file_bytes());
  }
  return h;
}

}  // namespace

bool ParseKeyHex(std::string_view text, PrefixKey* key) {
  if (text.size() != 32) return false;
  for (size_t i = 0; i < 32; ++i) {
    const char c = text[i];
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0) return false;
    uint8_t& byte = key->bytes[i / 2];
    byte = static_cast<uint8_t>(i % 2 == 0 ? digit << 4 : byte | digit);
  }
  return true;
}

uint32_t ChecksumOf(std::span<const std::byte> bytes) { return Crc32c(bytes); }

int64_t StateHeader::header_bytes() const {
  return HeaderBytes(static_cast<int64_t>(identity.model.size()), blocks - from);
}

std::string EncodeStateHeader(const StateHeader& h) {
  CHECK(h.from >= 0 && h.from <= h.blocks && h.blocks >= 1, "blocks %d to %d", h.from, h.blocks);
  const auto owned = static_cast<size_t>(h.blocks - h.from);
  CHECK(h.keys.size() == owned && h.checksums.size() == owned, "%d keys, %d checksums of %d blocks",
        h.keys.size(), h.checksums.size(), owned);
  CHECK(h.header_bytes() <= kStateHeaderBytesMax, "%d blocks", owned);
  std::string out(kMagic, 8);
  Append<uint32_t>(out, kStateFileVersion);
  Append<uint32_t>(out, static_cast<uint32_t>(h.header_bytes()));
  Append<uint64_t>(out, static_cast<uint64_t>(h.file_bytes()));
  Append<int64_t>(out, h.blocks);
  Append<int64_t>(out, h.from);
  AppendKey(out, h.key);
  AppendKey(out, h.parent);
  AppendKey(out, h.from_key);
  Append<uint32_t>(out, kStateLayoutVersion);
  Append<uint32_t>(out, static_cast<uint32_t>(h.kind));
  const StateLayout& l = h.identity.layout;
  for (const int64_t n :
       {l.kda_layers, l.heads, l.dim, l.conv_taps, l.mla_layers, l.rank, l.rope}) {
    Append<int64_t>(out, n);
  }
  Append<uint32_t>(out, static_cast<uint32_t>(h.identity.model.size()));
  Append<uint32_t>(out, h.slab_checksum);
  out += h.identity.model;
  Pad(out);
  for (const PrefixKey& key : h.keys) AppendKey(out, key);
  for (const uint32_t sum : h.checksums) Append(out, sum);
  Pad(out);
  Append<uint32_t>(out, 0);
  Append<uint32_t>(out, Crc32c(std::as_bytes(std::span(out))));
  CHECK(static_cast<int64_t>(out.size()) == h.header_bytes(), "%d bytes of header", out.size());
  return out;
}

absl::StatusOr<StateHeader> ReadStateHeader(ByteReader& reader) {
  const int64_t size = reader.size();
  if (size < kFixedBytes) {
    return Refused(StoreRefusal::kTruncated, "%d bytes, less than a header", size);
  }
  std::vector<std::byte> bytes(static_cast<size_t>(std::min(size, kFirstRead)));
  RETURN_IF_ERROR(reader.ReadOne(0, bytes));
  if (std::memcmp(bytes.data(), kMagic, 8) != 0) {
    return Refused(StoreRefusal::kBadMagic, "it does not begin with DMSTATE");
  }
  Fields in(bytes.data() + 8);
  if (const auto version = in.Take<uint32_t>(); version != kStateFileVersion) {
    return Refused(StoreRefusal::kBadVersion, "version %d; this reads %d", version,
                   kStateFileVersion);
  }
  const int64_t header = in.Take<uint32_t>();
  if (header < kFixedBytes + 8 || header > kStateHeaderBytesMax || header % 8 != 0) {
    return Refused(StoreRefusal::kBadHeader, "%d bytes of header", header);
  }
  if (header > size) {
    return Refused(StoreRefusal::kTruncated, "%d bytes, the header has %d", size, header);
  }
  const auto had = static_cast<int64_t>(bytes.size());
  bytes.resize(static_cast<size_t>(header));
  if (header > had) {
    RETURN_IF_ERROR(reader.ReadOne(had, std::span(bytes).subspan(static_cast<size_t>(had))));
  }
  uint32_t said;
  std::memcpy(&said, bytes.data() + header - 4, 4);
  const uint32_t found = Crc32c(std::span(bytes).first(static_cast<size_t>(header - 4)));
  if (said != found) {
    return Refused(StoreRefusal::kBadHeader, "checksum %08x, its bytes have %08x", said, found);
  }
  return Parse(bytes, size);
}

absl::Status CheckStateHeader(const StateHeader& h, const StateIdentity& identity,
                              const PrefixKey& key) {
  if (h.key != key) {
    return Refused(StoreRefusal::kWrongName, "it holds %s and is named %s", h.key.Hex(), key.Hex());
  }
  if (h.identity.model != identity.model) {
    return Refused(StoreRefusal::kForeignModel, "\"%s\"; this serves \"%s\"", h.identity.model,
                   identity.model);
  }
  if (h.identity.layout != identity.layout) {
    return Refused(StoreRefusal::kForeignLayout,
                   "a slab of %d bytes and blocks of %d; here %d and %d", h.slab_bytes(),
                   h.block_bytes(), identity.layout.snapshot_bytes(),
                   identity.layout.block_bytes());
  }
  return absl::OkStatus();
}

}  // namespace deltamesh
