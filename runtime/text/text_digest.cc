#include "runtime/text/text_digest.h"

#include <openssl/evp.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <memory>
#include <string_view>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr std::array<std::string_view, 5> kFiles = {"config.json", "tiktoken.model",
                                                    "tokenizer_config.json",
                                                    "generation_config.json", "chat_literals.json"};

// Each part is preceded by its length, so that no two lists of parts run together the same way.
void Add(EVP_MD_CTX* context, std::string_view part) {
  const uint64_t size = part.size();
  CHECK(EVP_DigestUpdate(context, &size, sizeof(size)) == 1);
  CHECK(EVP_DigestUpdate(context, part.data(), part.size()) == 1);
}

}  // namespace

absl::StatusOr<std::string> TextDigest(const std::filesystem::path& folder) {
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(),
                                                                        &EVP_MD_CTX_free);
  CHECK(context != nullptr && EVP_DigestInit_ex(context.get(), EVP_sha256(), nullptr) == 1);
  for (const std::string_view name : kFiles) {
    const std::filesystem::path path = folder / name;
    std::error_code error;
    if (!std::filesystem::exists(path, error)) {
      if (name != kFiles.front()) continue;
      return NotFound("%s: no such file; give the checkpoint's folder", path.string());
    }
    std::ifstream file(path, std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    if (!file) {
      return Unavailable("%s: cannot be read; check its permissions", path.string());
    }
    Add(context.get(), name);
    Add(context.get(), bytes);
  }
  std::array<unsigned char, 32> sum;
  unsigned int size = 0;
  CHECK(EVP_DigestFinal_ex(context.get(), sum.data(), &size) == 1 && size == sum.size());
  std::string hex;
  for (const unsigned char byte : sum) hex += absl::StrFormat("%02x", byte);
  return hex;
}

}  // namespace deltamesh
