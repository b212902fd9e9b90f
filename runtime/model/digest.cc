#include "runtime/model/digest.h"

#include <openssl/evp.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>

#include "runtime/base/crc32c.h"
#include "runtime/base/status.h"
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

uint32_t ContentChecksum(std::string_view name, std::span<const std::byte> bytes) {
  const bool expert = name.find(".experts.") != std::string_view::npos;
  const auto size = std::ssize(bytes);
  if (size <= (expert ? kExpertWholeBytes : kWholeBytes)) return Crc32c(bytes);
  const int64_t pages = expert ? kExpertSamplePages : kSamplePages;
  uint32_t crc = 0;
  for (int64_t i = 0; i < pages; ++i) {
    const int64_t at = (size - kSamplePageBytes) * i / (pages - 1);  // the first and last included
    crc = Crc32c(bytes.subspan(static_cast<size_t>(at), kSamplePageBytes), crc);
  }
  return crc;
}

}  // namespace

absl::StatusOr<std::string> ModelDigest(const Checkpoint& checkpoint,
                                        const std::function<void(int64_t, int64_t)>& progress) {
  Hasher hasher;
  hasher.Add("deltamesh model digest 1");
  RETURN_IF_ERROR(AddFiles(checkpoint.folder(), hasher));
  checkpoint.ExpectScatteredReads(true);
  const auto all = std::ssize(checkpoint.tensors());
  int64_t done = 0;
  for (const auto& [name, stored] : checkpoint.tensors()) {
    if (progress) progress(done++, all);
    hasher.Add(name);
    hasher.Add(absl::StrFormat("%s %s %08x", DTypeName(stored.view.dtype),
                               ShapeText(stored.view.shape),
                               ContentChecksum(name, stored.view.bytes)));
  }
  checkpoint.ExpectScatteredReads(false);
  if (progress) progress(all, all);
  return hasher.Hex();
}

absl::StatusOr<std::string> SourceDigest(const Checkpoint& checkpoint,
                                         const std::string& model_digest) {
  Hasher hasher;
  hasher.Add("deltamesh source digest 1");
  hasher.Add(model_digest);
  for (const std::string& name : checkpoint.files()) {
    const std::string path = absl::StrFormat("%s/%s", checkpoint.folder(), name);
    struct stat info {};
    if (stat(path.c_str(), &info) != 0) return NotFound("%s: %s", path, std::strerror(errno));
    hasher.Add(name);
    hasher.Add(absl::StrFormat("%d %d.%09d %d.%09d", info.st_size, info.st_mtim.tv_sec,
                               info.st_mtim.tv_nsec, info.st_ctim.tv_sec, info.st_ctim.tv_nsec));
  }
  return hasher.Hex();
}

std::string ServedDigest(const std::string& model_digest, WeightWidth weights) {
  if (weights == WeightWidth::kStored) return model_digest;
  Hasher hasher;
  hasher.Add("deltamesh served digest 1");
  hasher.Add(model_digest);
  hasher.Add(WeightWidthName(weights));
  return hasher.Hex();
}

}  // namespace deltamesh
