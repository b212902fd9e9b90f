#include "runtime/model/digest.h"

#include <openssl/evp.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <vector>

#include "runtime/base/crc32c.h"
#include "runtime/base/status.h"
#include "runtime/base/thread_pool.h"
#include "runtime/model/json_reader.h"

namespace deltamesh {
namespace {

constexpr int64_t kTextBytesMax = int64_t{64} << 20;
constexpr std::string_view kTokenizerFiles[] = {"tiktoken.model", "tokenizer_config.json",
                                                "generation_config.json", "chat_literals.json"};

// SHA-256 over length-prefixed strings, so that no two inputs run together the same way.
class Hasher {
 public:
  Hasher() : context_(EVP_MD_CTX_new(), &EVP_MD_CTX_free) {
    CHECK(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
  }
  void Add(std::string_view text) {
    const uint64_t size = text.size();
    CHECK(EVP_DigestUpdate(context_.get(), &size, sizeof(size)) == 1);
    CHECK(EVP_DigestUpdate(context_.get(), text.data(), text.size()) == 1);
  }
  std::string Hex() {
    std::array<unsigned char, 32> sum{};
    unsigned int size = 0;
    CHECK(EVP_DigestFinal_ex(context_.get(), sum.data(), &size) == 1 && size == sum.size());
    std::string hex;
    for (const unsigned char byte : sum) hex += absl::StrFormat("%02x", byte);
    return hex;
  }

 private:
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

absl::Status AddFiles(const std::string& folder, Hasher& hasher) {
  const std::string config = folder + "/config.json";
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(config, kTextBytesMax));
  ASSIGN_OR_RETURN(const nlohmann::json parsed, ParseStrictJson(text, config));
  hasher.Add("config.json");
  hasher.Add(parsed.dump());  // objects are kept sorted by key
  for (const std::string_view name : kTokenizerFiles) {
    const std::string path = absl::StrFormat("%s/%s", folder, name);
    std::error_code ignored;
    if (!std::filesystem::exists(path, ignored)) continue;
    ASSIGN_OR_RETURN(const std::string content, ReadWholeFile(path, kTextBytesMax));
    hasher.Add(name);
    hasher.Add(content);
  }
  return absl::OkStatus();
}

void AddTensor(std::string_view name, const StoredTensor& tensor, Hasher& hasher) {
  hasher.Add(name);
  hasher.Add(absl::StrFormat("%s %s", DTypeName(tensor.view.dtype), ShapeText(tensor.view.shape)));
}

// CRC32C of each tensor, in their order.
std::vector<uint32_t> Checksums(const Checkpoint& checkpoint,
                                const std::function<void(int64_t, int64_t)>& progress,
                                int threads) {
  std::vector<std::span<const std::byte>> contents;
  int64_t all = 0, done = 0;
  for (const auto& [name, stored] : checkpoint.tensors()) {
    contents.push_back(stored.view.bytes);
    all += std::ssize(stored.view.bytes);
  }
  std::vector<uint32_t> sums(contents.size());
  ThreadPool pool(std::max(1, threads));
  constexpr int64_t kBatch = 32;  // tensors between two words of progress
  const auto count = std::ssize(contents);
  for (int64_t first = 0; first < count; first += kBatch) {
    if (progress) progress(done, all);
    const int64_t batch = std::min(kBatch, count - first);
    pool.ParallelFor(batch, 1, [&](int64_t begin, int64_t end) {
      for (auto i = static_cast<size_t>(first + begin); i < static_cast<size_t>(first + end); ++i) {
        sums[i] = Crc32c(contents[i]);
      }
    });
    for (int64_t i = first; i < first + batch; ++i)
      done += std::ssize(contents[static_cast<size_t>(i)]);
  }
  if (progress) progress(all, all);
  return sums;
}

// "deltamesh digest 2", the source, the digest and the CRC32C of these three lines.
std::string Record(const std::string& source, const std::string& digest) {
  const std::string text = absl::StrFormat("deltamesh digest 2\n%s\n%s\n", source, digest);
  return absl::StrFormat("%s%08x\n", text, Crc32c(std::as_bytes(std::span(text))));
}

constexpr size_t kHexDigits = 64;

// The digest in a record of `source`; empty when there is none fit to use.
std::string ReadRecord(const std::string& path, const std::string& source) {
  const size_t size = Record(source, std::string(kHexDigits, '0')).size();
  const auto text = ReadWholeFile(path, static_cast<int64_t>(size));
  if (!text.ok() || text->size() != size) return "";
  const std::string digest = text->substr(size - 9 - 1 - kHexDigits, kHexDigits);
  return *text == Record(source, digest) ? digest : "";
}

// Whole or not at all, also when several processes write.
absl::Status WriteRecord(const std::string& path, const std::string& text) {
  const std::string partial = absl::StrFormat("%s.%d", path, getpid());
  std::error_code error;
  std::filesystem::create_directories(std::filesystem::path(path).parent_path(), error);
  {
    std::ofstream out(partial, std::ios::binary);
    out << text << std::flush;
    if (!out) return Unavailable("%s: cannot be written", partial);
  }
  std::filesystem::rename(partial, path, error);
  if (error) return Unavailable("%s: cannot be put in place (%s)", path, error.message());
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ModelDigest(const Checkpoint& checkpoint,
                                        const std::function<void(int64_t, int64_t)>& progress,
                                        int threads) {
  Hasher hasher;
  hasher.Add("deltamesh model digest 2");
  RETURN_IF_ERROR(AddFiles(checkpoint.folder(), hasher));
  const std::vector<uint32_t> sums = Checksums(checkpoint, progress, threads);
  size_t next = 0;
  for (const auto& [name, stored] : checkpoint.tensors()) {
    AddTensor(name, stored, hasher);
    hasher.Add(absl::StrFormat("%08x", sums[next++]));
  }
  return hasher.Hex();
}

absl::StatusOr<std::string> SourceDigest(const Checkpoint& checkpoint) {
  Hasher hasher;
  hasher.Add("deltamesh source digest 1");
  RETURN_IF_ERROR(AddFiles(checkpoint.folder(), hasher));
  for (const auto& [name, stored] : checkpoint.tensors()) AddTensor(name, stored, hasher);
  for (size_t i = 0; i < checkpoint.files().size(); ++i) {
    hasher.Add(checkpoint.files()[i]);
    hasher.Add(checkpoint.FileVersion(i));
  }
  return hasher.Hex();
}

absl::StatusOr<std::string> RememberedModelDigest(const Checkpoint& checkpoint,
                                                  const std::string& source,
                                                  const LoadOptions& options) {
  const std::string& folder = options.packed.folder;
  if (folder.empty()) return ModelDigest(checkpoint, options.digest_progress, options.threads);
  const std::string path = absl::StrFormat("%s/%s.digest", folder, source.substr(0, 16));
  if (std::string known = ReadRecord(path, source); !known.empty()) return known;
  ASSIGN_OR_RETURN(std::string digest,
                   ModelDigest(checkpoint, options.digest_progress, options.threads));
  const absl::Status written = WriteRecord(path, Record(source, digest));
  if (!written.ok() && options.note) options.note(MessageOf(written));
  return digest;
}

std::string ServedDigest(const std::string& model_digest, WeightWidth weights,
                         Activations activations) {
  const bool as_is = activations == Activations::kFloat;
  if (weights == WeightWidth::kStored && as_is) return model_digest;
  Hasher hasher;
  hasher.Add("deltamesh served digest 1");
  hasher.Add(model_digest);
  hasher.Add(WeightWidthName(weights));
  if (!as_is) hasher.Add(ActivationsName(activations));
  return hasher.Hex();
}

}  // namespace deltamesh
