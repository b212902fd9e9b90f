// The engine's sampling and outputs as messages of the mesh.
#pragma once

#include "deltamesh/mesh/mesh.pb.h"
#include "runtime/engine/engine.h"
#include "runtime/sampling/sampling_params.h"

namespace deltamesh {

SamplingParams ToParams(const mesh::Sampling& from);

// Everything but whose output it is. `scores`: with log-probabilities.
void FillOutput(const SequenceOutput& from, bool scores, mesh::SequenceOutput* to);

}  // namespace deltamesh
