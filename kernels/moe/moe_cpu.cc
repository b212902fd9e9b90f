#include "kernels/moe/moe.h"

namespace deltamesh::kernels {

void Glu(const GluParams& p) { GluRef(p); }
void SigmoidGate(const SigmoidGateParams& p) { SigmoidGateRef(p); }
void Combine(const CombineParams& p) { CombineRef(p); }

}  // namespace deltamesh::kernels
