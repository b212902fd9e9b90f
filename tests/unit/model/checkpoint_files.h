// A checkpoint folder that a test may damage: copied to a directory of its own, files editable in memory.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "nlohmann/json.hpp"

namespace deltamesh {

std::string GoldenFolder(std::string_view name);  // "kimi_k3_tiny"
std::string ReadFile(const std::string& path);
void WriteFile(const std::string& path, std::string_view content);

// One safetensors file taken apart.
struct ShardText {
  nlohmann::json header;
  std::string data;

  std::string Serialise() const;  // header, then data
};

// Removes its folder when it goes.
class CheckpointCopy {
 public:
  explicit CheckpointCopy(std::string_view golden);
  ~CheckpointCopy();

  const std::string& folder() const { return folder_; }
  std::string Path(std::string_view file) const { return folder_ + "/" + std::string(file); }

  void Remove(std::string_view file);
  void EditText(std::string_view file, const std::function<void(std::string&)>& edit);
  void EditJson(std::string_view file, const std::function<void(nlohmann::json&)>& edit);
  void EditShard(std::string_view file, const std::function<void(ShardText&)>& edit);
  // The file that holds a tensor, by its stored name.
  std::string FileOf(std::string_view tensor) const;
  // Hands the tensor's bytes to `edit`, which must keep their number.
  void EditTensor(std::string_view tensor, const std::function<void(std::string&)>& edit);
  // Replaces header entry and bytes of a tensor; the data goes to the end of its shard.
  void ReplaceTensor(std::string_view tensor, std::string_view dtype, std::vector<int64_t> shape,
                     std::string_view bytes);
  // Takes a tensor out of its shard and of the index.
  void DropTensor(std::string_view tensor);

 private:
  std::string folder_;
};

}  // namespace deltamesh
