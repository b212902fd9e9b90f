// What the tests of the text layer share.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <sstream>
#include <string>

#include "runtime/text/json.h"
#include "runtime/text/tokenizer.h"

namespace deltamesh {

inline std::filesystem::path GoldenFolder(const std::string& family) {
  return std::filesystem::path(DELTAMESH_SOURCE_DIR) / "tests/data/golden" / (family + "_tiny");
}

inline Json GoldenJson(const std::string& family) {
  std::ifstream in(GoldenFolder(family) / "golden.json");
  return Json::parse(in);
}

inline std::unique_ptr<const Tokenizer> GoldenTokenizer(const std::string& family) {
  auto t = Tokenizer::Load(GoldenFolder(family));
  CHECK_OK(t.status());
  return *std::move(t);
}

inline std::string ReadAll(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

inline void WriteAll(const std::filesystem::path& path, std::string_view contents) {
  std::ofstream out(path, std::ios::binary);
  out.write(contents.data(), static_cast<std::streamsize>(contents.size()));
  CHECK(out.good(), "cannot write %s", path.string());
}

// A folder of this test's own, removed at the end.
class TempFolder {
 public:
  TempFolder() {
    std::string name = (std::filesystem::temp_directory_path() / "deltamesh_text_XXXXXX").string();
    CHECK(mkdtemp(name.data()) != nullptr, "mkdtemp");
    path_ = name;
  }
  ~TempFolder() { std::filesystem::remove_all(path_); }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// The text files of a golden checkpoint, copied so that a test can break them.
class BrokenCheckpoint {
 public:
  explicit BrokenCheckpoint(const std::string& family) {
    for (const char* name : {"tiktoken.model", "tokenizer_config.json", "config.json",
                             "generation_config.json", "chat_literals.json"}) {
      const auto from = GoldenFolder(family) / name;
      if (std::filesystem::exists(from)) WriteAll(path() / name, ReadAll(from));
    }
  }
  const std::filesystem::path& path() const { return folder_.path(); }
  void Edit(const std::string& name, const std::function<void(Json&)>& edit) {
    Json value = Json::parse(ReadAll(path() / name));
    edit(value);
    WriteAll(path() / name, value.dump());
  }

 private:
  TempFolder folder_;
};

inline void ExpectError(const absl::Status& status, absl::StatusCode code,
                        std::initializer_list<std::string> words) {
  EXPECT_EQ(status.code(), code) << status;
  for (const std::string& word : words) {
    EXPECT_NE(MessageOf(status).find(word), std::string::npos)
        << "no \"" << word << "\" in: " << MessageOf(status);
  }
}

// A string of characters that the split pattern treats in different ways, often in runs.
inline std::string RandomText(std::mt19937_64& rng, int most) {
  static const std::vector<std::string> kChars = {
      "a",      "b",    "Z",  "Q",      "é",
      "É",      "ǅ",    "ʰ",  "ª",      "\u0301",
      "中",     "文",   "々", "한",     "カ",
      "ー",     "、",   "1",  "２",     "Ⅷ",
      "½",      " ",    " ",  "\u00a0", "\u3000",
      "\t",     "\n",   "\r", "\u0085", "\u2028",
      "\u180e", "\x1c", "'",  "'s",     "'LL",
      "'ſ",     "'re",  ".",  "!",      "_",
      "👍",      "🏽", "Ё",  "ё",      "א",
      "क",      "ा",    "<|", "|>",     std::string(1, '\0')};
  std::string out;
  const int n = static_cast<int>(rng() % (most + 1));
  while (static_cast<int>(out.size()) < n) {
    const std::string& c = kChars[rng() % kChars.size()];
    const int repeat = rng() % 8 == 0 ? static_cast<int>(rng() % 6) : 1;
    for (int i = 0; i < repeat; ++i) out += c;
  }
  return out;
}

}  // namespace deltamesh
