#include "services/cli/inspect.h"

#include <iterator>
#include <map>

#include "runtime/base/checkpoint_marks.h"
#include "runtime/base/status.h"
#include "runtime/model/checkpoint.h"
#include "runtime/model/config.h"
#include "runtime/model/digest.h"
#include "runtime/model/tensor_plan.h"
#include "runtime/text/chat.h"
#include "runtime/text/tokenizer.h"
#include "services/common/quantities.h"

namespace deltamesh {
namespace {

// "1.42 TiB"; plain bytes below one KiB.
std::string Human(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(kUnits)) value /= 1024, ++unit;
  return absl::StrFormat("%.*f %s", unit == 0 ? 0 : 2, value, kUnits[unit]);
}

// Runs of equal layers: "1 KDA + dense, 2 KDA + MoE, 1 MLA + MoE, ...".
std::string LayerRuns(const ModelConfig& config) {
  std::string text;
  for (int64_t i = 0, next = 0; i < config.layer_count(); i = next) {
    const LayerKind& kind = config.layers[i];
    for (next = i; next < config.layer_count(); ++next) {
      const LayerKind& other = config.layers[next];
      if (other.mixer != kind.mixer || other.ffn != kind.ffn) break;
    }
    absl::StrAppendFormat(&text, "%s%d %s%s", text.empty() ? "" : ", ", next - i,
                          kind.mixer == MixerKind::kKda ? "KDA" : "MLA",
                          kind.ffn == FfnKind::kDense ? " dense" : "");
  }
  return text;
}

std::string Features(const ModelConfig& c) {
  std::string text = c.bounded_decay ? absl::StrFormat("decay bounded by %g", c.decay_lower_bound)
                                     : "unbounded decay";
  text += c.full_rank_gate ? ", full-rank KDA gate" : ", low-rank KDA gate";
  text += c.q_rank > 0 ? absl::StrFormat(", query rank %d", c.q_rank) : ", direct query";
  if (c.mla_gate) text += ", MLA gate";
  text += c.activation == kernels::Activation::kSitu ? ", SiTU" : ", SiLU";
  if (c.attn_res_block > 0)
    absl::StrAppendFormat(&text, ", attention residuals of %d", c.attn_res_block);
  if (c.tied_embeddings) text += ", tied embeddings";
  return text;
}

void PrintShape(const ModelConfig& c, std::ostream& out) {
  out << absl::StrFormat("layers        %d: %d KDA, %d MLA; %d dense, %d MoE\n", c.layer_count(),
                         c.CountMixer(MixerKind::kKda), c.CountMixer(MixerKind::kMla),
                         c.CountFfn(FfnKind::kDense), c.CountFfn(FfnKind::kMoe));
  out << "schedule      " << LayerRuns(c) << "\n";
  out << absl::StrFormat(
      "width         hidden %d, KDA %d x %d, MLA %d heads over %d + %d latent values\n", c.hidden,
      c.kda_heads, c.kda_dim, c.heads, c.kv_rank, c.rope);
  out << "features      " << Features(c) << "\n";
  if (c.experts > 0) {
    out << absl::StrFormat("experts       %d per layer, %d chosen, %d shared; rows of %d%s, %s\n",
                           c.experts, c.top_k, c.shared_experts, c.expert_width(),
                           c.latent > 0 ? " (latent)" : "", c.experts_mxfp4 ? "MXFP4" : "bf16");
  }
  out << absl::StrFormat("vocabulary    %s\n", Grouped(c.vocab));
  out << absl::StrFormat("context       %s tokens\n", Grouped(c.context_tokens));
}

void PrintSizes(const ModelConfig& config, const Checkpoint& checkpoint, std::ostream& out) {
  int64_t parameters = 0, total = 0;
  for (const ExpectedTensor& tensor : TensorPlan(config, DetectForms(config, checkpoint))) {
    parameters += tensor.parameters;
  }
  std::map<std::string_view, int64_t> by_dtype;
  for (const auto& [name, stored] : checkpoint.tensors()) {
    by_dtype[DTypeName(stored.view.dtype)] += std::ssize(stored.view.bytes);
    total += std::ssize(stored.view.bytes);
  }
  out << absl::StrFormat("parameters    %s (text model)\n", Grouped(parameters));
  out << absl::StrFormat("weights       %s bytes (%s) in %d tensors, %d files\n", Grouped(total),
                         Human(total), checkpoint.tensors().size(), checkpoint.files().size());
  for (const auto& [dtype, bytes] : by_dtype) {
    out << absl::StrFormat("  %-11s %s bytes\n", dtype, Grouped(bytes));
  }
  if (checkpoint.skipped_tensors() > 0) {
    out << absl::StrFormat("not loaded    %s bytes in %d tensors of the image path\n",
                           Grouped(checkpoint.skipped_bytes()), checkpoint.skipped_tensors());
  }
  const StateLayout layout = config.ToStateLayout();
  out << absl::StrFormat(
      "state         %s bytes per sequence (%s), of which %s move in a hand-off\n",
      Grouped(layout.slab_bytes()), Human(layout.slab_bytes()), Grouped(layout.snapshot_bytes()));
  out << absl::StrFormat("latents       %s bytes per token, %s per block of %d tokens\n",
                         Grouped(layout.block_bytes() / kBlockTokens),
                         Grouped(layout.block_bytes()), kBlockTokens);
}

// A model without a chat format can be completed, but the mesh answers chats: say what it lacks.
void PrintText(const std::string& folder, const Tokenizer& tokenizer, std::ostream& out) {
  const auto format = ChatFormat::Load(folder, tokenizer);
  out << absl::StrFormat("chat format   %s\n",
                         format.ok() ? "yes"
                                     : absl::StrFormat("NONE, a router refuses the model: %s",
                                                       MessageOf(format.status())));
}

}  // namespace

absl::Status RunInspect(const std::string& folder, std::ostream& out) {
  ASSIGN_OR_RETURN(const ModelConfig config, ModelConfig::Load(folder));
  ASSIGN_OR_RETURN(const std::shared_ptr<const Checkpoint> checkpoint, Checkpoint::Open(folder));
  RETURN_IF_ERROR(CheckTensors(config, *checkpoint));
  ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Load(folder));
  ASSIGN_OR_RETURN(const std::string digest, ModelDigest(*checkpoint));
  out << absl::StrFormat("family        %s\n", config.family);
  if (HasRandomWeights(folder))
    out << "WEIGHTS ARE RANDOM: the answers of this model mean nothing\n";
  PrintShape(config, out);
  PrintSizes(config, *checkpoint, out);
  PrintText(folder, *tokenizer, out);
  out << absl::StrFormat("digest        %s\n", digest);
  return absl::OkStatus();
}

}  // namespace deltamesh
