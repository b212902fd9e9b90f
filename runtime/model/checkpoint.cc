#include "runtime/model/checkpoint.h"

#include <algorithm>
#include <filesystem>
#include <set>

#include "runtime/base/status.h"
#include "runtime/model/json_reader.h"

namespace deltamesh {
namespace {

using nlohmann::json;
using WeightMap = std::map<std::string, std::string>;

constexpr std::string_view kIndexFile = "model.safetensors.index.json";
constexpr std::string_view kExtension = ".safetensors";
constexpr std::string_view kTextPrefix = "language_model.";
constexpr std::string_view kImagePrefixes[] = {"vision_tower.", "mm_projector."};
constexpr int64_t kIndexBytesMax = int64_t{512} << 20;

bool IsImageTensor(std::string_view name) {
  return std::any_of(std::begin(kImagePrefixes), std::end(kImagePrefixes),
                     [&](std::string_view prefix) { return name.starts_with(prefix); });
}

// Stored name -> file, as the index has it.
absl::StatusOr<WeightMap> ReadIndex(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadWholeFile(path, kIndexBytesMax));
  ASSIGN_OR_RETURN(const json parsed, ParseStrictJson(text, path));
  JsonReader reader(parsed, path, "");
  const json& entries = reader.Object("weight_map");
  RETURN_IF_ERROR(reader.status());
  WeightMap map;
  for (const auto& [tensor, file] : entries.items()) {
    if (!file.is_string())
      return InvalidArgument("%s: tensor %s: file is not a string", path, tensor);
    const std::string name = file.get<std::string>();
    if (!name.ends_with(kExtension) || name.find('/') != std::string::npos) {
      return InvalidArgument("%s: tensor %s: \"%s\" is not the name of a %s file in the folder",
                             path, tensor, name, kExtension);
    }
    map.emplace(tensor, name);
  }
  if (map.empty()) return InvalidArgument("%s: weight_map is empty", path);
  return map;
}

absl::StatusOr<std::string> FindSingleFile(const std::string& folder) {
  std::vector<std::string> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.ends_with(kExtension)) found.push_back(name);
  }
  if (error) return NotFound("%s: cannot be listed (%s)", folder, error.message());
  if (found.empty())
    return NotFound("%s: holds neither %s nor a %s file", folder, kIndexFile, kExtension);
  if (found.size() > 1) {
    return NotFound("%s/%s: is missing, and %d %s files need it", folder, kIndexFile, found.size(),
                    kExtension);
  }
  return found[0];
}

}  // namespace

absl::StatusOr<std::shared_ptr<const Checkpoint>> Checkpoint::Open(const std::string& folder) {
  std::shared_ptr<Checkpoint> checkpoint(new Checkpoint);
  checkpoint->folder_ = folder;
  const std::string index_path = absl::StrFormat("%s/%s", folder, kIndexFile);
  std::error_code ignored;
  if (!std::filesystem::exists(index_path, ignored)) {
    ASSIGN_OR_RETURN(const std::string file, FindSingleFile(folder));
    RETURN_IF_ERROR(checkpoint->AddFile(file));
    return std::shared_ptr<const Checkpoint>(std::move(checkpoint));
  }
  ASSIGN_OR_RETURN(const WeightMap map, ReadIndex(index_path));
  for (const auto& [tensor, file] : map) {
    if (!std::filesystem::exists(folder + "/" + file, ignored)) {
      return NotFound("%s/%s: is not there, but %s names it for tensor %s; fetch the missing file",
                      folder, file, kIndexFile, tensor);
    }
  }
  std::set<std::string> files;
  for (const auto& [tensor, file] : map) files.insert(file);
  for (const std::string& file : files) RETURN_IF_ERROR(checkpoint->AddFile(file));
  RETURN_IF_ERROR(checkpoint->CheckIndex(map));
  checkpoint->where_.clear();
  return std::shared_ptr<const Checkpoint>(std::move(checkpoint));
}

absl::Status Checkpoint::AddFile(const std::string& file) {
  ASSIGN_OR_RETURN(auto mapped, SafetensorsFile::Open(folder_ + "/" + file));
  for (const auto& [full_name, view] : mapped->tensors()) {
    const auto [it, fresh] = where_.emplace(full_name, file);
    if (!fresh) {
      return InvalidArgument("%s/%s: tensor %s is stored in %s too; remove one of them", folder_,
                             file, full_name, it->second);
    }
    if (IsImageTensor(full_name)) {
      ++skipped_tensors_;
      skipped_bytes_ += std::ssize(view.bytes);
      continue;
    }
    std::string name = full_name;
    if (name.starts_with(kTextPrefix)) name.erase(0, kTextPrefix.size());
    const auto [other, added] = tensors_.emplace(name, StoredTensor{view, file, full_name, name});
    if (!added) {
      return InvalidArgument("%s/%s: tensor %s is stored as %s in %s too", folder_, file, full_name,
                             other->second.full_name, other->second.file);
    }
  }
  files_.push_back(file);
  mapped_.push_back(std::move(mapped));
  return absl::OkStatus();
}

absl::Status Checkpoint::CheckIndex(const std::map<std::string, std::string>& weight_map) const {
  for (const auto& [tensor, file] : weight_map) {
    const auto it = where_.find(tensor);
    if (it == where_.end()) {
      return InvalidArgument("%s/%s: has no tensor %s, which %s places there; fetch the file again",
                             folder_, file, tensor, kIndexFile);
    }
    if (it->second != file) {
      return InvalidArgument("%s/%s: places tensor %s in %s, but %s holds it", folder_, kIndexFile,
                             tensor, file, it->second);
    }
  }
  for (const auto& [tensor, file] : where_) {
    if (!weight_map.contains(tensor)) {
      return InvalidArgument(
          "%s/%s: tensor %s is not in %s; index and files do not belong together", folder_, file,
          tensor, kIndexFile);
    }
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::CheckUnchanged() const {
  for (const auto& file : mapped_) RETURN_IF_ERROR(file->CheckUnchanged());
  return absl::OkStatus();
}

void Checkpoint::ReleasePages() const {
  for (const auto& file : mapped_) file->ReleasePages();
}

const StoredTensor* Checkpoint::Find(std::string_view name) const {
  const auto it = tensors_.find(name);
  return it == tensors_.end() ? nullptr : &it->second;
}

}  // namespace deltamesh
