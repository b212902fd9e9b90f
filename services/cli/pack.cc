#include "services/cli/pack.h"

#include <unistd.h>

#include <algorithm>
#include <thread>

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
  app->add_option("--threads", o->threads, "0: one per processor")->capture_default_str();
}

absl::Status RunPack(const PackOptions& options, std::ostream& out, std::ostream& notes) {
  if (options.packed_dir == "off") {
    return InvalidArgument("packed-dir: off leaves nowhere to pack to; name a folder, or auto");
  }
  LoadOptions load;
  const SystemClock clock;
  load.threads = options.threads > 0
                     ? options.threads
                     : std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  if (!ParseWeightWidth(options.weights, &load.weights)) {
    return InvalidArgument("weights: \"%s\" is no width; use stored or 8bit", options.weights);
  }
  load.packed.folder = options.packed_dir == "auto"
                           ? DefaultPackedFolder(options.model)
                           : PackedFolder(options.packed_dir, options.model);
  load.packed.required = true;
  load.progress = LoadProgress(&clock, &notes, isatty(STDERR_FILENO) != 0);
  load.digest_progress = load.progress;
  load.note = LoadNotes(&notes);
  ASSIGN_OR_RETURN(const std::unique_ptr<Model> model, Model::Load(options.model, load));
  const PackedReport& packed = model->packed();
  out << absl::StrFormat("%s %s (%d MiB)\n", packed.built ? "packed" : "checked", packed.path,
                         model->weight_bytes() >> 20);
  return absl::OkStatus();
}

}  // namespace deltamesh
