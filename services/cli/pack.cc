#include "services/cli/pack.h"

#include "CLI/CLI.hpp"
#include "runtime/base/clock.h"
#include "runtime/base/status.h"
#include "runtime/model/model.h"
#include "services/cli/load_progress.h"

namespace deltamesh {

void AddPackFlags(CLI::App* app, PackOptions* o) {
  app->add_option("folder", o->model, "checkpoint folder")->required();
  app->add_option("--weights", o->weights, "width of matrices: as stored, or 8bit")
      ->envname("DELTAMESH_WEIGHTS")
      ->check(CLI::IsMember({"stored", "8bit"}))
      ->capture_default_str();
  app->add_option("--packed-dir", o->packed_dir,
                  "folder to pack into, for the workers' flag of that name; auto: the user's cache")
      ->envname("DELTAMESH_PACKED_DIR")
      ->capture_default_str();
  app->add_option("--threads", o->threads, "0: one per processor")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
}

absl::Status RunPack(const PackOptions& options, std::ostream& out, std::ostream& notes) {
  if (options.packed_dir == "off" || options.packed_dir.empty()) {
    return InvalidArgument("packed-dir: \"%s\" leaves nowhere to pack to; name a folder, or auto",
                           options.packed_dir);
  }
  const SystemClock clock;
  ASSIGN_OR_RETURN(LoadOptions load,
                   ToolLoadOptions(options.model, options.threads, options.weights, "float",
                                   options.packed_dir, &clock, &notes));
  // Packing was asked for, so no model is too small for it and memory is no way out.
  if (options.packed_dir == "auto") load.packed.folder = DefaultPackedFolder(options.model);
  load.packed.required = true;
  ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, Model::Load(options.model, load));
  const PackedReport& packed = model->packed();
  out << absl::StrFormat("%s %s (%d MiB)\n", packed.built ? "packed" : "checked", packed.path,
                         model->weight_bytes() >> 20);
  return absl::OkStatus();
}

}  // namespace deltamesh
