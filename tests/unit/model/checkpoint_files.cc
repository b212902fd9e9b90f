#include "tests/unit/model/checkpoint_files.h"

#include <unistd.h>

#include <cstring>
#include <fstream>
#include <sstream>

#include "runtime/base/status.h"

namespace deltamesh {
namespace {

using nlohmann::json;
constexpr std::string_view kIndex = "model.safetensors.index.json";

ShardText ParseShard(const std::string& file) {
  uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof(length));
  return {json::parse(file.substr(8, length)), file.substr(8 + length)};
}

}  // namespace

std::string GoldenFolder(std::string_view name) {
  return std::string(DELTAMESH_SOURCE_DIR) + "/tests/data/golden/" + std::string(name);
}

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  CHECK(in.good(), "%s", path);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

void WriteFile(const std::string& path, std::string_view content) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(content.data(), static_cast<std::streamsize>(content.size()));
  CHECK(out.good(), "%s", path);
}

std::string ShardText::Serialise() const {
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::string file(sizeof(length), '\0');
  std::memcpy(file.data(), &length, sizeof(length));
  return file + text + data;
}

CheckpointCopy::CheckpointCopy(std::string_view golden) {
  std::string pattern =
      (std::filesystem::temp_directory_path() / "deltamesh-model-XXXXXX").string();
  CHECK(mkdtemp(pattern.data()) != nullptr, "%s", pattern);
  folder_ = pattern;
  for (const auto& entry : std::filesystem::directory_iterator(GoldenFolder(golden))) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with("golden.")) continue;
    WriteFile(Path(name), ReadFile(entry.path().string()));
  }
}

CheckpointCopy::~CheckpointCopy() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

void CheckpointCopy::Remove(std::string_view file) {
  CHECK(std::filesystem::remove(Path(file)), "%s", file);
}

void CheckpointCopy::EditText(std::string_view file,
                              const std::function<void(std::string&)>& edit) {
  std::string text = ReadFile(Path(file));
  edit(text);
  WriteFile(Path(file), text);
}

void CheckpointCopy::EditJson(std::string_view file, const std::function<void(json&)>& edit) {
  EditText(file, [&](std::string& text) {
    json value = json::parse(text);
    edit(value);
    text = value.dump();
  });
}

void CheckpointCopy::EditShard(std::string_view file, const std::function<void(ShardText&)>& edit) {
  EditText(file, [&](std::string& text) {
    ShardText shard = ParseShard(text);
    edit(shard);
    text = shard.Serialise();
  });
}

std::string CheckpointCopy::FileOf(std::string_view tensor) const {
  return json::parse(ReadFile(Path(kIndex)))["weight_map"].at(std::string(tensor));
}

void CheckpointCopy::EditTensor(std::string_view tensor,
                                const std::function<void(std::string&)>& edit) {
  EditShard(FileOf(tensor), [&](ShardText& shard) {
    const json& range = shard.header.at(std::string(tensor))["data_offsets"];
    const size_t begin = range[0], end = range[1];
    std::string bytes = shard.data.substr(begin, end - begin);
    edit(bytes);
    CHECK(bytes.size() == end - begin);
    shard.data.replace(begin, end - begin, bytes);
  });
}

void CheckpointCopy::ReplaceTensor(std::string_view tensor, std::string_view dtype,
                                   std::vector<int64_t> shape, std::string_view bytes) {
  EditShard(FileOf(tensor), [&](ShardText& shard) {
    const size_t begin = shard.data.size();
    shard.header[std::string(tensor)] = {{"dtype", std::string(dtype)},
                                         {"shape", shape},
                                         {"data_offsets", {begin, begin + bytes.size()}}};
    shard.data += bytes;
  });
}

void CheckpointCopy::DropTensor(std::string_view tensor) {
  EditShard(FileOf(tensor), [&](ShardText& shard) { shard.header.erase(std::string(tensor)); });
  EditJson(kIndex, [&](json& index) { index["weight_map"].erase(std::string(tensor)); });
}

}  // namespace deltamesh
