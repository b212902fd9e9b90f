// The tensors of a checkpoint folder under their text-model names: "language_model." is stripped,
// and what belongs to the image path is left out.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "runtime/model/safetensors.h"

namespace deltamesh {

struct StoredTensor {
  TensorView view;
  std::string file;       // file name within the folder
  std::string full_name;  // as stored
  std::string name;       // without "language_model."
};

// Immutable; keeps its files mapped.
class Checkpoint {
 public:
  // With an index every tensor must be in the shard the index names and nowhere else; without one
  // the folder must hold exactly one .safetensors file. Errors name file and tensor.
  static absl::StatusOr<std::shared_ptr<const Checkpoint>> Open(const std::string& folder);

  const std::string& folder() const { return folder_; }
  const std::vector<std::string>& files() const { return files_; }  // file names, ascending
  // Of files()[i] as it was mapped: changes when it is replaced.
  const std::string& FileVersion(size_t i) const { return mapped_[i]->version(); }
  const std::map<std::string, StoredTensor, std::less<>>& tensors() const { return tensors_; }
  int64_t skipped_tensors() const { return skipped_tensors_; }  // of the image path
  int64_t skipped_bytes() const { return skipped_bytes_; }

  // FAILED_PRECONDITION names a file that was changed since it was opened: what was read may be of neither.
  absl::Status CheckUnchanged() const;
  // Gives the pages read so far back to the system; they are read again when touched.
  void ReleasePages() const;
  // Null when there is no such tensor.
  const StoredTensor* Find(std::string_view name) const;

 private:
  Checkpoint() = default;
  absl::Status AddFile(const std::string& file);
  absl::Status CheckIndex(const std::map<std::string, std::string>& weight_map) const;

  std::string folder_;
  std::vector<std::string> files_;
  std::vector<std::shared_ptr<const SafetensorsFile>> mapped_;
  std::map<std::string, StoredTensor, std::less<>> tensors_;
  std::map<std::string, std::string> where_;  // stored name -> file; only while opening
  int64_t skipped_tensors_ = 0;
  int64_t skipped_bytes_ = 0;
};

}  // namespace deltamesh
