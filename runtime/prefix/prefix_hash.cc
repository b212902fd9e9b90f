#include "runtime/prefix/prefix_hash.h"

#include <openssl/evp.h>

#include <algorithm>

#include "absl/strings/str_format.h"
#include "runtime/base/status.h"

namespace deltamesh {
namespace {

constexpr size_t kHashBytes = 32;
constexpr size_t kBlockInput = kHashBytes + 4 * kPrefixBlockTokens;

void AddNumber(std::vector<uint8_t>& out, uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<uint8_t>(value >> (8 * i)));
}

void AddText(std::vector<uint8_t>& out, std::string_view text) {
  AddNumber(out, text.size(), 8);
  out.insert(out.end(), text.begin(), text.end());
}

}  // namespace

std::string PrefixKey::Hex() const {
  std::string out;
  for (const uint8_t byte : bytes) out += absl::StrFormat("%02x", byte);
  return out;
}

std::string PrefixModel(std::string_view digest, uint32_t state_layout) {
  return absl::StrFormat("%s/%d", digest, state_layout);
}

// The algorithm and its context are kept: finding them costs as much as a block.
struct PrefixChain::Sha256 {
  void operator()(std::span<const uint8_t> in, std::array<uint8_t, kHashBytes>& out) {
    unsigned int size = 0;
    CHECK(EVP_DigestInit_ex2(context.get(), algorithm.get(), nullptr) == 1);
    CHECK(EVP_DigestUpdate(context.get(), in.data(), in.size()) == 1);
    CHECK(EVP_DigestFinal_ex(context.get(), out.data(), &size) == 1 && size == kHashBytes);
  }

  std::unique_ptr<EVP_MD, decltype(&EVP_MD_free)> algorithm{
      EVP_MD_fetch(nullptr, "SHA256", nullptr), &EVP_MD_free};
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context{EVP_MD_CTX_new(),
                                                                  &EVP_MD_CTX_free};
};

PrefixChain::PrefixChain(std::string_view model, std::string_view salt)
    : sha_(std::make_unique<Sha256>()) {
  constexpr std::string_view kName("deltamesh.prefix.1\0", 19);
  std::vector<uint8_t> seed(kName.begin(), kName.end());
  AddText(seed, model);
  AddText(seed, salt);
  CHECK(sha_->algorithm != nullptr && sha_->context != nullptr);
  (*sha_)(seed, hash_);
  open_.reserve(kBlockInput);
  open_.assign(hash_.begin(), hash_.end());
  for (size_t i = 8; i-- > 0;) tenant_ = tenant_ << 8 | hash_[i];
  tenant_ = std::max<uint64_t>(1, tenant_);
}

PrefixChain::PrefixChain(PrefixChain&&) noexcept = default;
PrefixChain& PrefixChain::operator=(PrefixChain&&) noexcept = default;
PrefixChain::~PrefixChain() = default;

void PrefixChain::Append(std::span<const TokenId> tokens) {
  keys_.reserve(keys_.size() + tokens.size() / kPrefixBlockTokens + 1);
  for (const TokenId token : tokens) {
    AddNumber(open_, static_cast<uint32_t>(token), 4);
    if (open_.size() == kBlockInput) Close();
  }
  tokens_ += static_cast<int64_t>(tokens.size());
}

void PrefixChain::Close() {
  (*sha_)(open_, hash_);
  PrefixKey& key = keys_.emplace_back();
  std::copy_n(hash_.begin(), key.bytes.size(), key.bytes.begin());
  open_.assign(hash_.begin(), hash_.end());
}

}  // namespace deltamesh
